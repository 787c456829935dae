"""Turn dialogues into cases: sample rounds and attach the human labels.

Consecutive utterances of one speaker (21 % of ESConv's) are joined by a line break, because a page
shows them as one turn. A *round* is a supporter turn right after a seeker turn. From each dialogue
`Settings.rounds_per_dialogue` rounds are sampled by Eq. 1 (`training.cer.sampling`), in their original
order, and each becomes a `Case`: the history, the supporter's own words, and the human labels.

Several rows can be one dialogue in different layouts, or parts of it. Only one of them yields cases:
the layout that `_LAYOUTS` lists first, and among equals the longest. The others lend it the
seeker's ratings (`Case.labels.feedback`), which only some layouts of ESConv have. A rating belongs to
the seeker turn with the same or nearly the same words (`SAME_TURN_RATIO`) at the same place, and is
dropped if there is none.

Draws depend only on the seed and the dialogue's id, so the order of the rows does not matter.
"""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from compeer_core.cer import SPLITS, Case, CaseUtterance, HumanLabels, Split
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Emotion, Strategy
from training.cer.corpora.reading import letters_of
from training.cer.records import SourceDialogue, SourceUtterance, StepReport
from training.cer.requests.engines import LOCAL, Engine
from training.cer.requests.seeding import generator_for
from training.cer.sampling import sample_rounds
from training.common.progress import count_lines, track
from training.data.pictures import Pictures
from training.data.records import read_records

SAME_TURN_RATIO = 0.8
"""From this `difflib` ratio of their letters on, two turns are the same turn in two layouts. All rated
turns of ESConv's public layouts have a ratio of 1."""

_LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "esconv": ("lines", "original", "multiesc", "windows"),
    "escot": ("full",),
    "mesc": ("csv", "json"),
    "annomi": (),
}
"""By corpus, the layouts (the second part of a dialogue's id) in order of preference; layouts that are
not listed come last. One row of each source yields cases. The rows of a corpus that is not listed are
all different, for example several answers to one question."""


class Settings(FrozenModel):
    """Which rounds become cases, and how long their histories are."""

    rounds_per_dialogue: Annotated[int, Field(ge=1)] | Literal["all"] = 4
    """N_s of Eq. 1, which the paper does not state. `all`: every round."""
    history_characters: int | None = Field(default=None, ge=1)
    """The longest history in characters; the oldest turns are dropped, never the last. None: no limit."""
    face_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of cases whose last seeker turn gets a photo of a face that matches the emotion. Cases
    without an emotion, or with a picture, get none."""


class Reason(StrEnum):
    """Why a dialogue yields no cases."""

    ANOTHER_LAYOUT = "another layout of the dialogue"
    REPEATED = "repeated dialogue"
    NO_ROUND = "no supporter turn after a seeker turn"


def draw_cases(
    source: Path,
    output: Path,
    settings: Settings,
    pictures: Pictures | None = None,
    seed: int = 0,
    *,
    lenders: Path | None = None,
    engine: Engine = LOCAL,
) -> StepReport:
    """Write the cases of the dialogues, in the order of the rows.

    Args:
        source: `SourceDialogue` rows, each with a split.
        output: Receives `Case` rows.
        settings: The sampling and the length of histories.
        pictures: The source of photos; needed if `Settings.face_share` is above 0.
        seed: Draws rounds and photos.
        lenders: `SourceDialogue` rows that lend their ratings; by default those of `source`. Needed if
            a filter has removed the other layouts.
        engine: Runs the sampling. Layouts are compared and photos drawn in this process.

    Raises:
        ConfigError: A file is missing, a row has no split, or there is no folder for the photos.
    """
    if settings.face_share and pictures is None:
        raise ConfigError("face_share is above 0: set `faces` to the packed folder of faces")
    drawing = _Drawing(settings, pictures, seed, _survey(source, lenders or source))
    written = write_rows(output, drawing.cases(source, engine))
    return StepReport(
        step="cases",
        read=drawing.read,
        written=written,
        # Sorted, since an engine that reads ahead counts in another order.
        dropped={
            corpus: dict(sorted(reasons.items()))
            for corpus, reasons in sorted(drawing.dropped.items())
        },
        figures=dict(drawing.figures),
    )


# --- Turns ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """Consecutive utterances of one speaker, joined."""

    speaker: Speaker
    text: str
    images: tuple[str, ...]
    parts: tuple[SourceUtterance, ...]
    """The utterances that have a visible character."""

    @property
    def feedback(self) -> int | None:
        """The seeker's first rating within the turn."""
        ratings = (part.feedback for part in self.parts if self.speaker is Speaker.SEEKER)
        return next((rating for rating in ratings if rating is not None), None)

    @property
    def emotion(self) -> Emotion | None:
        """The emotion of the last labelled utterance."""
        return next((part.emotion for part in reversed(self.parts) if part.emotion), None)

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """The distinct strategies in order, but that of the longest labelled utterance first."""
        labelled = [part for part in self.parts if part.strategy is not None]
        labelled.sort(key=lambda part: len(part.text), reverse=True)
        ordered = [part.strategy for part in (*labelled[:1], *self.parts)]
        return tuple(dict.fromkeys(strategy for strategy in ordered if strategy is not None))


