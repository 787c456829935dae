"""What a policy writes: three steps of reasoning and a reply, as values and as text.

```text
<history>free text about the core issue
Stage: Exploration</history>
<emotion>free text
Sentiment: Negative
Emotion: Anxiety
Intensity: 4</emotion>
<strategy>free text
Strategy: Reflection of Feelings</strategy>
<reply>what the seeker reads</reply>
```

`render` writes that text. `StreamingParser` reads it while it is being written and `read` reads it
whole; both accept any text at all and say what is wrong with it. `parse` is for callers that need a
complete turn or an error.

Three outcomes stay apart. A label has a **value**. A part that is not there is **missing**: that is
a `Problem`, makes the turn incomplete and costs the paper's format reward. A label whose line is
absent or says something outside the vocabulary is `Unreadable`: the turn can be complete all the
same, and nobody may take the label for a value.

Rules of reading:

- Only the exact tags count, lower case and without spaces. Any tag ends the part that is open.
- Within a step, a line that begins with one of its labels and a colon is a label line, wherever it
  stands; the last one of a name counts. All other lines are the free text.
- A part that comes a second time is reported and otherwise ignored.
- Space around a part's text does not count.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from compeer_core.errors import CompletionError
from compeer_core.taxonomy import (
    ESCONV_STRATEGIES,
    INTENSITIES,
    Emotion,
    Sentiment,
    Stage,
    StrategyVocabulary,
    read_label,
)


class Part(StrEnum):
    """The four parts of a turn, in the order in which they are written."""

    HISTORY = "history"
    """Step 1: what the conversation is about, and its stage."""
    EMOTION = "emotion"
    """Step 2: what the seeker feels."""
    STRATEGY = "strategy"
    """Step 3: how to support them now."""
    REPLY = "reply"
    """What the seeker reads."""

    @property
    def opening(self) -> str:
        """The tag that begins the part."""
        return f"<{self.value}>"

    @property
    def closing(self) -> str:
        """The tag that ends the part."""
        return f"</{self.value}>"


STEPS = (Part.HISTORY, Part.EMOTION, Part.STRATEGY)
"""The parts that are reasoning."""

LABELS: Mapping[Part, tuple[str, ...]] = MappingProxyType(
    {
        Part.HISTORY: ("stage",),
        Part.EMOTION: ("sentiment", "emotion", "intensity"),
        Part.STRATEGY: ("strategy",),
        Part.REPLY: (),
    }
)
"""The labels of each part in the order in which they are written, by the names events use."""

_ORDER = {part: position for position, part in enumerate(Part)}
_TAG = re.compile(r"<(/?)(history|emotion|strategy|reply)>")
TAGS = tuple(tag for part in Part for tag in (part.opening, part.closing))
"""Opening and closing tag of each part, in the order of a turn."""
_LONGEST_TAG = max(map(len, TAGS))
_COLON = re.compile("[:：]")


def label_line(name: str, value: object) -> str:
    """Return the line that states a label.

    Example:
        >>> label_line("stage", Stage.ACTION)
        'Stage: Action'
    """
    return f"{name.capitalize()}: {value}"


# --- Values -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unreadable:
    """A label that has no value.

    Attributes:
        text: What the label line says instead; empty where the line is absent or says nothing.

    Raises:
        ValueError: The text is not one plain line.
    """

    text: str = ""

    def __post_init__(self) -> None:
        if self.text != self.text.strip() or "\n" in self.text or _TAG.search(self.text):
            raise ValueError(
                f"an unreadable label is one line without tags and outer space, got {self.text!r}"
            )


@dataclass(frozen=True)
class HistoryStep:
    """Step 1, conversation history: the core issue and the stage of the conversation.

    Raises:
        ValueError: The text could not be read back as it is: it is empty, has space around it,
            holds a tag, or has a line that reads as the label. Or the stage is none.
    """

    text: str
    stage: Stage | Unreadable

    def __post_init__(self) -> None:
        _check_text(Part.HISTORY, self.text)
        _check_label("stage", self.stage, Stage, Stage)


@dataclass(frozen=True)
class EmotionStep:
    """Step 2, emotional state: polarity, main emotion and its strength.

    Attributes:
        intensity: 1 (barely felt) to 5 (overwhelming).

    Raises:
        ValueError: As for `HistoryStep`, with this step's three labels.
    """

    text: str
    sentiment: Sentiment | Unreadable
    emotion: Emotion | Unreadable
    intensity: int | Unreadable

    def __post_init__(self) -> None:
        _check_text(Part.EMOTION, self.text)
        _check_label("sentiment", self.sentiment, Sentiment, Sentiment)
        _check_label("emotion", self.emotion, Emotion, Emotion)
        _check_label("intensity", self.intensity, int, map(str, INTENSITIES))


@dataclass(frozen=True)
class StrategyStep:
    """Step 3, support strategy.

    Attributes:
        strategy: A name of the vocabulary that the turn is read with. The step does not know
            that vocabulary, so it accepts any name that can stand on a label line.

    Raises:
        ValueError: As for `HistoryStep`.
    """

    text: str
    strategy: str | Unreadable

    def __post_init__(self) -> None:
        _check_text(Part.STRATEGY, self.text)
        if not isinstance(self.strategy, Unreadable):
            Unreadable(self.strategy)  # the same rules: one plain line
            if not self.strategy:
                raise ValueError("the strategy has no name; use Unreadable() for an absent label")


Step = HistoryStep | EmotionStep | StrategyStep
LabelValue = str | int | Unreadable


@dataclass(frozen=True)
class Reasoning:
    """The three steps before a reply."""

    history: HistoryStep
    emotion: EmotionStep
    strategy: StrategyStep

    def __iter__(self) -> Iterator[Step]:
        return iter((self.history, self.emotion, self.strategy))


@dataclass(frozen=True)
class SupportTurn:
    """One whole turn of a supporter. ``parse(render(turn)) == turn`` for every one.

    For a turn whose strategy belongs to another vocabulary than ESConv's, that vocabulary has to be
    given to `parse`; an `Unreadable` strategy must not be a name of it.

    Raises:
        ValueError: The reply is empty, has space around it or holds a tag.
    """

    reasoning: Reasoning
    reply: str

    def __post_init__(self) -> None:
        _check_text(Part.REPLY, self.reply)


def _check_text(part: Part, text: str) -> None:
    if not text.strip():
        raise ValueError(f"the text of <{part}> must not be empty")
    if text != text.strip():
        raise ValueError(f"the text of <{part}> must have no space around it, got {text!r}")
    if tag := _TAG.search(text):
        raise ValueError(f"the text of <{part}> must not hold the tag {tag[0]}, got {text!r}")
    for line in text.split("\n"):
        if label := _split_label(line, LABELS[part]):
            raise ValueError(f"a line of <{part}> reads as its {label[0]} label: {line!r}")


def _check_label(name: str, value: object, kind: type, readable: Iterable[str]) -> None:
    # A bool is an int to Python, yet is written as a word.
    if isinstance(value, Unreadable):
        if read_label(readable, value.text) is not None:
            raise ValueError(f"{name} {value.text!r} can be read, so it is not Unreadable")
    elif not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name} must be {kind.__name__} or Unreadable, got {value!r}")
    elif isinstance(value, int) and value not in INTENSITIES:
        raise ValueError(f"{name} must lie between 1 and 5, got {value}")


# --- Writing ----------------------------------------------------------------------------------


def render(turn: SupportTurn) -> str:
    """Write a turn as the text that a policy is trained to write."""
    steps = (
        f"{part.opening}{render_step(step)}{part.closing}"
        for part, step in zip(STEPS, turn.reasoning, strict=True)
    )
    return "\n".join((*steps, f"{Part.REPLY.opening}{turn.reply}{Part.REPLY.closing}"))


def render_step(step: Step) -> str:
    """Write the inside of one step: its free text, then a line per label.

    A label that was absent stays absent; an unreadable one keeps its words.
    """
    lines = [step.text]
    for name in LABELS[part_of(step)]:
        value: LabelValue = getattr(step, name)
        text = value.text if isinstance(value, Unreadable) else str(value)
        if text:
            lines.append(label_line(name, text))
    return "\n".join(lines)


def part_of(step: Step) -> Part:
    """Return which part of a turn a step is."""
    match step:
        case HistoryStep():
            return Part.HISTORY
        case EmotionStep():
            return Part.EMOTION
        case StrategyStep():
            return Part.STRATEGY


# --- Reading ----------------------------------------------------------------------------------


class ProblemKind(StrEnum):
    """The ways in which a text can fail to be a complete turn."""

    MISSING = "missing"
    """The part is not there."""
    EMPTY = "empty"
    """The part has no free text."""
    UNCLOSED = "unclosed"
    """Another tag or the end came before the part's closing tag."""
    REPEATED = "repeated"
    """The part came again; the first one counts."""
    OUT_OF_ORDER = "out_of_order"
    """The part came after one that should follow it."""
    OUTSIDE_TEXT = "outside_text"
    """There is text, or a closing tag of nothing, outside the parts."""


