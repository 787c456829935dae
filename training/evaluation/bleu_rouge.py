"""BLEU and ROUGE-L of replies, with the corpus's replies as references.

These are the metrics that papers on ESConv report besides strategy accuracy. Text is lower-cased and
tokenised with sacrebleu's `13a`.

- BLEU-n (Papineni et al. 2002, https://doi.org/10.3115/1073083.1073135) at corpus level, with n-grams
  up to length n
- ROUGE-L (Lin 2004, https://aclanthology.org/W04-1013): F measure of the longest common subsequence of
  words with beta = 1.2, as in published results on ESConv; mean over replies
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rapidfuzz.distance import LCSseq
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

from compeer_core.stats import Floats

ORDERS = (2, 4)
"""The reported orders n of BLEU-n."""
BETA = 1.2
"""Weight of recall relative to precision in ROUGE-L."""

_words = Tokenizer13a()


@dataclass(frozen=True)
class Overlap:
    """Sufficient statistics per reply; weighted sums give the BLEU of any resample."""

    matches: Floats
    """Clipped matches of 1- to 4-grams, shape (replies, 4)."""
    ngrams: Floats
    """Numbers of 1- to 4-grams, shape (replies, 4)."""
    length: Floats
    """Words of each reply."""
    reference_length: Floats
    """Words of each reference."""
    rouge_l: Floats
    """In [0, 1]."""

    def bleu(self, weights: Floats, order: int) -> Floats:
        """Return corpus-level BLEU in [0, 1] for each row of weights, shape (rows, replies)."""
        counts = [(weights @ part)[:, :order] for part in (self.matches, self.ngrams)]
        lengths = [weights @ part for part in (self.length, self.reference_length)]
        scores = [
            BLEU.compute_bleu(
                matches.tolist(),
                ngrams.tolist(),
                int(length),
                int(reference),
                smooth_method="exp",
                max_ngram_order=order,
            ).score
            for matches, ngrams, length, reference in zip(*counts, *lengths, strict=True)
        ]
        return np.array(scores) / 100


def overlap(replies: Sequence[str], references: Sequence[str]) -> Overlap:
    """Compare each reply with its reference.

    Raises:
        ValueError: The numbers of replies and references differ, or are 0.

    Example:
        >>> overlap(["I am so sorry."], ["I am sorry."]).matches[0].tolist()  # 4 words, 2 bigrams
        [4.0, 2.0, 0.0, 0.0]
    """
    if len(replies) != len(references) or not replies:
        raise ValueError(f"{len(replies)} replies and {len(references)} references")
    bleu = BLEU(lowercase=True, effective_order=True)
    scores = [
        bleu.sentence_score(reply, [reference])
        for reply, reference in zip(replies, references, strict=True)
    ]
    return Overlap(
        matches=np.array([score.counts for score in scores], dtype=np.float64),
        ngrams=np.array([score.totals for score in scores], dtype=np.float64),
        length=np.array([score.sys_len for score in scores], dtype=np.float64),
        reference_length=np.array([score.ref_len for score in scores], dtype=np.float64),
        rouge_l=np.array(
            [rouge_l(*pair) for pair in zip(replies, references, strict=True)], dtype=np.float64
        ),
    )


def rouge_l(reply: str, reference: str) -> float:
    """Return ROUGE-L in [0, 1]; 0 if a text has no words.

    Example:
        >>> round(rouge_l("the cat sat", "the cat sat down"), 3)  # P 1, R 3/4
        0.836
    """
    words, reference_words = (_words(text.lower()).split() for text in (reply, reference))
    common = LCSseq.similarity(words, reference_words)
    if not common:
        return 0.0
    precision, recall = common / len(words), common / len(reference_words)
    return (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)