def turns_of(dialogue: SourceDialogue) -> tuple[Turn, ...]:
    r"""Join consecutive utterances of one speaker; skip those without a visible character.

    Example:
        >>> utterances = ("seeker", "Hi."), ("seeker", "I am lost."), ("supporter", "Where are you?")
        >>> talk = SourceDialogue(
        ...     id="a", source_id="a", corpus="a", language="en", split="train", licence="",
        ...     utterances=[{"speaker": who, "text": text} for who, text in utterances],
        ... )
        >>> [turn.text for turn in turns_of(talk)]
        ['Hi.\nI am lost.', 'Where are you?']
    """
    visible = [(part, text) for part in dialogue.utterances if (text := printable(part.text))]
    return tuple(
        Turn(
            speaker,
            "\n".join(text for _, text in run),
            tuple(image for part, _ in run for image in part.images),
            tuple(part for part, _ in run),
        )
        for speaker, group in groupby(visible, key=lambda each: each[0].speaker)
        if (run := list(group))
    )


def rounds_of(turns: Sequence[Turn]) -> tuple[int, ...]:
    """Return the positions of the supporter turns that follow a seeker turn."""
    return tuple(
        position
        for position, turn in enumerate(turns)
        if position and turn.speaker is Speaker.SUPPORTER
    )


def printable(text: str) -> str:
    r"""Return a text without control characters and lone surrogates, or "" if nothing is visible.

    Line breaks become ``\n``, tabs stay, and the text is stripped.

    Example:
        >>> printable(" I am \x00here.\r\nStill. "), printable("\u200b\x07")
        ('I am here.\nStill.', '')
    """
    if text.isprintable():
        cleaned = text.strip()
    else:
        unified = text.replace("\r\n", "\n").replace("\r", "\n")
        cleaned = "".join(
            character
            for character in unified
            if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cs")
        ).strip()
    # Category Cf contains zero-width characters, which are invisible and not white space.
    visible = any(not char.isspace() and unicodedata.category(char) != "Cf" for char in cleaned)
    return cleaned if visible else ""


# --- The row of each dialogue, and its ratings ------------------------------------------------


@dataclass(frozen=True)
class Rated:
    """A rated seeker turn, for comparison with another layout."""

    position: int
    """The index among the joined turns."""
    letters: str
    feedback: int


@dataclass
class _Survey:
    """Ids and ratings of all rows, collected before the first case is made."""

    chosen: dict[str, str] = field(default_factory=dict)
    """The id of the row that yields cases, by source."""
    ratings: dict[str, tuple[Rated, ...]] = field(default_factory=dict)
    """The ratings of the preferred layout that has any, by source."""


def _survey(source: Path, lenders: Path) -> _Survey:
    chosen: dict[str, tuple[tuple[int, int], str]] = {}
    ratings: dict[str, tuple[int, tuple[Rated, ...]]] = {}
    for path in dict.fromkeys((source, lenders)):
        for row in track(
            read_records(path, SourceDialogue), "comparing layouts", total=count_lines(path)
        ):
            if row.corpus not in _LAYOUTS:
                continue
            rank = _rank(row)
            if path == source:
                order = (rank, -len(row.utterances))
                if row.source_id not in chosen or order < chosen[row.source_id][0]:
                    chosen[row.source_id] = order, row.id
            if path == lenders and any(part.feedback for part in row.utterances):
                rated = rated_turns(turns_of(row))
                if rated and rank < ratings.get(row.source_id, (rank + 1, ()))[0]:
                    ratings[row.source_id] = rank, rated
    return _Survey(
        {source_id: name for source_id, (_, name) in chosen.items()},
        {source_id: rated for source_id, (_, rated) in ratings.items()},
    )


