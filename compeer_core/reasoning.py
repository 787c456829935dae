"""A policy's output: three steps of reasoning and a reply, as values and as text.

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

`render` writes this text. `StreamingParser` reads it as it arrives and `read` reads it whole; both
accept any text and report its problems. `parse` is for callers that need a complete turn or an error.

There are three outcomes. A label has a **value**. A part is **missing**: that is a `Problem`, makes the
turn incomplete and costs the paper's format reward. A label whose line is absent or outside the
vocabulary is `Unreadable`: the turn can still be complete, but the label has no value.

Parsing rules:

- Only exact tags count, lower case and without spaces. Any tag ends the open part.
- Within a step, a line that begins with one of its labels and a colon is a label line, at any
  position; the last one of a name counts. All other lines are free text.
- A repeated part is reported and otherwise ignored.
- Space around a part's text is ignored.
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
    """The four parts of a turn, in their order."""

    HISTORY = "history"
    """Step 1: the core issue and the stage of the conversation."""
    EMOTION = "emotion"
    """Step 2: the seeker's emotional state."""
    STRATEGY = "strategy"
    """Step 3: the support strategy."""
    REPLY = "reply"
    """The text for the seeker."""

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
"""The labels of each part in their order, by the names that events use."""

_ORDER = {part: position for position, part in enumerate(Part)}
_TAG = re.compile(r"<(/?)(history|emotion|strategy|reply)>")
TAGS = tuple(tag for part in Part for tag in (part.opening, part.closing))
"""Opening and closing tag of each part, in the order of a turn."""
THOUGHTS, END_OF_THOUGHTS = "<think>", "</think>"
"""The marks around the thoughts that a reasoning model writes before its turn."""
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
        text: The unreadable value; empty if the line is absent or empty.

    Raises:
        ValueError: The text is not one plain line.
    """

    text: str = ""

    def __post_init__(self) -> None:
        if self.text != self.text.strip() or "\n" in self.text or _TAG.search(self.text):
            raise ValueError(
                f"an unreadable label must be one line without tags and outer space, got {self.text!r}"
            )


@dataclass(frozen=True)
class HistoryStep:
    """Step 1, conversation history: the core issue and the stage of the conversation.

    Raises:
        ValueError: The text could not be parsed back: it is empty, has space around it, contains a
            tag or a line that reads as the label. Or the stage is invalid.
    """

    text: str
    stage: Stage | Unreadable

    def __post_init__(self) -> None:
        _check_text(Part.HISTORY, self.text)
        _check_label("stage", self.stage, Stage, Stage)


@dataclass(frozen=True)
class EmotionStep:
    """Step 2, emotional state: polarity, main emotion and its intensity.

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
        strategy: A name of the vocabulary that the turn is parsed with. The step does not know that
            vocabulary, so it accepts any name that fits on a label line.

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
    """One complete turn of a supporter, with ``parse(render(turn)) == turn``.

    If the strategy belongs to another vocabulary than ESConv's, `parse` needs that vocabulary; an
    `Unreadable` strategy must not be one of its names.

    Raises:
        ValueError: The reply is empty, has space around it or contains a tag.
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
        raise ValueError(f"the text of <{part}> must not contain the tag {tag[0]}, got {text!r}")
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
    """Return a turn as the text that policies are trained on."""
    steps = (
        f"{part.opening}{render_step(step)}{part.closing}"
        for part, step in zip(STEPS, turn.reasoning, strict=True)
    )
    return "\n".join((*steps, f"{Part.REPLY.opening}{turn.reply}{Part.REPLY.closing}"))


def render_step(step: Step) -> str:
    """Return the inside of one step: its free text, then a line per label.

    An absent label stays absent; an unreadable one keeps its text.
    """
    lines = [step.text]
    for name in LABELS[part_of(step)]:
        value: LabelValue = getattr(step, name)
        text = value.text if isinstance(value, Unreadable) else str(value)
        if text:
            lines.append(label_line(name, text))
    return "\n".join(lines)


def part_of(step: Step) -> Part:
    """Return the part of a step."""
    match step:
        case HistoryStep():
            return Part.HISTORY
        case EmotionStep():
            return Part.EMOTION
        case StrategyStep():
            return Part.STRATEGY


# --- Reading ----------------------------------------------------------------------------------


class ProblemKind(StrEnum):
    """What can make a text an incomplete turn."""

    MISSING = "missing"
    """The part is absent."""
    EMPTY = "empty"
    """The part has no free text."""
    UNCLOSED = "unclosed"
    """Another tag or the end came before the part's closing tag."""
    REPEATED = "repeated"
    """The part appears again; the first one counts."""
    OUT_OF_ORDER = "out_of_order"
    """The part comes after one that should follow it."""
    OUTSIDE_TEXT = "outside_text"
    """There is text, or an unmatched closing tag, outside the parts."""


