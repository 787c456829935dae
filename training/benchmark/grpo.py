"""What a step of GRPO costs: `python -m training benchmark grpo <config.toml>` (COMPEER, Eq. 2 to 7).

A real run of `training.grpo` is made, of a few steps, and each step is done in three ways at once:

- *ours*: a prompt is read once for its group (`rollouts = "shared"`), and the judge judges all
  candidates for a history in a few passes (`compeer_core.backends.transformers_.prefix_scoring`);
- *naive reward*: the same completions are judged once more, the whole conversation read anew for
  each question (`training.benchmark.naive`);
- *plain rollouts*: completions for the same prompts are written once more by trl's own generation,
  which reads a prompt once for each completion.

Only ours is learnt from. What a step would take in another way is its time with one part replaced.
Which way comes first changes from step to step, and ratios are taken within a step, so whatever else
the machine does slows both sides alike. The rewards of the naive way are compared with ours.

With `shape` the policy and the judge have the real shape of a larger model and random weights. Such
a policy writes no turns, so every completion takes the whole budget, and the judge is given made-up
turns instead. Such a judge surprises its own drafts as often as not: judging takes longer than that of
a trained one.
"""

import contextlib
import datetime
import logging
import math
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from pydantic import Field
from transformers import TrainerCallback
from trl.trainer.grpo_trainer import GRPOTrainer

from compeer_core.backends.transformers_.prefix_scoring import Work
from compeer_core.backends.transformers_.scoring import TransformersScorer
from compeer_core.cer import Candidate, Case, CaseUtterance, CerRecord
from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.reasoning import render
from compeer_core.registry import Quantize, Registry, SourceKind
from compeer_core.reweighting import Settings as Reweighting
from compeer_core.unifireward import Judge
from training.benchmark.made_up_talk import made_up_reference, made_up_turn, made_up_utterances
from training.benchmark.measure import GIB, machine, summarise
from training.benchmark.naive import NaiveScorer
from training.benchmark.shapes import ShapeName, write_random_checkpoint
from training.common import results
from training.common.interrupts import StopRequest
from training.common.judge_source import JudgeSource
from training.common.processes import process_count
from training.common.run_directory import RunDirectory, versions
from training.data.samples import write_records
from training.grpo import train
from training.grpo.reward import GroupReward
from training.grpo.settings import GRPOSettings, RewardSettings
from training.grpo.trainer import GroupTrainer

_log = logging.getLogger(__name__)


class Config(FrozenModel):
    """Which models, on which prompts, how often."""

    models: Path = Path("assets/models.toml")
    """The list of models."""
    policy: str = ""
    """A policy of that list with a checkpoint; empty is its default."""
    judge: str = ""
    """A judge of that list, in this process; empty is its default."""
    judge_quantize: Quantize | None = None
    """How the judge's weights are held; the policy's are `training.quantize`."""
    shape: ShapeName | None = None
    """Policy and judge of this shape with random weights, in the place of those of the list, whose
    policy lends its tokenizer."""
    prompts: tuple[Path, ...] = ()
    """Files of histories, as `training.grpo` takes them; without any they are made up."""
    data_dir: Path | None = None
    """Folder of corpora, for histories of `prompts` with pictures of their own."""
    faces: Path | None = None
    """Folder of the packed faces, for histories of `prompts` that show one."""
    utterances: tuple[int, ...] = Field(default=(3, 7, 11, 15, 19), min_length=1)
    """Lengths of made-up histories, in rotation."""
    encoder: str | None = None
    """For Eq. 6; see `training.grpo.train.Config`."""
    reward: RewardSettings = RewardSettings()
    """What a judgement is worth."""
    reweighting: Reweighting = Reweighting()
    """What repetition costs."""
    training: GRPOSettings = GRPOSettings()
    """How to train. The number of steps is set by the next keys."""
    steps: int = Field(default=10, ge=1)
    """Steps that are measured."""
    warm_up: int = Field(default=1, ge=0)
    """Steps before them that are not."""
    output: Path = results.FOLDER
    """Folder of the results file."""
    name: str = "grpo_cpu"
    command: str = "python -m training benchmark grpo training/configs/benchmark_grpo.toml"
    """Recorded with the numbers."""

    @property
    def has_random_weights(self) -> bool:
        return self.shape is not None


