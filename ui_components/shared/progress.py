"""The progress of a reply: what the conversation and the inspector draw.

A `Progress` is folded from the events of `compeer_core.turn.take_turn`, one at a time. It is
immutable, so one thread can read it while another makes the next.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from compeer_core.gate import RejectedDraw
from compeer_core.grounding import Evidence, StepChecker
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
from compeer_core.turn import (
    DrawRejected,
    ReplyJudged,
    StepJudged,
    TurnDone,
    TurnEvent,
    TurnRecord,
)
from compeer_core.unifireward import ReplyOutcome, StepOutcome

PartState = Literal["ahead", "writing", "done", "missing"]
Phase = Literal["waiting", "loading", "writing", "judging", "over"]
Outcome = Literal["running", "finished", "stopped", "failed"]
Failure = Literal["", "model", "line", "places", "reply"]
OriginKind = Literal["first", "again", "strategy", "edited", "kept", "sample"]
"""- first: the first reply to a message.
- again: regenerated.
- strategy: generated with another strategy.
- edited: continued from an edited step.
- kept: regenerated from a step.
- sample: one of several generated together.
"""


@dataclass(frozen=True)
class PartProgress:
    """One of the four parts of a turn."""

    state: PartState = "ahead"
    text: str = ""
    labels: Mapping[str, LabelValue] = field(default_factory=lambda: MappingProxyType({}))
    verdict: StepOutcome | None = None
    """None until it is judged."""
    writer: Writer = Writer.MODEL
    evidence: tuple[Evidence, ...] = ()
    """What a step quotes or sees, checked against the conversation; see `Progress.checked`."""


NO_PARTS: Mapping[Part, PartProgress] = MappingProxyType({part: PartProgress() for part in Part})
"""The parts before the first token."""


@dataclass(frozen=True)
class Origin:
    """How a reply was requested."""

    kind: OriginKind = "first"
    part: Part | None = None
    """The edited step, or the last one that was kept."""
    strategy: str = ""
    """The requested strategy."""
    parent: int = 0
    """The number of the reply that it is based on; 0 for none."""


@dataclass(frozen=True)
class Progress:
    """One reply, running or ended."""

    model: str
    judge: str | None = None
    judge_failed: bool = False
    """A judge was requested but could not be loaded."""
    seed: int | None = None
    key: str = ""
    """Identifies the reply within its conversation."""
    number: int = 1
    """Counts the replies to one message; immutable."""
    origin: Origin = Origin()
    compared_with: int = 0
    """The number of the reply that the judge compares it with; 0 for none."""
    only_asked: bool = False
    """The backend cannot prefill: the prompt only asked to continue from what was given."""
    phase: Phase = "waiting"
    place: int = 0
    """Place in the queue while waiting; 0 is next."""
    since: float = 0.0
    """Start of the phase, on the monotonic clock."""
    parts: Mapping[Part, PartProgress] = field(default_factory=lambda: NO_PARTS)
    reply_verdict: ReplyOutcome | None = None
    outcome: Outcome = "running"
    failure: Failure = ""
    """Why it failed, as a suffix of a text key; else empty."""
    rejected: tuple[RejectedDraw, ...] = ()
    """The draws that the gate has rejected so far."""
    record: TurnRecord | None = None

    @property
    def is_withheld(self) -> bool:
        """Whether the gate has rejected the last draw, too, so that there is no reply."""
        return self.record is not None and self.record.withheld

    @property
    def reply(self) -> str:
        """The reply's text so far."""
        return self.parts[Part.REPLY].text

    @property
    def has_words(self) -> bool:
        """Whether the model has written anything."""
        return any(part.text for part in self.parts.values())

    @property
    def writing(self) -> Part | None:
        """The part that is being generated."""
        for part, progress in self.parts.items():
            if progress.state == "writing":
                return part
        return None

    def after(self, event: TurnEvent) -> "Progress":
        """Return the progress after an event."""
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
            case DrawRejected(draw=draw):
                rejected = (*self.rejected, draw)
                return replace(
                    self, phase="writing", parts=NO_PARTS, reply_verdict=None, rejected=rejected
                )
            case TurnDone(record=record):
                return self._done(record)

    def checked(self, before: "Progress", checker: StepChecker) -> "Progress":
        """Return the progress with the evidence of every step whose text differs from before."""
        changed = {
            part: replace(self.parts[part], evidence=checker.check(self.parts[part].text))
            for part in STEPS
            if self.parts[part].text != before.parts[part].text
        }
        return replace(self, parts=MappingProxyType({**self.parts, **changed})) if changed else self

    def failed(self, failure: Failure) -> "Progress":
        """Return the progress, failed for a reason outside the model."""
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
        now = replace(
            before,
            state=before.state if state is None else state,
            text=before.text if text is None else text,
            labels=before.labels if labels is None else labels,
            verdict=before.verdict if verdict is None else verdict,
            writer=before.writer if writer is None else writer,
        )
        return replace(self, parts=MappingProxyType({**self.parts, part: now}))

    def _as_read(self, reading: Reading) -> "Progress":
        """Take the parts from the parsed completion, which overrides what was streamed."""
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
            rejected=record.rejected,
            record=record,
        )