_SENTENCES: Mapping[ProblemKind, str] = MappingProxyType(
    {
        ProblemKind.MISSING: "{part} is missing",
        ProblemKind.EMPTY: "{part} is empty",
        ProblemKind.UNCLOSED: "{part} is not closed",
        ProblemKind.REPEATED: "{part} comes more than once",
        ProblemKind.OUT_OF_ORDER: "{part} comes too late",
        ProblemKind.OUTSIDE_TEXT: "there is text outside the parts",
    }
)


@dataclass(frozen=True)
class Problem:
    """One thing that keeps a text from being a complete turn.

    Attributes:
        part: The part it concerns; None for text outside the parts.
    """

    kind: ProblemKind
    part: Part | None = None

    def __str__(self) -> str:
        return _SENTENCES[self.kind].format(part=f"<{self.part}>")


@dataclass(frozen=True)
class UnreadableLabel:
    """An unreadable label and its place, for counting and for showing."""

    part: Part
    name: str
    text: str


@dataclass(frozen=True)
class Reading:
    """What could be read of a text.

    A part that was begun but not closed keeps what was written of it. A part is None where it is
    missing or has no free text.

    Attributes:
        problems: In the order in which they were met; none is listed twice.
        raw: The text that was read.
    """

    history: HistoryStep | None
    emotion: EmotionStep | None
    strategy: StrategyStep | None
    reply: str | None
    problems: tuple[Problem, ...]
    raw: str

    @property
    def is_complete(self) -> bool:
        """Whether all four parts are there, in order, none empty, nothing outside."""
        return not self.problems

    @property
    def steps(self) -> tuple[Step | None, ...]:
        """The three steps in their order, None for each that is not there."""
        return self.history, self.emotion, self.strategy

    @property
    def turn(self) -> SupportTurn:
        """The complete turn.

        Raises:
            CompletionError: The text is not one.
        """
        if self.is_complete and self.history and self.emotion and self.strategy and self.reply:
            return SupportTurn(Reasoning(self.history, self.emotion, self.strategy), self.reply)
        problems = tuple(map(str, self.problems))
        raise CompletionError(
            f"not a complete supporter turn: {'; '.join(problems)}", self.raw, problems
        )

    @property
    def unreadable(self) -> tuple[UnreadableLabel, ...]:
        """Every label without a value, of the steps that are there."""
        return tuple(
            UnreadableLabel(part_of(step), name, value.text)
            for step in self.steps
            if step is not None
            for name in LABELS[part_of(step)]
            if isinstance(value := getattr(step, name), Unreadable)
        )