_SENTENCES: Mapping[ProblemKind, str] = MappingProxyType(
    {
        ProblemKind.MISSING: "{part} is missing",
        ProblemKind.EMPTY: "{part} is empty",
        ProblemKind.UNCLOSED: "{part} is not closed",
        ProblemKind.REPEATED: "{part} appears more than once",
        ProblemKind.OUT_OF_ORDER: "{part} comes too late",
        ProblemKind.OUTSIDE_TEXT: "there is text outside the parts",
    }
)


@dataclass(frozen=True)
class Problem:
    """One reason why a text is not a complete turn.

    Attributes:
        part: The part it concerns; None for text outside the parts.
    """

    kind: ProblemKind
    part: Part | None = None

    def __str__(self) -> str:
        return _SENTENCES[self.kind].format(part=f"<{self.part}>")


@dataclass(frozen=True)
class UnreadableLabel:
    """An unreadable label and its position, for counts and for display."""

    part: Part
    name: str
    text: str


@dataclass(frozen=True)
class Reading:
    """The result of parsing any text.

    An unclosed part has its partial text. A part is None if it is missing or has no free text.

    Attributes:
        problems: In order of appearance, without duplicates.
        raw: The parsed text.
    """

    history: HistoryStep | None
    emotion: EmotionStep | None
    strategy: StrategyStep | None
    reply: str | None
    problems: tuple[Problem, ...]
    raw: str

    @property
    def is_complete(self) -> bool:
        """Whether all four parts are present, in order, not empty, with nothing outside."""
        return not self.problems

    @property
    def steps(self) -> tuple[Step | None, ...]:
        """The three steps in order, None for each that is absent."""
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
        """All labels without a value, of the present steps."""
        return tuple(
            UnreadableLabel(part_of(step), name, value.text)
            for step in self.steps
            if step is not None
            for name in LABELS[part_of(step)]
            if isinstance(value := getattr(step, name), Unreadable)
        )


def read(text: str, vocabulary: StrategyVocabulary = ESCONV_STRATEGIES) -> Reading:
    """Parse any text as far as possible. Never raises.

    Example:
        >>> reading = read("<reply>I am here.</reply>")
        >>> reading.reply, [str(problem) for problem in reading.problems][0]
        ('I am here.', '<history> is missing')
    """
    parser = StreamingParser(vocabulary)
    parser.feed(text)
    return parser.finish()


def reply_of(text: str) -> str:
    """Return the reply of a turn, or the whole text of a model that does not use the output format.

    Empty if there is no reply. Thoughts of a reasoning model, which end with `</think>`, are no part of it.

    Example:
        >>> reply_of("<emotion>Sad</emotion><reply>I see.</reply>"), reply_of(" Tell me more. ")
        ('I see.', 'Tell me more.')
        >>> reply_of("<think>Is a <reply> asked for?</think> Hm."), reply_of("<think>And then")
        ('Hm.', '')
    """
    text = text.rpartition(END_OF_THOUGHTS)[2]
    if text.lstrip().startswith(THOUGHTS):
        return ""
    is_plain = not any(tag in text for tag in TAGS)
    return read(text).reply or (text.strip() if is_plain else "")


