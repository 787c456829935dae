"""How far a reply has come: what the conversation and the inspector draw.

A `Progress` is folded from the events of `compeer_core.turn.take_turn`, one at a time. It
never changes, so it can be read by one thread while another makes the next.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from compeer_core.reasoning import (
    LABELS,
    STEPS,
    LabelKnown,
    LabelValue,
    Part,
    PartFinished,
    PartStarted,
    Reading,
    TextWritten,
    TurnFinished,
    Writer,
)
from compeer_core.turn import ReplyJudged, StepJudged, TurnDone, TurnEvent, TurnRecord
from compeer_core.unifireward import ReplyOutcome, StepOutcome

PartState = Literal["ahead", "writing", "done", "missing"]
Phase = Literal["waiting", "loading", "writing", "judging", "over"]
Outcome = Literal["running", "finished", "stopped", "failed"]
Failure = Literal["", "model", "line", "places", "reply"]
OriginKind = Literal["first", "again", "strategy", "edited", "kept", "sample"]
"""
- first: nothing was there before.
- again: another reply was asked for.
- strategy: another strategy.
- edited: a step was changed.
- kept: what follows a step was to be written again.
- sample: it is one of several that were asked for at once.
"""


@dataclass(frozen=True)
class PartProgress:
    """One of the four parts of a turn."""

    state: PartState = "ahead"
    text: str = ""
    labels: Mapping[str, LabelValue] = field(default_factory=lambda: MappingProxyType({}))
    verdict: StepOutcome | None = None
    """None as long as nobody has judged the part."""
    writer: Writer = Writer.MODEL


@dataclass(frozen=True)
class Origin:
    """How a reply came to be asked for, when there was one already."""

    kind: OriginKind = "first"
    part: Part | None = None
    """The step that was changed, or the last one that was kept."""
    strategy: str = ""
    """The one that was asked for."""
    parent: int = 0
    """The number of the reply that it goes out from; 0 for none."""


@dataclass(frozen=True)
class Progress:
    """One reply on its way, or done."""

    model: str
    judge: str | None = None
    judge_failed: bool = False
    """A judge was asked for but could not be loaded."""
    seed: int | None = None
    key: str = ""
    """Names the reply among all of its conversation."""
    number: int = 1
    """Counts the replies to one message; it never changes."""
    origin: Origin = Origin()
    only_asked: bool = False
    """The model cannot be written for: it was asked in the prompt to go on from what was given."""
    phase: Phase = "waiting"
    place: int = 0
    """Place in the line while waiting; 0 is next."""
    since: float = 0.0
    """When the phase began, on the monotonic clock of the server."""
    parts: Mapping[Part, PartProgress] = field(
        default_factory=lambda: MappingProxyType({part: PartProgress() for part in Part})
    )
    reply_verdict: ReplyOutcome | None = None
    outcome: Outcome = "running"
    failure: Failure = ""
    """Why it failed, as a key of the page's words; empty while it has not."""
    record: TurnRecord | None = None

    @property
    def reply(self) -> str:
        """What there is of the reply."""
        return self.parts[Part.REPLY].text

    @property
    def has_words(self) -> bool:
        """Whether the model has written anything."""
        return any(part.text for part in self.parts.values())

    @property
    def writing(self) -> Part | None:
        """The part that is being written."""
        for part, progress in self.parts.items():
            if progress.state == "writing":
                return part
        return None

    def after(self, event: TurnEvent) -> "Progress":
        """Return the progress once the event has happened."""
        match event:
            case PartStarted(part=part, writer=writer):
                return replace(self._with(part, state="writing", writer=writer), phase="writing")
            case TextWritten(part=part, text=text):
                return self._with(part, text=self.parts[part].text + text)
            case LabelKnown(part=part, name=name, value=value):
                labels = {**self.parts[part].labels, name: value}
                return self._with(part, labels=MappingProxyType(labels))
            case PartFinished(part=part):
                return self._with(part, state="done")
            case TurnFinished(reading=reading):
                return replace(self._as_read(reading), phase="judging")
            case StepJudged(part=part, outcome=verdict):
                return self._with(part, verdict=verdict)
            case ReplyJudged(outcome=outcome):
                return replace(self, reply_verdict=outcome)
            case TurnDone(record=record):
                return self._done(record)

    def failed(self, failure: Failure) -> "Progress":
        """Return the same, ended by something that happened outside the model."""
        return replace(self, phase="over", outcome="failed", failure=failure)

    def _with(
        self,
        part: Part,
        *,
        state: PartState | None = None,
        text: str | None = None,
        labels: Mapping[str, LabelValue] | None = None,
        verdict: StepOutcome | None = None,
        writer: Writer | None = None,
    ) -> "Progress":
        before = self.parts[part]
        now = PartProgress(
            state=before.state if state is None else state,
            text=before.text if text is None else text,
            labels=before.labels if labels is None else labels,
            verdict=before.verdict if verdict is None else verdict,
            writer=before.writer if writer is None else writer,
        )
        return replace(self, parts=MappingProxyType({**self.parts, part: now}))

    def _as_read(self, reading: Reading) -> "Progress":
        """Take over what the whole text turned out to say; it outranks what was seen on the way."""
        progress = self
        for part, step in zip(STEPS, reading.steps, strict=True):
            if step is None:
                progress = progress._with(part, state="missing", text="")
                continue
            labels = {name: getattr(step, name) for name in LABELS[part]}
            progress = progress._with(
                part, state="done", text=step.text, labels=MappingProxyType(labels)
            )
        state: PartState = "missing" if reading.reply is None else "done"
        return progress._with(Part.REPLY, state=state, text=reading.reply or "")

    def _done(self, record: TurnRecord) -> "Progress":
        progress = self._as_read(record.reading)
        if record.judgement is not None and record.judgement.steps is not None:
            for part, verdict in zip(STEPS, record.judgement.steps, strict=True):
                progress = progress._with(part, verdict=verdict)
        return replace(
            progress,
            phase="over",
            judge=record.judge,
            seed=record.seed,
            outcome=record.status,
            failure="reply" if record.status == "failed" else "",
            reply_verdict=record.judgement.response if record.judgement else None,
            record=record,
        )
