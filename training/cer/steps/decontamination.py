"""Decontamination: leave out rows of the train split that reveal what `valid` and `test` hold.

Two kinds of rows are removed from `train`; `valid` and `test` stay as they are.

**Near-duplicates** of a dialogue in `valid` or `test`, by shared word 5-grams
(`training.data.near_duplicates`). Measured on the public files: a copy of a test dialogue with one
word inserted into each utterance is found for all 351 ESConv dialogues of `valid` and `test`, also
with every two turns merged (an earlier rule, which compared whole utterances, found none of them);
of half a dialogue with such insertions 350. Of DailyDialog's 800 test dialogues, many of which have
fewer than 15 5-grams left, 686 are found. None of ESConv's 910 train dialogues is flagged: the most
similar pair of different dialogues shares 4.5 % of its 5-grams. Of DailyDialog's 11,118 train
dialogues 623 are flagged.

**Role cards.** The role cards of ESC-Eval (Zhao et al. 2024, https://arxiv.org/abs/2406.14952) are
descriptions of a seeker that GPT-4 wrote from dialogues of ESConv, SMILE, EPITOME and others. Their
ids only number the cards (the first digit is the corpus), so the source dialogue is found by its
words. The `Problem` of a card is compared with the situation and the seeker's utterances of each
dialogue by BM25 (k1 = 1.2, b = 0.75), divided by the sum of the weights of the card's words. A
dialogue matches with a score of at least `CARD_SHARE` and at least 95 % of the card's best score.
All layouts of a matching source are removed. Cards of PsyQA are compared with SMILE, whose dialogues
are made from the questions of PsyQA. Several dialogues about one question share no source; the 95 %
rule and the near-duplicates find most of them.

Checked by hand on the public files: with ESConv's three splits, 79 of its 80 cards reach 0.3, and
about 69 of these point to the true source; the others point to a dialogue with the same trouble,
mostly a break-up (39 of ESConv's dialogues were not available, so some cards had no source). Of
SMILE 3,600 of 55,165 dialogues were available; about 19 of its 28 matches are right. The threshold
is low on purpose: a false match costs one train dialogue, a missed one contaminates a test.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from compeer_core.config import FrozenModel
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.row_files import write_rows
from training.cer.records import DroppedDialogue, SourceDialogue, StepReport
from training.common.progress import count_lines, track
from training.data.near_duplicates import HeldOut, Rule, plain_words
from training.data.records import read_records

CORPUS_OF_CARD: Mapping[str, str] = MappingProxyType(
    {"esconv": "esconv", "epitome": "epitome", "smile": "smile", "psyqa": "smile"}
)
"""By a card's `source`, without case. There is no loader for the others (ExTES, MHP, Psych)."""
LAYER = "leaks"
SOURCE_OF_CARD = "source of a role card"
_K1, _B = 1.2, 0.75
_PROBLEM = re.compile(r"(?:^|\n)\s*(?:Problem|问题)\s*[:：]\s*(.*)", re.DOTALL | re.IGNORECASE)
_CHINESE = re.compile(r"[\u3400-\u9fff]")
_ENDINGS = ("ingly", "edly", "ing", "ies", "ied", "ed", "es", "s", "ly", "e", "y")
_OF_CARDS = frozenset({"seeker", "user"})
"""What the cards call the person who seeks help."""


CARD_SHARE = 0.3
"""Least BM25 score of a match, as a share of the card's own weight."""
CARD_TIE = 0.95
"""Further matches need at least this share of the card's best score."""


class RoleCard(FrozenModel):
    """A description of a seeker, and the corpus that it was written from."""

    name: str
    corpus: str
    """A name of `LOADERS`' corpora; empty if there is no loader."""
    source: str
    """As the card spells it."""
    problem: str


def read_cards(paths: Iterable[Path]) -> list[RoleCard]:
    """Read files of role cards in the layout of ESC-Eval: an array with `base`, `source` and `id`.

    Raises:
        ConfigError: A file is missing or has another layout.
    """
    return [card for path in paths for card in _cards_of(path)]


def _cards_of(path: Path) -> list[RoleCard]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(entries, list):
            raise TypeError("not an array")
        return [
            RoleCard(
                name=f"{path.name}#{entry['id']}",
                corpus=CORPUS_OF_CARD.get(entry["source"].lower(), ""),
                source=entry["source"],
                problem=_problem_of(entry["base"]),
            )
            for entry in entries
        ]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: not an array of role cards with base, source and id") from error