def parse(text: str, vocabulary: StrategyVocabulary = ESCONV_STRATEGIES) -> SupportTurn:
    """Parse a complete turn. An unreadable label does not make it incomplete.

    Raises:
        CompletionError: The text is not complete; its ``problems`` say why.
    """
    return read(text, vocabulary).turn


# --- Streaming ---------------------------------------------------------------------------------


class Writer(StrEnum):
    """Who wrote a part of a turn."""

    MODEL = "model"
    """The model, in this turn."""
    PERSON = "person"
    """A person, who edited the reasoning before the model continued."""
    EARLIER = "earlier"
    """The model, in an earlier turn whose part is reused."""


@dataclass(frozen=True)
class PartStarted:
    """The opening tag of a part arrived."""

    part: Part
    writer: Writer = Writer.MODEL


@dataclass(frozen=True)
class TextWritten:
    """New free text of the open part, without label lines."""

    part: Part
    text: str


@dataclass(frozen=True)
class LabelKnown:
    """A label line ended, or its part ended without one (the value is then ``Unreadable("")``).

    Attributes:
        name: One of `LABELS`.
        value: A `Stage`, a `Sentiment`, an `Emotion`, an intensity, the name of a strategy, or
            `Unreadable`. A later event of the same name replaces it.
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
    """The text ended. Always the last event."""

    reading: Reading


Event = PartStarted | TextWritten | LabelKnown | PartFinished | TurnFinished


class StreamingParser:
    """Parses a turn as it arrives.

    Example:
        >>> parser = StreamingParser()
        >>> events = parser.feed("<reply>Hel") + parser.feed("lo</re")
        >>> [event.text for event in events if isinstance(event, TextWritten)]
        ['Hel', 'lo']

    Repeated parts and text outside the parts have no events; the final reading lists them as
    problems.
    """

    def __init__(self, vocabulary: StrategyVocabulary = ESCONV_STRATEGIES) -> None:
        self._vocabulary = vocabulary
        self._chunks: list[str] = []
        self._held = ""  # a suffix of the text so far that may become a tag
        self._open: _PartReader | None = None
        self._ignoring: Part | None = None  # the repeated part that is open
        self._contents: dict[Part, Step | str | None] = {}
        self._problems: dict[Problem, None] = {}  # a set that keeps its order
        self._reading: Reading | None = None

    def feed(self, chunk: str) -> list[Event]:
        """Parse more of the text.

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
        """End the text; the last event is `TurnFinished`. A second call returns only that."""
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
        """Close, and return only the reading."""
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
    """Separates the free text of one part from its label lines, as it arrives.

    Ambiguous text is held back: a line that may still become a label line, and white space that
    belongs to the text only if more text follows.
    """

    def __init__(self, part: Part, vocabulary: StrategyVocabulary) -> None:
        self.part = part
        self._vocabulary = vocabulary
        self._line: str | None = ""  # the line so far; None once it is free text
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
        # The values come from `_read_value`, with the type of each name.
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
    """Return the value of a label, or None if it is outside its vocabulary.

    Args:
        name: "stage", "sentiment", "emotion", "intensity" or "strategy".
        text: The text after the colon.
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
    """Return name and value of a label line; None if it is not a label line of these names."""
    colon = _COLON.search(line)
    if colon is None:
        return None
    name = line[: colon.start()].strip().lower()
    return (name, line[colon.end() :].strip()) if name in names else None


def _may_become_label(line: str, names: Iterable[str]) -> bool:
    """Whether an unfinished line may become a label line of one of these names."""
    if _COLON.search(line):
        return _split_label(line, names) is not None
    head = line.strip().lower()
    return any(name.startswith(head) for name in names)


def _start_of_partial_tag(text: str, position: int) -> int:
    """Return the start of a suffix that may become a tag, or the text's length."""
    for start in range(max(position, len(text) - _LONGEST_TAG + 1), len(text)):
        if any(tag.startswith(text[start:]) for tag in TAGS):
            return start
    return len(text)