def read(text: str, vocabulary: StrategyVocabulary = ESCONV_STRATEGIES) -> Reading:
    """Read any text as far as it can be read. Never raises.

    Example:
        >>> reading = read("<reply>I am here.</reply>")
        >>> reading.reply, [str(problem) for problem in reading.problems][0]
        ('I am here.', '<history> is missing')
    """
    parser = StreamingParser(vocabulary)
    parser.feed(text)
    return parser.finish()


def parse(text: str, vocabulary: StrategyVocabulary = ESCONV_STRATEGIES) -> SupportTurn:
    """Read a complete turn. A label that cannot be read does not make it incomplete.

    Raises:
        CompletionError: The text is not complete; its ``problems`` say why.
    """
    return read(text, vocabulary).turn


# --- Reading while it is written --------------------------------------------------------------


class Writer(StrEnum):
    """Who wrote a part of a turn."""

    MODEL = "model"
    """The model, in this turn."""
    PERSON = "person"
    """A person, who changed the model's reasoning before it went on."""
    EARLIER = "earlier"
    """The model, in an earlier turn from which the part is kept."""


@dataclass(frozen=True)
class PartStarted:
    """A part's opening tag was read."""

    part: Part
    writer: Writer = Writer.MODEL


@dataclass(frozen=True)
class TextWritten:
    """More free text of the part that is open. Label lines are not repeated here."""

    part: Part
    text: str


@dataclass(frozen=True)
class LabelKnown:
    """A label line ended, or its part ended without one (then the value is ``Unreadable("")``).

    Attributes:
        name: One of `LABELS`.
        value: A `Stage`, a `Sentiment`, an `Emotion`, an intensity, the name of a strategy, or
            `Unreadable`. A later event of the same name replaces an earlier one.
    """

    part: Part
    name: str
    value: LabelValue


