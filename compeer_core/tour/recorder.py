"""Records turns for the tour: each model is prompted once, and its output is stored.

Generation and judging are separate: the current judge scores every recording, also those whose
weights are not listed any more.
"""

import datetime
import importlib.metadata
import platform
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.errors import ConfigError, UnknownModelError
from compeer_core.judgement import StepVerdict
from compeer_core.policy import Controls, Policy
from compeer_core.reasoning import STEPS
from compeer_core.registry import Kind, Registry
from compeer_core.tour.plan import Plan
from compeer_core.tour.recordings import (
    Judged,
    Origin,
    Recording,
    SamplingUsed,
    StepJudged,
    origin_of,
)
from compeer_core.turn import TurnDone, TurnRecord, take_turn
from compeer_core.unifireward import Judge

COMMAND = "python -m compeer_core.tour record"
LIBRARIES = ("torch", "transformers", "tokenizers", "compeer")
DEADLINE_SECONDS = 600.0


class Recorder:
    """Prompts the models of a list, and judges recordings."""

    def __init__(
        self, plan: Plan, models: Path, judge: str = "", today: datetime.date | None = None
    ) -> None:
        """Prepare; nothing is loaded yet.

        Args:
            plan: What to record.
            models: The model list (`models.toml`).
            judge: A judge of the list; empty is its default.
            today: The date to record.

        Raises:
            ConfigError: The list is invalid.
        """
        self._plan = plan
        self._folder = models.parent
        self._registry = Registry.from_toml(models)
        self._judge_name = judge
        self._today = today or datetime.datetime.now(datetime.UTC).date()
        self._origins: dict[tuple[str, Kind], Origin] = {}

    def record(self, stage: str, model: str) -> Iterator[Recording]:
        """Record all cases of a stage from a listed model.

        Raises:
            ConfigError: No policy has that name, or a turn was cut off.
            BackendError: The model cannot be loaded.
        """
        for case in self._plan.cases:
            yield self._written(case.name, stage, case.said.en, model)

    def again(self, recording: Recording) -> Recording | None:
        """Record a turn again; None if its weights are not listed any more."""
        if not self._is_listed(recording.model):
            return None
        return self._written(recording.case, recording.stage, recording.said, recording.model.name)

    def judged(self, recording: Recording) -> Recording:
        """Return a recording with the current judge's verdict."""
        judge = self._registry.judge(self._judge_name)
        judged = None
        if judge is not None:
            origin = self._origin(self._judge_name, "judge")
            judged = judge_words(judge, origin, recording, self._today)
        shipped = self._is_listed(recording.model)
        model = recording.model.model_copy(update={"shipped": shipped})
        return recording.model_copy(update={"judged": judged, "model": model})

    def close(self) -> None:
        """Free the models."""
        self._registry.close()

    def _origin(self, name: str, kind: Kind) -> Origin:
        if (name, kind) not in self._origins:  # hashing large files takes seconds
            entry = self._registry.entry(name, kind)
            self._origins[name, kind] = origin_of(entry, self._folder)
        return self._origins[name, kind]

    def _is_listed(self, model: Origin) -> bool:
        try:
            return self._origin(model.name, "policy").files == model.files
        except UnknownModelError:
            return False

    def _written(self, case: str, stage: str, said: str, model: str) -> Recording:
        policy = self._registry.policy(model)
        sampling = replace(policy.sampling, seed=self._plan.seed)
        record = _turn(policy, said, Controls(sampling=sampling))
        if record.status != "finished":
            raise ConfigError(f"{case}, {stage}: the turn was cut off: {record.error}")
        return Recording(
            case=case,
            stage=stage,
            said=said,
            raw=record.raw,
            status=record.status,
            tokens=record.tokens,
            date=self._today,
            command=f"{COMMAND} {stage}={model}",
            model=self._origin(model, "policy"),
            sampling=SamplingUsed(**asdict(sampling)),
            versions=_versions(),
            machine=platform.machine(),
        )


def judge_words(judge: Judge, origin: Origin, recording: Recording, today: datetime.date) -> Judged:
    """Score recorded text with a judge."""
    reading = recording.reading
    judgement = judge.judge(_dialogue(recording.said), [reading], [None])[0]
    reward = judgement.reward()
    outcomes = judgement.steps or ()
    return Judged(
        judge=origin,
        date=today,
        versions=_versions(),
        asked=reading.is_complete,
        steps=tuple(
            StepJudged(
                part=part, correct=said.correct, probability_correct=said.probability_correct
            )
            if isinstance(said, StepVerdict)
            else StepJudged(part=part, correct=None)
            for part, said in zip(STEPS, outcomes, strict=bool(outcomes))
        ),
        total=reward.total,
        maximum=reward.maximum,
    )


def first_difference(first: str, second: str) -> int | None:
    """Return where two texts differ, None if they are the same.

    Example:
        >>> first_difference("tears", "team"), first_difference("tea", "tea")
        (3, None)
    """
    if first == second:
        return None
    pairs = zip(first, second, strict=False)
    shorter = min(len(first), len(second))
    return next((at for at, (a, b) in enumerate(pairs) if a != b), shorter)


def _turn(policy: Policy, said: str, controls: Controls) -> TurnRecord:
    events = take_turn(
        policy,
        None,
        _dialogue(said),
        controls,
        threading.Event(),
        deadline_seconds=DEADLINE_SECONDS,
    )
    *_, last = events
    assert isinstance(last, TurnDone)
    return last.record


def _dialogue(said: str) -> Dialogue:
    return Dialogue((Utterance(Speaker.SEEKER, said),))


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