def _problem_of(base: str) -> str:
    match = _PROBLEM.search(base)
    return match[1] if match else base


def decontaminate(
    source: Path, kept: Path, dropped: Path, rule: Rule, cards: Sequence[RoleCard] = ()
) -> StepReport:
    """Copy the dialogues, without those of `train` that repeat held-out ones or role cards.

    Reads the file twice, and once more if there are cards. Hashes of the held-out dialogues stay in
    memory.

    Args:
        source: Dialogues with a split, as `ingest.collect` writes them.
        kept: Receives the remaining `SourceDialogue` rows.
        dropped: Receives `DroppedDialogue` rows for the others.
        rule: When two dialogues are near-duplicates.
        cards: Role cards that an evaluation will use.
    """
    held_out = HeldOut(rule)
    split_of: dict[str, str] = {}
    words = _CardWords(cards)
    for dialogue in _read(source, "indexing held-out dialogues"):
        if dialogue.split != "train":
            split_of.setdefault(dialogue.source_id, dialogue.split or "")
            held_out.add(dialogue.source_id, _texts(dialogue), dialogue.language)
        words.count(dialogue)
    matches = _CardMatches(words)
    if words.cards:
        for dialogue in _read(source, "matching role cards"):
            matches.score(dialogue)
    card_of = matches.by_source()

    report = _Report()

    def remaining() -> Iterator[SourceDialogue]:
        for dialogue in _read(source, "decontaminating"):
            leak = None
            if dialogue.split == "train":
                leak = _leak(dialogue, card_of, held_out, split_of)
            if report.add(dialogue, leak):
                yield dialogue

    written = write_rows(kept, remaining())
    write_rows(dropped, report.dropped)
    return StepReport(
        step="leaks",
        read=report.read,
        written=written,
        dropped={corpus: dict(counts) for corpus, counts in sorted(report.reasons.items())},
        figures={
            "held-out dialogues repeated in train": len(report.repeated),
            **_card_figures(cards, matches),
        },
    )


def _read(path: Path, label: str) -> Iterator[SourceDialogue]:
    return track(
        read_records(path, SourceDialogue), label, total=count_lines(path), unit="dialogues"
    )


@dataclass(frozen=True)
class _Leak:
    reason: str
    of: str
    """The name of the card, or the held-out source."""


@dataclass
class _Report:
    read: int = 0
    reasons: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    dropped: list[DroppedDialogue] = field(default_factory=list)
    repeated: set[str] = field(default_factory=set)

    def add(self, dialogue: SourceDialogue, leak: _Leak | None) -> bool:
        """Count the dialogue; return whether it stays."""
        self.read += 1
        if leak is None:
            return True
        self.reasons[dialogue.corpus][leak.reason] += 1
        if leak.reason != SOURCE_OF_CARD:
            self.repeated.add(leak.of)
        self.dropped.append(
            DroppedDialogue(
                id=dialogue.id,
                corpus=dialogue.corpus,
                layer=LAYER,
                reason=leak.reason,
                detail=leak.of,
            )
        )
        return False


def _leak(
    dialogue: SourceDialogue,
    card_of: Mapping[str, str],
    held_out: HeldOut,
    split_of: Mapping[str, str],
) -> _Leak | None:
    card = card_of.get(dialogue.source_id)
    if card is not None:
        return _Leak(SOURCE_OF_CARD, card)
    repeated = held_out.repeated_by(_texts(dialogue), dialogue.language)
    if repeated is not None:
        return _Leak(f"near-duplicate of a {split_of[repeated]} dialogue", repeated)
    return None


def _texts(dialogue: SourceDialogue) -> list[str]:
    return [utterance.text for utterance in dialogue.utterances]


# --- Role cards -------------------------------------------------------------------------------


def terms(text: str) -> list[str]:
    """Return the terms of a text: stems of its words, and bigrams of its Chinese characters.

    Example:
        >>> terms("She studies; 很焦虑")
        ['she', 'stud', '很焦', '焦虑']
    """
    result = []
    for word in plain_words(text):
        if _CHINESE.search(word):
            result += [word[at : at + 2] for at in range(len(word) - 1)]
        else:
            result.append(_stem(word))
    return result


def _stem(word: str) -> str:
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word.removesuffix(ending)
    return word