def _rank(row: SourceDialogue) -> int:
    layouts = _LAYOUTS[row.corpus]
    layout = row.id.split("/", 2)[1] if "/" in row.id else ""
    return layouts.index(layout) if layout in layouts else len(layouts)


def rated_turns(turns: Sequence[Turn]) -> tuple[Rated, ...]:
    """Return the rated seeker turns."""
    return tuple(
        Rated(position, letters_of(turn.text), rating)
        for position, turn in enumerate(turns)
        if (rating := turn.feedback) is not None
    )


def placed(rated: Sequence[Rated], turns: Sequence[Turn]) -> dict[int, int]:
    """Assign the ratings of another layout to turns; return them by position.

    A rating goes to the seeker turn at the same position if the letters match (`SAME_TURN_RATIO`),
    else to the nearest seeker turn that matches, and never before the turn of an earlier rating.
    Ratings without a match are dropped.
    """
    ratings: dict[int, int] = {}
    after = -1
    for each in rated:
        near = sorted(range(after + 1, len(turns)), key=lambda at: abs(at - each.position))
        for position in near:
            turn = turns[position]
            if turn.speaker is Speaker.SEEKER and _alike(each.letters, letters_of(turn.text)):
                ratings[position] = each.feedback
                after = position
                break
    return ratings


def _alike(first: str, second: str) -> bool:
    if first == second:
        return True
    matcher = SequenceMatcher(None, first, second, autojunk=False)
    ratios = (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)  # the cheapest first
    return all(ratio() >= SAME_TURN_RATIO for ratio in ratios)


# --- Cases ------------------------------------------------------------------------------------


_FIGURES = (
    *("dialogues", "rounds", "utterances unprintable", "ratings lent", "ratings placed"),
    *(f"split {split}" for split in SPLITS),
    *("with picture", "with strategy", "with emotion", "with problem"),
    *("with intensity before", "with intensity after", "with feedback"),
)
"""Figures of the report: dialogues that yield cases, all their rounds, then counts of cases."""


@dataclass(frozen=True)
class _Chosen:
    """A row that may yield cases."""

    row: SourceDialogue
    lent: tuple[Rated, ...]
    """Ratings from another layout."""


@dataclass(frozen=True)
class _Drawn:
    """The cases of a row; none if it has no round."""

    corpus: str
    cases: tuple[Case, ...] = ()
    figures: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Rounds:
    """Samples the rounds of each row and makes cases of them, without photos."""

    settings: Settings
    seed: int

    def __call__(self, rows: Iterator[_Chosen]) -> Iterator[_Drawn]:
        for each in rows:
            yield self._drawn(each.row, each.lent)

    def _drawn(self, row: SourceDialogue, lent: Sequence[Rated]) -> _Drawn:
        turns = turns_of(row)
        rounds = rounds_of(turns)
        if not rounds:
            return _Drawn(row.corpus)
        feedback = {rated.position: rated.feedback for rated in rated_turns(turns)}
        figures = {
            "dialogues": 1,
            "rounds": len(rounds),
            "utterances unprintable": len(row.utterances) - sum(len(turn.parts) for turn in turns),
        }
        if lent and not feedback:
            feedback = placed(lent, turns)
            figures |= {"ratings lent": len(lent), "ratings placed": len(feedback)}
        cases = tuple(
            Case(
                id=f"{row.id}#{number}",
                dialogue_id=row.id,
                source_id=row.source_id,
                corpus=row.corpus,
                language=row.language,
                split=_split(row),
                licence=row.licence,
                round=number,
                rounds=len(rounds),
                history=self._history(turns[: rounds[number]]),
                original=turns[rounds[number]].text,
                situation=row.situation or None,
                labels=_labels(row, turns, rounds[number], feedback),
            )
            for number in self._numbers(row.id, len(rounds))
        )
        return _Drawn(row.corpus, cases, figures)

    def _numbers(self, name: str, count: int) -> Sequence[int]:
        wanted = self.settings.rounds_per_dialogue
        if wanted == "all":
            return range(count)
        rng = generator_for(self.seed, "rounds", name)
        numbers: list[int] = sample_rounds(count, wanted, rng).tolist()
        return numbers

    def _history(self, turns: Sequence[Turn]) -> tuple[CaseUtterance, ...]:
        characters = self.settings.history_characters
        history: list[CaseUtterance] = []
        length = 0
        for turn in reversed(turns):
            length += len(turn.text)
            if history and characters is not None and length > characters:
                break
            history.append(CaseUtterance(speaker=turn.speaker, text=turn.text, images=turn.images))
        return tuple(reversed(history))