@dataclass(frozen=True)
class PartFinished:
    """A part ended.

    Attributes:
        content: The step; for the reply, its text; None if the part has no free text.
    """

    part: Part
    content: Step | str | None


@dataclass(frozen=True)
class TurnFinished:
    """The text ended. Always the last event, and never missing."""

    reading: Reading


Event = PartStarted | TextWritten | LabelKnown | PartFinished | TurnFinished


def coalesce(events: Iterable[Event]) -> list[Event]:
    """Join neighbouring pieces of one part's text.

    However a text is cut into chunks, its events are the same after this.
    """
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if (
            isinstance(event, TextWritten)
            and isinstance(last, TextWritten)
            and last.part is event.part
        ):
            joined[-1] = TextWritten(event.part, last.text + event.text)
        else:
            joined.append(event)
    return joined


class StreamingParser:
    """Reads a turn while it is written.

    Example:
        >>> parser = StreamingParser()
        >>> events = parser.feed("<reply>Hel") + parser.feed("lo</re")
        >>> [event.text for event in events if isinstance(event, TextWritten)]
        ['Hel', 'lo']

    A part that comes a second time, and text outside the parts, have no events: they are in the
    problems of the final reading.
    """

    def __init__(self, vocabulary: StrategyVocabulary = ESCONV_STRATEGIES) -> None:
        self._vocabulary = vocabulary
        self._chunks: list[str] = []
        self._held = ""  # an end of the text so far that may become a tag
        self._open: _PartReader | None = None
        self._ignoring: Part | None = None  # the repeated part we are in
        self._contents: dict[Part, Step | str | None] = {}
        self._problems: dict[Problem, None] = {}  # a set that keeps its order
        self._reading: Reading | None = None

    def feed(self, chunk: str) -> list[Event]:
        """Read more of the text.

        Raises:
            RuntimeError: The parser was closed.
        """
        if self._reading is not None:
            raise RuntimeError("the parser is closed")
        self._chunks.append(chunk)
        text = self._held + chunk
        events: list[Event] = []
        position = 0
        for tag in _TAG.finditer(text):
            events += self._take_text(text[position : tag.start()])
            events += self._take_tag(Part(tag[2]), closing=bool(tag[1]))
            position = tag.end()
        held = _start_of_partial_tag(text, position)
        events += self._take_text(text[position:held])
        self._held = text[held:]
        return events

    def close(self) -> list[Event]:
        """Read the text as ended; the last event is `TurnFinished`. A second call gives only it."""
        if self._reading is not None:
            return [TurnFinished(self._reading)]
        events = self._take_text(self._held)
        events += self._end_part(closed=False)
        for part in Part:
            if part not in self._contents:
                self._note(ProblemKind.MISSING, part)
        self._reading = self._collect()
        return [*events, TurnFinished(self._reading)]

    def finish(self) -> Reading:
        """Close, and return the reading alone."""
        self.close()
        assert self._reading is not None
        return self._reading

    def _take_text(self, text: str) -> list[Event]:
        if self._open:
            return self._open.feed(text)
        if not self._ignoring and text.strip():
            self._note(ProblemKind.OUTSIDE_TEXT)
        return []

    def _take_tag(self, part: Part, *, closing: bool) -> list[Event]:
        current = self._open.part if self._open else self._ignoring
        if closing and part is current:
            return self._end_part(closed=True)
        events = self._end_part(closed=False)
        if closing:
            self._note(ProblemKind.OUTSIDE_TEXT)
            return events
        return [*events, *self._begin_part(part)]

    def _begin_part(self, part: Part) -> list[Event]:
        if part in self._contents:
            self._note(ProblemKind.REPEATED, part)
            self._ignoring = part
            return []
        if any(_ORDER[earlier] > _ORDER[part] for earlier in self._contents):
            self._note(ProblemKind.OUT_OF_ORDER, part)
        self._open = _PartReader(part, self._vocabulary)
        return [PartStarted(part)]

    def _end_part(self, *, closed: bool) -> list[Event]:
        reader, self._open, self._ignoring = self._open, None, None
        if reader is None:
            return []
        events, content = reader.close()
        self._contents[reader.part] = content
        if not closed:
            self._note(ProblemKind.UNCLOSED, reader.part)
        if content is None:
            self._note(ProblemKind.EMPTY, reader.part)
        return [*events, PartFinished(reader.part, content)]

    def _note(self, kind: ProblemKind, part: Part | None = None) -> None:
        self._problems.setdefault(Problem(kind, part))

    def _collect(self) -> Reading:
        history = self._contents.get(Part.HISTORY)
        emotion = self._contents.get(Part.EMOTION)
        strategy = self._contents.get(Part.STRATEGY)
        reply = self._contents.get(Part.REPLY)
        return Reading(
            history if isinstance(history, HistoryStep) else None,
            emotion if isinstance(emotion, EmotionStep) else None,
            strategy if isinstance(strategy, StrategyStep) else None,
            reply if isinstance(reply, str) else None,
            tuple(self._problems),
            "".join(self._chunks),
        )