@dataclass
class Step:
    """What one step has cost."""

    seconds: float = 0.0
    """Without what was done for the comparison."""
    rollouts: float = 0.0
    judging: float = 0.0
    reweighting: float = 0.0
    preparing: float = 0.0
    """Texts to tokens and back, and tensors."""
    tokens: int = 0
    """Written."""
    read: int = 0
    """Tokens of prompts that were read to write them."""
    judge_read: int = 0
    """Tokens that the judge read."""
    complete: float = 0.0
    """Share of the completions that were complete turns."""
    naive_judging: float = 0.0
    naive_judge_read: int = 0
    plain_rollouts: float = 0.0
    plain_tokens: int = 0
    plain_read: int = 0
    rewards: int = 0
    """Rewards that were compared with those of the naive way."""
    unequal: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    """Largest bytes on the GPU, by part."""

    @property
    def update(self) -> float:
        """Forward and backward passes, and the optimiser."""
        return self.seconds - self.rollouts - self.judging - self.reweighting - self.preparing

    @property
    def rewarding_share(self) -> float:
        return (self.judging + self.reweighting) / self.seconds

    @property
    def with_naive_reward(self) -> float:
        return self.seconds - self.judging + self.naive_judging

    @property
    def with_plain_rollouts(self) -> float:
        return self.seconds - self.rollouts + self.plain_rollouts


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Measure, print the table and write the results file; a dry run loads models and stops."""
    if resume is not None:
        raise ConfigError("a benchmark cannot be resumed: begin it again")
    settings = config.training
    if process_count() > 1:
        raise ConfigError("benchmark grpo times one process; start it without a launcher")
    if settings.period > 1 or settings.rollouts != "shared":
        raise ConfigError(
            "benchmark grpo needs a generation in every step (iterations and generation_steps 1) "
            'and rollouts = "shared"; trl\'s own are measured beside them'
        )
    if config.shape == "qwen2.5-vl-7b" and not torch.cuda.is_available():
        raise ConfigError(
            'shape = "qwen2.5-vl-7b" needs a GPU, and torch sees none; shape = "tiny" runs the '
            "same code anywhere"
        )
    with tempfile.TemporaryDirectory(prefix="compeer-benchmark-") as folder:
        steps, peak, name = measured(config, Path(folder), dry_run=dry_run)
    if dry_run:
        return
    result = results.Result(
        name=config.name,
        title="A step of GRPO: seconds, shares and ratios",
        date=datetime.datetime.now(datetime.UTC).date(),
        model=name,
        label_source="timed",
        command=config.command,
        versions=versions(("torch", "transformers", "trl")),
        seed=settings.seed,
        machine=machine() if not torch.cuda.is_available() else torch.cuda.get_device_name(),
        interval="Range",
        metrics=tuple(_lines(config, steps, peak)),
    )
    path = results.save(result, config.output)
    sys.stdout.write(f"{results.render(result)}\n\nwritten to {path}\n")


def measured(config: Config, folder: Path, *, dry_run: bool) -> tuple[list[Step], int, str]:
    """Make a run below `folder`.

    Returns:
        What each measured step cost, the most memory that the process held, in bytes, and what was
        measured, in words.
    """
    settled = run_config(config, folder)
    ready = train.Preparation.of(settled)
    try:
        scorer = ready.judge.scorer
        if ready.judge.reply_scorer is not None or not isinstance(scorer, TransformersScorer):
            raise ConfigError(
                f"{ready.judge.name}: only one judge of steps and reply in this process is timed"
            )
        naive = NaiveScorer(scorer)
        other = Judge(ready.judge.name, naive, ready.judge.language, ready.judge.vocabulary)
        name = _told(config, ready.judge)
        if dry_run:
            return [], 0, name
        directory = RunDirectory.open(folder / "run", settled)
        trainer: Any = train.build_trainer(
            settled, ready, directory, StopRequest(), kind=_TimedTrainer
        )
        trainer.args.save_strategy = "no"
        trainer.begin(
            scorer,
            naive.work,
            GroupReward(
                other,
                ready.encoder,
                config.reweighting,
                ready.book.records,
                ready.book.pictures,
                config.training.group_size,
                config.reward,
            ),
            stands_in=config.has_random_weights,
        )
        with watched_memory() as readings:
            trainer.train()
    finally:
        ready.close()
    return trainer.measured[config.warm_up :], max(readings), name


def run_config(config: Config, folder: Path) -> train.Config:
    """Return the config of the run that is timed; makes what it needs below `folder`."""
    registry = Registry.from_toml(config.models)
    entry = registry.entry(config.policy, "policy")
    where = entry.where
    if where.kind not in {SourceKind.CHECKPOINT, SourceKind.HUB}:
        raise ConfigError(f"{entry.name}: only a policy with a checkpoint can be trained")
    is_hub = where.kind is SourceKind.HUB
    base = where.location if is_hub else str(config.models.parent / where.location)
    adapter = None if entry.adapter is None else config.models.parent / entry.adapter
    judge = JudgeSource(models=config.models, name=config.judge, quantize=config.judge_quantize)
    if config.shape is not None:
        made = write_random_checkpoint(folder / "base", config.shape, Path(base))
        base, adapter = str(made), None
        judge = JudgeSource(source=base, quantize=config.judge_quantize)
    settings = config.training
    steps = config.warm_up + config.steps
    changes = {"max_steps": steps, "evaluate_every": 0, "log_steps": 1, "report_to": ()}
    if adapter is not None and settings.lora is None and settings.adapter is None:
        changes["adapter"] = adapter
    prompts = config.prompts
    if not prompts:
        count = steps * settings.batch_size * settings.accumulation // settings.group_size
        prompts = (made_up_prompts(folder / "prompts.jsonl", count, config),)
    return train.Config(
        prompts=prompts,
        base=base,
        output=folder / "run",
        data_dir=config.data_dir,
        faces=config.faces,
        style=entry.style if config.shape is None else "trained",
        encoder=config.encoder,
        judge=judge,
        reward=config.reward,
        reweighting=config.reweighting,
        training=settings.model_copy(update=changes),
    )


def made_up_prompts(path: Path, count: int, config: Config) -> Path:
    """Write histories, each of a dialogue of its own."""

    def row(number: int) -> CerRecord:
        rng = np.random.default_rng([config.training.seed, number])
        utterances = made_up_utterances(rng, config.utterances[number % len(config.utterances)])
        reference = made_up_reference(rng)
        name = f"made-up/{number}"
        case = Case(
            id=f"{name}#0",
            dialogue_id=name,
            source_id=name,
            corpus="made-up",
            language="en",
            split="train",
            licence="",
            round=0,
            rounds=1,
            history=tuple(CaseUtterance(speaker=u.speaker, text=u.text) for u in utterances),
            original=reference,
        )
        return CerRecord(id=case.id, case=case, first=Candidate(author="rule", reply=reference))

    # The same words may be drawn twice, and a history counts once.
    write_records(path, (row(number) for number in range(2 * count)))
    return path


# --- the trainer -------------------------------------------------------------------------------


class _TimedTrainer(GroupTrainer):
    """GRPO that does each step in every way, and keeps what it took."""

    def begin(
        self, scorer: TransformersScorer, work: Work, naive: GroupReward, *, stands_in: bool
    ) -> None:
        """Take what to compare with.

        Args:
            scorer: The judge's.
            work: What the naive way reads.
            naive: The naive way.
            stands_in: Whether made-up turns are judged in the place of completions.
        """
        self.measured: list[Step] = []
        self._scorer = scorer
        self._naive_work = work
        self._naive = naive
        self._stands_in = stands_in
        self._now = Step()
        self._extra = 0.0
        """Seconds that were spent on the comparison."""
        self.add_callback(_Clock(self))

    @property
    def _is_ours_first(self) -> bool:
        return self.state.global_step % 2 == 0

    def _log_metric(self, name: str, value: float) -> None:
        of_part = {"seconds/judging": "judging", "seconds/reweighting": "reweighting"}
        if name in of_part:
            setattr(self._now, of_part[name], value)
        if name == "text/complete":
            self._now.complete = value
        super()._log_metric(name, value)

    # --- the parts of a step ---------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        begun, extra = time.perf_counter(), self._extra
        output = super()._generate_and_score_completions(inputs)
        spent = time.perf_counter() - begun - (self._extra - extra)
        now = self._now
        now.preparing = spent - now.rollouts - now.judging - now.reweighting
        self._peak("preparing")
        return output

    def _generate_single_turn(self, *arguments: Any, **options: Any) -> Any:
        now = self._now

        def ours() -> Any:
            with self._counted_prompts() as read:
                begun = time.perf_counter()
                found = super(_TimedTrainer, self)._generate_single_turn(*arguments, **options)
                now.rollouts = time.perf_counter() - begun
            now.tokens, now.read = sum(map(len, found[0])), sum(read)
            self._peak("rollouts")
            return found

        def plain() -> None:
            with self._counted_prompts() as read, self._apart():
                begun = time.perf_counter()
                found = GRPOTrainer._generate_single_turn(self, *arguments, **options)
                now.plain_rollouts = time.perf_counter() - begun
            now.plain_tokens, now.plain_read = sum(map(len, found[0])), sum(read)
            self._peak("plain rollouts")

        if not self._is_ours_first:
            plain()
        found = ours()
        if self._is_ours_first:
            plain()
        return found

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        if self._stands_in:
            rng = np.random.default_rng([self.args.seed, self.state.global_step])
            completions = [render(made_up_turn(rng)) for _ in completions]
        rows = [one["row"] for one in inputs]
        now = self._now
        naive: list[float | None] = []

        def ours() -> torch.Tensor:
            # Each step has prompts of its own: nothing of the last one's helps.
            self._scorer.chat.owner.call(self._scorer.shelf.clear)
            before = self._scorer.work.tokens
            found = super(_TimedTrainer, self)._calculate_rewards(
                inputs, prompts, completions, completion_ids_list
            )
            now.judge_read = self._scorer.work.tokens - before
            self._peak("judging")
            return found

        def other() -> None:
            parts: dict[str, float] = {}
            before = self._naive_work.tokens
            with self._apart():
                naive[:] = self._naive(
                    completions=completions, row=rows, log_metric=parts.__setitem__
                )
            now.naive_judging = parts["seconds/judging"]
            now.naive_judge_read = self._naive_work.tokens - before
            self._peak("naive judging")

        if not self._is_ours_first:
            other()
        found = ours()
        if self._is_ours_first:
            other()
        now.rewards = len(naive)
        now.unequal = sum(
            not _is_same(reward, told)
            for reward, told in zip(found[:, 0].tolist(), naive, strict=True)
        )
        return found

    # --- clocks and counters ---------------------------------------------------------------------

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Do something that is not part of the step."""
        begun = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._extra += time.perf_counter() - begun

    @contextlib.contextmanager
    def _counted_prompts(self) -> Iterator[list[int]]:
        """Collect how many tokens the policy reads in passes over more than one a row."""
        read: list[int] = []

        def count(module: Any, inputs: Any, options: dict[str, Any]) -> None:
            ids = options.get("input_ids", inputs[0] if inputs else None)
            if ids is not None and ids.shape[1] > 1:
                read.append(ids.numel())

        bare: Any = self.accelerator.unwrap_model(self.model)
        readers = [bare.get_base_model() if hasattr(bare, "get_base_model") else bare]
        if self._rollout_model is not None:
            readers.append(self._rollout_model.model)
        hooks = [one.register_forward_pre_hook(count, with_kwargs=True) for one in readers]
        try:
            yield read
        finally:
            for hook in hooks:
                hook.remove()

    def _peak(self, part: str) -> None:
        """Note the most memory of the GPU since the last part."""
        if torch.cuda.is_available():
            self._now.memory[part] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()

    def step_begins(self) -> None:
        self._now, self._extra = Step(), 0.0
        self._begun = time.perf_counter()

    def step_ends(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._now.seconds = time.perf_counter() - self._begun - self._extra
        self._peak("update")
        self.measured.append(self._now)
        _log.info("step %d: %.2f s", len(self.measured), self._now.seconds)


class _Clock(TrainerCallback):
    """Tells the trainer where a step begins and ends."""

    def __init__(self, trainer: _TimedTrainer) -> None:
        self._trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.step_begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.step_ends()


def _is_same(reward: float, told: float | None) -> bool:
    """Whether two rewards say the same; rounding may move a similarity by little."""
    if told is None or math.isnan(reward):
        return told is None and math.isnan(reward)
    return math.isclose(reward, told, abs_tol=1e-4)


@contextlib.contextmanager
def watched_memory(every_seconds: float = 0.05) -> Iterator[list[int]]:
    """Collect the resident bytes of this process, over and over, while the block runs."""
    process = psutil.Process()
    readings = [process.memory_info().rss]
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(every_seconds):
            readings.append(process.memory_info().rss)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield readings
    finally:
        finished.set()
        thread.join()


# --- what is reported --------------------------------------------------------------------------


def _told(config: Config, judge: Judge) -> str:
    if config.shape is None:
        name = config.policy or Registry.from_toml(config.models).default_name("policy")
        return f"{name} judged by {judge.name}"
    settings = config.training
    held = settings.quantize or settings.weights
    trained = "LoRA" if settings.lora is not None else "all weights"
    return (
        f"shape of {config.shape}, random weights, {held}, {trained} trained; judge of that shape"
    )


def _lines(config: Config, steps: Sequence[Step], peak: int) -> Iterator[results.Metric]:
    settings = config.training
    completions = settings.batch_size * settings.accumulation

    def seconds(name: str, values: Sequence[float], note: str = "") -> results.Metric:
        return summarise(name, values, "s", note)

    def share(name: str, values: Sequence[float], note: str = "") -> results.Metric:
        return summarise(name, [100 * value for value in values], "%", note)

    yield seconds(
        "A step",
        [one.seconds for one in steps],
        f"{completions} completions for {completions // settings.group_size} prompts, "
        f"{completions // settings.batch_size} forward and backward passes",
    )
    parts = {
        "rollouts": [one.rollouts for one in steps],
        "judging": [one.judging for one in steps],
        "reweighting": [one.reweighting for one in steps],
        "update": [one.update for one in steps],
        "tokens and tensors": [one.preparing for one in steps],
    }
    for name, values in parts.items():
        yield seconds(f"- {name}", values)
    for name, values in parts.items():
        of_steps = [value / one.seconds for value, one in zip(values, steps, strict=True)]
        yield share(f"- {name}, share of the step", of_steps)
    yield share("Judging and reweighting, share of the step", [s.rewarding_share for s in steps])
    turns = "made-up turns, not what was written" if config.has_random_weights else ""
    yield share("Complete turns among what was judged", [one.complete for one in steps], turns)
    yield from _compared(steps)
    if not torch.cuda.is_available():
        note = "policy, optimiser, judge, and what was done for the comparison"
        yield summarise("Peak resident memory", [peak / GIB], "GiB", note, largest=True)
    for part in steps[0].memory:
        values = [one.memory[part] / GIB for one in steps]
        yield summarise(f"Peak memory of the GPU, {part}", values, "GiB", largest=True)


def _compared(steps: Sequence[Step]) -> Iterator[results.Metric]:
    """Yield what the other ways cost."""

    def ratio(name: str, pairs: Sequence[tuple[float, float]], note: str = "") -> results.Metric:
        return summarise(name, [one / other for one, other in pairs if other], "x", note)

    naive = "every question reads the conversation anew"
    yield summarise("Judging, naive", [one.naive_judging for one in steps], "s", naive)
    yield ratio("Judging, naive to ours", [(s.naive_judging, s.judging) for s in steps])
    read = [(float(s.naive_judge_read), float(s.judge_read)) for s in steps]
    if any(ours for _, ours in read):
        yield ratio("Tokens that the judge reads, naive to ours", read)
    yield summarise(
        "A step with a naive reward", [one.with_naive_reward for one in steps], "s", naive
    )
    yield ratio("A step, naive reward to ours", [(s.with_naive_reward, s.seconds) for s in steps])
    yield results.Metric(
        name="Rewards that differ between naive and ours",
        value=sum(one.unequal for one in steps),
        n=sum(one.rewards for one in steps),
    )
    plain = "trl's generate(), other completions for the same prompts"
    yield summarise(
        "Rollouts, tokens written a second", [s.tokens / s.rollouts for s in steps], "tokens/s"
    )
    yield summarise(
        "Rollouts by trl, tokens written a second",
        [s.plain_tokens / s.plain_rollouts for s in steps],
        "tokens/s",
        plain,
    )
    yield ratio(
        "Speed of rollouts, ours to trl's",
        [(s.tokens / s.rollouts, s.plain_tokens / s.plain_rollouts) for s in steps],
    )
    yield ratio(
        "Tokens of prompts read, trl's to ours",
        [(float(s.plain_read), float(s.read)) for s in steps],
        "padding included",
    )
    yield summarise(
        "A step with trl's rollouts", [one.with_plain_rollouts for one in steps], "s", plain
    )
    yield ratio(
        "A step, trl's rollouts to ours", [(s.with_plain_rollouts, s.seconds) for s in steps]
    )