class _Drawing:
    """Selects the rows of a file, adds photos to their cases, and counts."""

    def __init__(
        self, settings: Settings, pictures: Pictures | None, seed: int, survey: _Survey
    ) -> None:
        self.read = 0
        self.dropped: dict[str, Counter[str]] = {}
        self.figures: Counter[str] = Counter(dict.fromkeys(_FIGURES, 0))
        self._settings = settings
        self._pictures = pictures
        self._seed = seed
        self._survey = survey
        self._seen: set[bytes] = set()

    def cases(self, source: Path, engine: Engine) -> Iterator[Case]:
        made = engine.map(_Rounds(self._settings, self._seed), self._rows(source))
        for each in made:
            if not each.cases:
                self._leave(each.corpus, Reason.NO_ROUND)
            self.figures.update(each.figures)
            for case in map(self._with_face, each.cases):
                self._count(case)
                yield case

    def _rows(self, source: Path) -> Iterator[_Chosen]:
        rows = read_records(source, SourceDialogue)
        for row in track(rows, "drawing rounds", total=count_lines(source)):
            self.read += 1
            if reason := self._skipped(row):
                self._leave(row.corpus, reason)
            else:
                yield _Chosen(row, self._survey.ratings.get(row.source_id, ()))

    def _leave(self, corpus: str, reason: Reason) -> None:
        self.dropped.setdefault(corpus, Counter())[reason.value] += 1

    def _skipped(self, row: SourceDialogue) -> Reason | None:
        if self._survey.chosen.get(row.source_id, row.id) != row.id:
            return Reason.ANOTHER_LAYOUT
        # Case ids contain the row's id, so it must be unique. Hashes need less memory than ids.
        key = hashlib.blake2b(row.id.encode(), digest_size=8).digest()
        if key in self._seen:
            return Reason.REPEATED
        self._seen.add(key)
        return None

    def _with_face(self, case: Case) -> Case:
        *before, last = case.history
        emotion = case.labels.emotion
        if self._pictures is None or not self._settings.face_share or emotion is None:
            return case
        rng = generator_for(self._seed, "face", case.id)
        if last.images or rng.random() >= self._settings.face_share:
            return case
        photo = self._pictures.photo_for(emotion, case.split, rng)
        if photo is None:
            return case
        shown = last.model_copy(update={"images": (photo,)})
        return case.model_copy(update={"history": (*before, shown)})

    def _count(self, case: Case) -> None:
        labels = case.labels
        self.figures[f"split {case.split}"] += 1
        self.figures["with picture"] += any(turn.images for turn in case.history)
        self.figures["with strategy"] += bool(labels.strategies)
        self.figures["with emotion"] += labels.emotion is not None
        self.figures["with problem"] += labels.problem is not None
        self.figures["with intensity before"] += labels.intensity_before is not None
        self.figures["with intensity after"] += labels.intensity_after is not None
        self.figures["with feedback"] += labels.feedback is not None


def _split(row: SourceDialogue) -> Split:
    for split in SPLITS:
        if row.split == split:
            return split
    raise ConfigError(
        f"dialogue {row.id}: split is {row.split!r}, expected one of {', '.join(SPLITS)}"
    )


def _labels(
    row: SourceDialogue, turns: Sequence[Turn], position: int, feedback: Mapping[int, int]
) -> HumanLabels:
    own = turns[position - 1].emotion
    emotion = own or row.emotion
    return HumanLabels(
        strategies=turns[position].strategies,
        emotion=emotion,
        emotion_of=None if emotion is None else "utterance" if own else "dialogue",
        problem=row.problem,
        intensity_before=row.intensity_before,
        intensity_after=row.intensity_after,
        feedback=next((feedback[at] for at in sorted(feedback) if at > position), None),
    )
