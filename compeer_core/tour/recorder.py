"""Record turns for the tour: one turn per model and case, whatever it is.

Generation and judging are separate. If the weights of a stage are not available, its recorded text
stays, and the current judge judges it again.
"""

import datetime
import importlib.metadata
import platform
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.errors import ConfigError, UnknownModelError
from compeer_core.judgement import StepVerdict
from compeer_core.policy import Controls, Policy
from compeer_core.reasoning import STEPS
from compeer_core.registry import ModelEntry, Registry
from compeer_core.tour.plan import Case, Plan, Stage
from compeer_core.tour.recordings import (
    Judged,
    Origin,
    Recording,
    SamplingUsed,
    StepJudged,
    load_recording,
    origin_of,
)
from compeer_core.turn import TurnDone, TurnRecord, take_turn
from compeer_core.unifireward import Judge

COMMAND = "python -m compeer_core.tour record"
LIBRARIES = ("torch", "transformers", "tokenizers", "compeer")
DEADLINE_SECONDS = 600.0


@dataclass(frozen=True)
class _Writer:
    policy: Policy
    origin: Origin


class Recorder:
    """Runs the models of a list, and those of named weights."""

    def __init__(
        self,
        plan: Plan,
        models: Path,
        weights: Mapping[str, Path] | None = None,
        judge: str = "",
        today: datetime.date | None = None,
    ) -> None:
        """Get ready; nothing is loaded yet.

        Args:
            plan: What to record.
            models: The list of models (`models.toml`).
            weights: Folders of stages that are not in the list.
            judge: A judge of the list; empty is its default.
            today: The date of the recordings.

        Raises:
            ConfigError: The list is invalid, or weights are given for an unknown stage.
        """
        self._plan = plan
        self._folder = models.parent
        self._registry = Registry.from_toml(models)
        self._weights = dict(weights or {})
        self._judge_name = judge
        self._today = today or datetime.datetime.now(datetime.UTC).date()
        for name in self._weights:
            if name not in {stage.name for stage in plan.stages}:
                raise ConfigError(f"--weights {name}: the plan has no such stage")

    def record(self, stage: Stage, folder: Path) -> Iterator[Recording]:
        """Record all cases of a stage, or judge their recordings again.

        Yields nothing if there are neither weights nor recordings.

        Raises:
            ConfigError: A recording answers another message than the plan's.
            BackendError: A model cannot be loaded.
        """
        writer = self._writer(stage)
        for case in self._plan.cases:
            if writer is not None:
                yield self._judged(self._written(case, stage, writer))
                continue
            path = folder / f"{case.name}.{stage.name}.json"
            if path.is_file():
                recording = load_recording(path)
                if recording.said != case.said.en:
                    raise ConfigError(
                        f"{path} answers another message; name its weights: "
                        f"--weights {stage.name}=FOLDER"
                    )
                yield self._judged(recording)

    def again(self, stage: Stage) -> Iterator[Recording]:
        """Record all cases of a shipped stage again, for comparison."""
        writer = self._writer(stage)
        if writer is not None:
            for case in self._plan.cases:
                yield self._judged(self._written(case, stage, writer))

    def close(self) -> None:
        """Free the models."""
        self._registry.close()

    # --- writing -------------------------------------------------------------------------------

    def _writer(self, stage: Stage) -> _Writer | None:
        registry, folder = self._registry, self._folder
        if stage.name in self._weights:
            location = str(self._weights[stage.name].resolve())
            entry = ModelEntry(name=stage.model, kind="policy", source=location)
            registry, folder = Registry([entry]), Path()
        try:
            entry = registry.entry(stage.model, "policy")
        except UnknownModelError:
            return None
        return _Writer(registry.policy(entry.name), origin_of(entry, folder, shipped=stage.shipped))

    def _written(self, case: Case, stage: Stage, writer: _Writer) -> Recording:
        sampling = replace(writer.policy.sampling, seed=self._plan.seed)
        record = _turn(writer.policy, case.said.en, Controls(sampling=sampling))
        if record.status != "finished":
            raise ConfigError(f"{case.name}, {stage.name}: the turn was cut off: {record.error}")
        return Recording(
            case=case.name,
            stage=stage.name,
            said=case.said.en,
            raw=record.raw,
            status=record.status,
            tokens=record.tokens,
            date=self._today,
            command=COMMAND if stage.shipped else f"{COMMAND} --weights {stage.name}=FOLDER",
            model=writer.origin,
            sampling=SamplingUsed(**asdict(sampling)),
            versions=_versions(),
            machine=platform.machine(),
        )

    # --- judging -------------------------------------------------------------------------------

    def _judged(self, recording: Recording) -> Recording:
        judge = self._registry.judge(self._judge_name)
        if judge is None:
            return recording.model_copy(update={"judged": None})
        entry = self._registry.entry(self._judge_name, "judge")
        origin = origin_of(entry, self._folder, shipped=True)
        judged = judge_words(judge, origin, recording, self._today)
        return recording.model_copy(update={"judged": judged})


def judge_words(judge: Judge, origin: Origin, recording: Recording, today: datetime.date) -> Judged:
    """Judge a recorded turn."""
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
                part=part,
                correct=outcome.correct,
                probability_correct=outcome.probability_correct,
            )
            if isinstance(outcome, StepVerdict)
            else StepJudged(part=part, correct=None)
            for part, outcome in zip(STEPS, outcomes, strict=bool(outcomes))
        ),
        total=reward.total,
        maximum=reward.maximum,
    )


def first_difference(first: str, second: str) -> int | None:
    """Return the index of the first difference of two texts, None if they are equal.

    Example:
        >>> first_difference("tears", "team"), first_difference("tea", "tea")
        (3, None)
    """
    if first == second:
        return None
    pairs = zip(first, second, strict=False)
    shorter = min(len(first), len(second))
    return next((at for at, (a, b) in enumerate(pairs) if a != b), shorter)


def _turn(policy: Policy, message: str, controls: Controls) -> TurnRecord:
    events = take_turn(
        policy,
        None,
        _dialogue(message),
        controls,
        threading.Event(),
        deadline_seconds=DEADLINE_SECONDS,
    )
    *_, last = events
    assert isinstance(last, TurnDone)
    return last.record


def _dialogue(message: str) -> Dialogue:
    return Dialogue((Utterance(Speaker.SEEKER, message),))


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
