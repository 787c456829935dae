"""What is tested must not have been trained on: rows of training that give a test away are left out.

Two kinds of rows are taken out of the split `train`; `valid` and `test` stay as they are.

**Near-duplicates.** A dialogue that says what a dialogue of `valid` or `test` says
(`training.data.near_duplicates`). Of the public DailyDialog 544 of 11,118 dialogues for training fall to
this, and 1 of ESConv; a single shared utterance of 8 words would have cost ESConv 51, most of them
for a greeting.

**Role cards.** The role cards of ESC-Eval (Zhao et al. 2024, https://arxiv.org/abs/2406.14952) are
descriptions of a seeker that GPT-4 wrote from dialogues of ESConv, SMILE, EPITOME and others. Their
ids only number the cards (the first digit is the corpus), so the dialogue is found by its words.
The `Problem` of a card is compared with the situation and the seeker's utterances of each dialogue
by BM25 (k1 = 1.2, b = 0.75), divided by the sum of the weights of the card's words; a dialogue
matches with at least `card_share` and at least 95 per cent of the card's best. The source of a
dialogue is what is left out, in all its layouts. Cards of PsyQA are compared with SMILE, whose
dialogues are made from the questions of PsyQA. Several dialogues of one question share no source;
the 95 per cent and the near-duplicates find most of them.

Checked by hand on the public files: with ESConv's three splits 79 of its 80 cards reach 0.3, and of
these about 69 show the very dialogue; the others show one with the same trouble, mostly a break-up
(39 of ESConv's dialogues were not at hand, so some cards had no source). Of SMILE 3,600 of 55,165
dialogues were at hand; of its 28 matches about 19 are right. The threshold is low on purpose: a wrong
match costs one dialogue for training, a missed one is a leak.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from pydantic import Field

from compeer_core.config import FrozenModel
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from training.cer.records import DroppedDialogue, SourceDialogue, StepReport
from training.common.progress import count_lines, track
from training.data.near_duplicates import HeldOut, Rule, plain_words
from training.data.samples import read_records, write_records

CORPUS_OF_CARD: Mapping[str, str] = MappingProxyType(
    {"esconv": "esconv", "epitome": "epitome", "smile": "smile", "psyqa": "smile"}
)
"""By a card's `source`, without case. There is no loader for the others (ExTES, MHP, Psych)."""
LAYER = "leaks"
OF_A_CARD = "the source of a role card"
_K1, _B = 1.2, 0.75
_PROBLEM = re.compile(r"(?:^|\n)\s*(?:Problem|问题)\s*[:：]\s*(.*)", re.DOTALL | re.IGNORECASE)
_CHINESE = re.compile(r"[\u3400-\u9fff]")
_ENDINGS = ("ingly", "edly", "ing", "ies", "ied", "ed", "es", "s", "ly", "e", "y")
_OF_CARDS = frozenset({"seeker", "user"})
"""Words that the cards use for the person who seeks help."""


class Settings(Rule):
    """When a row of training gives a test away."""

    card_share: float = Field(default=0.3, gt=0)
    """The least BM25 of a dialogue that matches a card, as a share of the card's own weight."""
    card_tie: float = Field(default=0.95, gt=0, le=1)
    """How near to the card's best match another one must come to count as well."""


class RoleCard(FrozenModel):
    """A description of a seeker to be played, and the dialogues it may be made from."""

    name: str
    corpus: str
    """One of our corpora; empty where there is no loader for it."""
    source: str
    """As the card names it."""
    problem: str