class _PartReader:
    """Tells the free text of one part from its label lines, as it comes.

    What cannot be told yet is kept back: a line that may still turn out to be a label line, and
    white space that belongs to the text only if more text follows.
    """

    def __init__(self, part: Part, vocabulary: StrategyVocabulary) -> None:
        self.part = part
        self._vocabulary = vocabulary
        self._line: str | None = ""  # what the line holds so far; None once it is free text
        self._space = ""
        self._text: list[str] = []
        self._labels: dict[str, LabelValue] = {}

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        first, *others = text.split("\n")
        events += self._take(first)
        for piece in others:
            events += self._end_line("\n")
            events += self._take(piece)
        return events

    def close(self) -> tuple[list[Event], Step | str | None]:
        events = self._end_line("")
        for name in LABELS[self.part]:
            if name not in self._labels:
                events += self._know(name, "")
        text = "".join(self._text)
        return events, self._build(text) if text else None

    def _take(self, piece: str) -> list[Event]:
        if self._line is None:
            return self._write(piece)
        line = self._line + piece
        if _may_become_label(line, LABELS[self.part]):
            self._line = line
            return []
        self._line = None
        return self._write(line)

    def _end_line(self, newline: str) -> list[Event]:
        line, self._line = self._line or "", ""
        label = _split_label(line, LABELS[self.part])
        return self._know(*label) if label else self._write(line + newline)

    def _write(self, text: str) -> list[Event]:
        text = self._space + text
        if not self._text:
            text = text.lstrip()
        written = text.rstrip()
        self._space = text[len(written) :]
        if not written:
            return []
        self._text.append(written)
        return [TextWritten(self.part, written)]

    def _know(self, name: str, text: str) -> list[Event]:
        value = _read_value(name, text, self._vocabulary)
        self._labels[name] = value
        return [LabelKnown(self.part, name, value)]

    def _build(self, text: str) -> Step | str:
        # The values come from `_read_value`, which keeps to the type that belongs to each name.
        labels: dict[str, Any] = self._labels
        match self.part:
            case Part.HISTORY:
                return HistoryStep(text, **labels)
            case Part.EMOTION:
                return EmotionStep(text, **labels)
            case Part.STRATEGY:
                return StrategyStep(text, **labels)
            case Part.REPLY:
                return text


def label_value(name: str, text: str, vocabulary: StrategyVocabulary) -> LabelValue | None:
    """Return the value of a label line, None where it is none of its vocabulary.

    Args:
        name: "stage", "sentiment", "emotion", "intensity" or "strategy".
        text: What stands behind the colon.
        vocabulary: The strategies.
    """
    value: LabelValue | None
    match name:
        case "stage":
            value = read_label(Stage, text)
        case "sentiment":
            value = read_label(Sentiment, text)
        case "emotion":
            value = read_label(Emotion, text)
        case "intensity":
            digit = read_label(map(str, INTENSITIES), text)
            value = None if digit is None else int(digit)
        case _:
            value = vocabulary.read(text)
    return value


def _read_value(name: str, text: str, vocabulary: StrategyVocabulary) -> LabelValue:
    value = label_value(name, text, vocabulary)
    return Unreadable(text) if value is None else value


def _split_label(line: str, names: Iterable[str]) -> tuple[str, str] | None:
    """Return the name and the value of a label line; None if the line is none of these names."""
    colon = _COLON.search(line)
    if colon is None:
        return None
    name = line[: colon.start()].strip().lower()
    return (name, line[colon.end() :].strip()) if name in names else None


def _may_become_label(line: str, names: Iterable[str]) -> bool:
    """Whether a line that is still being written may end as a label line of one of these names."""
    if _COLON.search(line):
        return _split_label(line, names) is not None
    head = line.strip().lower()
    return any(name.startswith(head) for name in names)


def _start_of_partial_tag(text: str, position: int) -> int:
    """Return where an end of the text begins that may become a tag, or the text's length."""
    for start in range(max(position, len(text) - _LONGEST_TAG + 1), len(text)):
        if any(tag.startswith(text[start:]) for tag in TAGS):
            return start
    return len(text)