def _of_the_seeker(dialogue: SourceDialogue) -> str:
    texts = (each.text for each in dialogue.utterances if each.speaker is Speaker.SEEKER)
    return "\n".join([dialogue.situation or "", *texts])


class _CardWords:
    """Document frequencies of the cards' terms, by corpus."""

    def __init__(self, cards: Iterable[RoleCard]) -> None:
        self.cards = [card for card in cards if card.corpus]
        self.with_term: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        """Indices of the cards that have a term, by corpus and term."""
        for number, card in enumerate(self.cards):
            for term in sorted(set(terms(card.problem)) - _OF_CARDS):
                self.with_term[card.corpus][term].append(number)
        self.documents: Counter[str] = Counter()
        self.lengths: Counter[str] = Counter()
        self.frequency: dict[str, Counter[str]] = defaultdict(Counter)

    def count(self, dialogue: SourceDialogue) -> None:
        corpus = dialogue.corpus
        if corpus not in self.with_term:
            return
        seeker_terms = terms(_of_the_seeker(dialogue))
        self.documents[corpus] += 1
        self.lengths[corpus] += len(seeker_terms)
        self.frequency[corpus].update(self.with_term[corpus].keys() & set(seeker_terms))

    def weight(self, corpus: str, term: str) -> float:
        """Return the inverse document frequency; 0 for a term of no dialogue."""
        count = self.frequency[corpus][term]
        if not count:
            return 0.0
        return math.log(1 + (self.documents[corpus] - count + 0.5) / (count + 0.5))


class _CardMatches:
    """The match of each source with each card."""

    def __init__(self, words: _CardWords) -> None:
        self._words = words
        self._weights = {
            corpus: {term: words.weight(corpus, term) for term in numbers}
            for corpus, numbers in words.with_term.items()
        }
        self._totals = [0.0] * len(words.cards)
        for corpus, numbers in words.with_term.items():
            for term, cards in numbers.items():
                for number in cards:
                    self._totals[number] += self._weights[corpus][term]
        self.shares: list[dict[str, float]] = [{} for _ in words.cards]
        """By card: the score of each source of at least `CARD_SHARE`."""

    def score(self, dialogue: SourceDialogue) -> None:
        words, corpus = self._words, dialogue.corpus
        if corpus not in words.with_term:
            return
        seeker_terms = terms(_of_the_seeker(dialogue))
        mean = words.lengths[corpus] / words.documents[corpus]
        damping = _K1 * (1 - _B + _B * len(seeker_terms) / mean)
        scores: dict[int, float] = defaultdict(float)
        numbers, weights = words.with_term[corpus], self._weights[corpus]
        for term, count in Counter(term for term in seeker_terms if term in numbers).items():
            weight = weights[term] * count * (_K1 + 1) / (count + damping)
            for number in numbers[term]:
                scores[number] += weight
        for number, score in scores.items():
            share = score / self._totals[number]
            if share >= CARD_SHARE:
                sources = self.shares[number]
                sources[dialogue.source_id] = max(share, sources.get(dialogue.source_id, 0.0))

    def by_source(self) -> dict[str, str]:
        """Return the card of each matching source, the best of several."""
        best: dict[str, tuple[float, str]] = {}
        for card, sources in zip(self._words.cards, self.shares, strict=True):
            least = CARD_TIE * max(sources.values(), default=0.0)
            for source, share in sources.items():
                if share >= least:
                    best[source] = max(best.get(source, (0.0, "")), (share, card.name))
        return {source: name for source, (_, name) in best.items()}

    def matched(self) -> Counter[str]:
        """Return the number of cards with a match, by the cards' own name of the corpus."""
        return Counter(
            card.source
            for card, sources in zip(self._words.cards, self.shares, strict=True)
            if sources
        )


def _card_figures(
    cards: Sequence[RoleCard], matches: _CardMatches
) -> dict[str, float | int | str | None]:
    if not cards:
        return {"role cards": "none given: their source dialogues are not removed"}
    matched = matches.matched()
    given = Counter(card.source for card in cards)
    loaded = {card.source for card in cards if card.corpus}
    return {
        "role cards": len(cards),
        **{
            f"role cards of {source}": f"{matched[source]} of {count} matched"
            if source in loaded
            else f"{count}, no loader for this corpus"
            for source, count in sorted(given.items())
        },
    }