def read_cards(paths: Iterable[Path]) -> list[RoleCard]:
    """Read files of role cards in the layout of ESC-Eval: an array with `base`, `source` and `id`.

    Raises:
        ConfigError: A file is missing or of another layout.
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
    found = _PROBLEM.search(base)
    return found[1] if found else base


def exclude_leaks(
    source: Path, kept: Path, dropped: Path, settings: Settings, cards: Sequence[RoleCard] = ()
) -> StepReport:
    """Copy the dialogues except those of training that give a test away.

    Reads the file twice, and once more for cards. What is remembered are hashes of the long
    utterances of `valid` and `test`.

    Args:
        source: Dialogues with a split, as `collecting.collect` writes them.
        kept: Where the others go.
        dropped: Where the names of those left out go (`DroppedDialogue`).
        settings: What counts.
        cards: Role cards that testing will use; without any none are looked for.
    """
    held_out = HeldOut(settings)
    split_of: dict[str, str] = {}
    words = _CardWords(cards)
    for dialogue in _read(source, "reading what is tested"):
        if dialogue.split != "train":
            split_of.setdefault(dialogue.source_id, dialogue.split or "")
            held_out.add(dialogue.source_id, _said(dialogue), dialogue.language)
        words.count(dialogue)
    matches = _CardMatches(words, settings)
    if words.cards:
        for dialogue in _read(source, "looking for role cards"):
            matches.score(dialogue)
    of_cards = matches.by_source()

    report = _Report()

    def others() -> Iterator[SourceDialogue]:
        for dialogue in _read(source, "leaving out what is tested"):
            reason = None
            if dialogue.split == "train":
                reason = _reason(dialogue, of_cards, held_out, split_of)
            if report.add(dialogue, reason):
                yield dialogue

    written = write_records(kept, others())
    write_records(dropped, report.dropped)
    return StepReport(
        step="leaks",
        read=report.read,
        written=written,
        dropped={corpus: dict(counts) for corpus, counts in sorted(report.reasons.items())},
        figures={
            "held-out dialogues that training repeated": len(report.repeated),
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


@dataclass
class _Report:
    read: int = 0
    reasons: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    dropped: list[DroppedDialogue] = field(default_factory=list)
    repeated: set[str] = field(default_factory=set)

    def add(self, dialogue: SourceDialogue, leak: _Leak | None) -> bool:
        """Count the dialogue, and tell whether it is kept."""
        self.read += 1
        if leak is None:
            return True
        self.reasons[dialogue.corpus][leak.reason] += 1
        if leak.reason != OF_A_CARD:
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


def _reason(
    dialogue: SourceDialogue,
    of_cards: Mapping[str, str],
    held_out: HeldOut,
    split_of: Mapping[str, str],
) -> _Leak | None:
    card = of_cards.get(dialogue.source_id)
    if card is not None:
        return _Leak(OF_A_CARD, card)
    repeated = held_out.repeated_by(_said(dialogue), dialogue.language)
    if repeated is not None:
        return _Leak(f"nearly a dialogue of {split_of[repeated]}", repeated)
    return None


def _said(dialogue: SourceDialogue) -> list[str]:
    return [each.text for each in dialogue.utterances]


# --- Role cards -------------------------------------------------------------------------------


def terms(text: str) -> list[str]:
    """Return what a text is compared by: stems of its words, and pairs of its Chinese letters.

    Example:
        >>> terms("She studies; 很焦虑")
        ['she', 'stud', '很焦', '焦虑']
    """
    found = []
    for word in plain_words(text):
        if _CHINESE.search(word):
            found += [word[at : at + 2] for at in range(len(word) - 1)]
        else:
            found.append(_stem(word))
    return found


def _stem(word: str) -> str:
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word.removesuffix(ending)
    return word


def _of_the_seeker(dialogue: SourceDialogue) -> str:
    said = (each.text for each in dialogue.utterances if each.speaker is Speaker.SEEKER)
    return "\n".join([dialogue.situation or "", *said])


class _CardWords:
    """How many dialogues of a card's corpus have each of the cards' words."""

    def __init__(self, cards: Iterable[RoleCard]) -> None:
        self.cards = [card for card in cards if card.corpus]
        self.with_term: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        """The numbers of the cards that have a term, by corpus and term."""
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
        found = terms(_of_the_seeker(dialogue))
        self.documents[corpus] += 1
        self.lengths[corpus] += len(found)
        self.frequency[corpus].update(self.with_term[corpus].keys() & set(found))

    def weight(self, corpus: str, term: str) -> float:
        """Return the inverse document frequency, 0 for what no dialogue has."""
        count = self.frequency[corpus][term]
        if not count:
            return 0.0
        return math.log(1 + (self.documents[corpus] - count + 0.5) / (count + 0.5))


class _CardMatches:
    """How well each source matches each card."""

    def __init__(self, words: _CardWords, settings: Settings) -> None:
        self._words = words
        self._settings = settings
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
        """By card: the sources that match well enough."""

    def score(self, dialogue: SourceDialogue) -> None:
        words, corpus = self._words, dialogue.corpus
        if corpus not in words.with_term:
            return
        found = terms(_of_the_seeker(dialogue))
        mean = words.lengths[corpus] / words.documents[corpus]
        damping = _K1 * (1 - _B + _B * len(found) / mean)
        scores: dict[int, float] = defaultdict(float)
        numbers, weights = words.with_term[corpus], self._weights[corpus]
        for term, count in Counter(term for term in found if term in numbers).items():
            weight = weights[term] * count * (_K1 + 1) / (count + damping)
            for number in numbers[term]:
                scores[number] += weight
        for number, score in scores.items():
            share = score / self._totals[number]
            if share >= self._settings.card_share:
                sources = self.shares[number]
                sources[dialogue.source_id] = max(share, sources.get(dialogue.source_id, 0.0))

    def by_source(self) -> dict[str, str]:
        """Return the card, or the best of several, that each matching source belongs to."""
        best: dict[str, tuple[float, str]] = {}
        for card, sources in zip(self._words.cards, self.shares, strict=True):
            least = self._settings.card_tie * max(sources.values(), default=0.0)
            for source, share in sources.items():
                if share >= least:
                    best[source] = max(best.get(source, (0.0, "")), (share, card.name))
        return {source: name for source, (_, name) in best.items()}

    def matched(self) -> Counter[str]:
        """Return how many cards have found a dialogue, by the source that the card names."""
        return Counter(
            card.source
            for card, sources in zip(self._words.cards, self.shares, strict=True)
            if sources
        )


def _card_figures(
    cards: Sequence[RoleCard], matches: _CardMatches
) -> dict[str, float | int | str | None]:
    if not cards:
        return {"role cards": "none given: dialogues that they were made from are not looked for"}
    matched = matches.matched()
    given = Counter(card.source for card in cards)
    loaded = {card.source for card in cards if card.corpus}
    return {
        "role cards": len(cards),
        **{
            f"role cards of {source}": f"{matched[source]} of {count} found"
            if source in loaded
            else f"{count}, no loader for this corpus"
            for source, count in sorted(given.items())
        },
    }
