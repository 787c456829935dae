"""How much replies have in common with those that people gave: BLEU and ROUGE-L.

What papers on ESConv report beside strategy accuracy. Words are those of sacrebleu's `13a` (punctuation
is cut off), in small letters.

- BLEU-n (Papineni et al. 2002, https://doi.org/10.3115/1073083.1073135) of the whole corpus: n-gram
  matches and lengths are summed over all replies first. BLEU-2 weighs runs of one and two words.
- ROUGE-L (Lin 2004, https://aclanthology.org/W04-1013): the longest common subsequence of words, as
  an F measure with beta = 1.2, the mean over replies. Published numbers on ESConv use that beta.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rapidfuzz.distance import LCSseq
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

from training.evaluation.metrics import Floats

ORDERS = (2, 4)
"""Which BLEU-n are reported."""
BETA = 1.2
"""Recall counts so many times as much as precision in ROUGE-L."""

_words = Tokenizer13a()


@dataclass(frozen=True)
class Overlap:
    """What each reply has in common with its reference; sums of rows give BLEU of any sample."""

    matches: Floats
    """Shape (replies, 4): runs of 1 to 4 words that the reference has too, clipped."""
    runs: Floats
    """Shape (replies, 4): all runs of the reply."""
    length: Floats
    """Words of each reply."""
    reference_length: Floats
    rouge_l: Floats
    """In [0, 1]."""

    def bleu(self, weights: Floats, order: int) -> Floats:
        """Return corpus-level BLEU in [0, 1] under each row of weights, shape (rows, replies)."""
        sums = [weights @ part for part in (self.matches, self.runs)]
        lengths = [weights @ part for part in (self.length, self.reference_length)]
        scores = [
            BLEU.compute_bleu(
                matches.tolist(),
                runs.tolist(),
                int(length),
                int(reference),
                smooth_method="exp",
                max_ngram_order=order,
            ).score
            for matches, runs, length, reference in zip(
                sums[0][:, :order], sums[1][:, :order], *lengths, strict=True
            )
        ]
        return np.array(scores) / 100


def overlap(replies: Sequence[str], references: Sequence[str]) -> Overlap:
    """Compare replies with references, pair by pair.

    Raises:
        ValueError: There are not as many of one as of the other, or none.

    Example:
        >>> found = overlap(["I am so sorry."], ["I am sorry."])
        >>> found.matches[0].tolist()  # "i", "am", "sorry", "."; "i am", "sorry ."
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
        runs=np.array([score.totals for score in scores], dtype=np.float64),
        length=np.array([score.sys_len for score in scores], dtype=np.float64),
        reference_length=np.array([score.ref_len for score in scores], dtype=np.float64),
        rouge_l=np.array(
            [rouge_l(*pair) for pair in zip(replies, references, strict=True)], dtype=np.float64
        ),
    )


def rouge_l(reply: str, reference: str) -> float:
    """Return ROUGE-L in [0, 1]; 0 if one of them has no words.

    Example:
        >>> round(rouge_l("the cat sat", "the cat sat down"), 3)  # P 1, R 3/4
        0.836
    """
    said, wanted = (_words(text.lower()).split() for text in (reply, reference))
    common = LCSseq.similarity(said, wanted)
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(wanted)
    return (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)
