"""GRPO of a policy with a reward model (COMPEER, Eq. 2 and 3): `python -m training grpo <config.toml>`.

A run directory holds, beside what every run does (`training.common.run_directory`): `rollouts.jsonl`, a sample
of what was written and what it earned; `plots/`; and `model` or `adapter`.

What can be wrong is looked for before step 0: batches that would split groups, checkpoints between two
generations, a judge that is missing or cannot judge turns of this form, a policy whose tokenizer loses
the tags, prompts that are too long (left out and counted).
"""

import importlib.util
import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from pydantic import Field
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from trl.trainer.grpo_config import GRPOConfig

from compeer_core.backends.transformers_.tokens import control_tokens
from compeer_core.config import FrozenModel
from compeer_core.encoder import SentenceEncoder, load_encoder
from compeer_core.errors import BackendError, CheckpointError, ConfigError
from compeer_core.judgement import Unscorable
from compeer_core.policy import Style
from compeer_core.reasoning import (
    EmotionStep,
    HistoryStep,
    Reasoning,
    StrategyStep,
    SupportTurn,
    read,
    render,
)
from compeer_core.redundancy import Settings as Reweighting
from compeer_core.taxonomy import Emotion, Sentiment, Stage, Strategy
from compeer_core.unifireward import Judge
from training.common.interrupts import StopRequest
from training.common.judge_source import JudgeSource
from training.common.processes import is_first, process_count
from training.common.run_directory import RunDirectory
from training.data.histories import History, drawn_histories, read_histories
from training.data.pictures import Pictures
from training.finetune.base_model import freeze_image_encoder, load_base, lora_config
from training.finetune.trl_common import (
    MetricsToRunDirectory,
    SaveAndStop,
    keep_adapter_in_fp32,
    last_checkpoint,
    open_processor,
    remove_incomplete_checkpoints,
    save_weights,
    step_of,
    trainer_arguments,
)
from training.grpo.plots import plot_run
from training.grpo.prompts import PromptBook, prompt_order
from training.grpo.reward import GroupReward
from training.grpo.rollout_log import RolloutLog
from training.grpo.rollout_model import RolloutModel
from training.grpo.settings import GRPOSettings, RewardSettings
from training.grpo.shared_update import check_model
from training.grpo.trainer import GroupTrainer
from training.grpo.vllm import VllmRollouts, check_vllm, vllm_arguments
from training.stages import StoppedEarly

_log = logging.getLogger(__name__)

_TRIED = 200
FULL_DISK = 1 << 20
"""In bytes. A disk with less free space than this is taken to be full."""


class Config(FrozenModel):
    """`[grpo]`: which prompts, which policy, which judge, how long."""

    prompts: tuple[Path, ...] = Field(min_length=1)
    """Files of histories: `samples.train.jsonl` of the SFT stage, or rows of CER, of which those of
    the train split are used. Paper: histories H of CER."""
    rewritten: tuple[Path, ...] = ()
    """Files of CER rewritten by personality (`variants/persona.jsonl`), whose histories are sampled
    from as well. Paper: URP's dialogues are rewritten; here that is a switch of its own, beside
    `reweighting`."""
    history_characters: int | None = Field(default=None, gt=0)
    """Oldest utterances of a history are left out beyond this, of those held out as well; None leaves
    out none."""
    prompt_limit: int | None = Field(default=None, gt=0)
    """At most so many histories, drawn by the seed; None takes all."""
    held_out: tuple[Path, ...] = ()
    """Files of histories that are only looked at, every `training.evaluate_every` steps."""
    held_out_split: str = "valid"
    """Which split of CER rows that is."""
    held_out_limit: int = Field(default=32, gt=0)
    """How many of them, drawn by the seed 0 whatever the run's: always the same."""
    base: Path | str
    """Checkpoint, or name on the hub, of the policy to start from: COMPEER-SFT."""
    output: Path
    """Run directory."""
    data_dir: Path | None = None
    """Folder of corpora, for histories with pictures of their own."""
    faces: Path | None = None
    """Folder of the packed faces, for histories that show one."""
    style: Style = "trained"
    """Whether the policy was trained to write the grammar, or a prompt must ask for it."""
    encoder: str | None = None
    """For Eq. 6: a folder, or `hf:NAME` of a sentence-transformers model; None is the shipped one."""
    judge: JudgeSource
    """The reward model."""
    reward: RewardSettings = RewardSettings()
    """What a judgement is worth."""
    reweighting: Reweighting = Reweighting()
    """What repetition costs: URP. `form = "off"` is UR."""
    training: GRPOSettings = GRPOSettings()
    """How to train."""


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Check all there is to check, then train; a dry run only checks."""
    settings = config.training
    settings.check_batches(process_count())
    if settings.rollouts == "vllm":
        check_vllm(
            settings.vllm or VllmRollouts(),
            process_count(),
            (settings.longest_prompt or 0) + settings.max_new_tokens,
            settings.quantize,
        )
    _check_reports(settings)
    if dry_run:
        Preparation.of(config).close()
        return
    directory = RunDirectory.open(resume or config.output, config, resume=resume is not None)
    checkpoints = directory.path / "checkpoints"
    # A start that logged no step may have left some, under another config.
    if resume is None and is_first():
        shutil.rmtree(checkpoints, ignore_errors=True)
    last = last_checkpoint(checkpoints) if resume is not None else None
    _check_processes(last)
    if last is not None and settings.rollouts == "vllm":
        directory.log("vLLM draws anew: from here on completions differ from those of a whole run")
    ready = Preparation.of(config)
    try:
        for sentence in ready.told:
            directory.log("%s", sentence)
        if is_first():
            remove_incomplete_checkpoints(checkpoints)
        directory.rewind(step_of(last))
        kept = RolloutLog(directory.path, settings.rollouts_kept, settings.group_size)
        kept.rewind(step_of(last))
        stopping = StopRequest()
        trainer = build_trainer(config, ready, directory, stopping, kept, last)
        try:
            with stopping:
                trainer.train(resume_from_checkpoint=str(last) if last else None)
            if stopping.requested:
                raise StoppedEarly(f"saved; go on with --resume {directory.path}")
            output = directory.path / ("adapter" if settings.trains_adapter else "model")
            save_weights(trainer, output)
            if not settings.trains_adapter and is_first():
                open_processor(config.base).save_pretrained(output)
        except (OSError, RuntimeError) as error:
            _explain_full_disk(error, directory.path)
            raise
        if is_first():
            plot_run(list(directory.rows()), directory.path / "plots")
    finally:
        ready.close()


# --- what there is to train with ---------------------------------------------------------------


@dataclass(frozen=True)
class Preparation:
    """All that was read and checked before step 0."""

    book: PromptBook
    train: list[int]
    """Numbers of the histories to train on."""
    held_out: list[int]
    processor: Any
    judge: Judge
    encoder: SentenceEncoder
    told: tuple[str, ...]
    """What there is to say about it."""

    @classmethod
    def of(cls, config: Config) -> "Preparation":
        """Read and check.

        Raises:
            ConfigError: Something does not fit; the message says what.
            CheckpointError: The policy's or the judge's checkpoint cannot be loaded.
        """
        settings = config.training
        processor = open_processor(config.base)
        # trl pads prompts on the left, and lays what the processor says about pictures beside them.
        processor.tokenizer.padding_side = "left"
        check_tags(config.base, processor)
        told: list[str] = []
        train, left_out = read_histories([*config.prompts, *config.rewritten], "train")
        train = drawn_histories(train, config.prompt_limit, settings.seed)
        held_out: list[History] = []
        if config.held_out:
            found, _ = read_histories(config.held_out, config.held_out_split)
            known = {history.source for history in train}
            held_out = [history for history in found if history.source not in known]
            if len(held_out) < len(found):
                left_out["held out, but of a dialogue to train on"] += len(found) - len(held_out)
            held_out = drawn_histories(held_out, config.held_out_limit, 0)
        elif settings.evaluate_every:
            raise ConfigError("training.evaluate_every: name the held-out prompts (`held_out`)")
        pictures = Pictures(config.data_dir, config.faces)
        reserved = control_tokens(processor.tokenizer)
        histories = [*train, *held_out]
        if config.history_characters is not None:
            histories = [history.shortened(config.history_characters) for history in histories]
        book = PromptBook(histories, pictures, config.style, reserved)
        numbers = _fitting(book, processor, config, left_out)
        told += [f"left out: {count} x {reason}" for reason, count in sorted(left_out.items())]
        of_train = [number for number in numbers if number < len(train)]
        of_held_out = [number for number in numbers if number >= len(train)]
        per_pass = max(1, settings.batch_size * process_count() // settings.group_size)
        of_held_out = of_held_out[: len(of_held_out) - len(of_held_out) % per_pass]
        if settings.evaluate_every and not of_held_out:
            raise ConfigError(f"there are fewer than {per_pass} held-out prompts, one forward pass")
        told.append(f"{len(of_train)} prompts to train on, {len(of_held_out)} held out")
        judge = _own_device(config.judge).load()
        try:
            check_judge(judge, book, of_train)
            encoder = load_encoder(config.encoder, samples=_samples(train))
        except BaseException:
            judge.close()
            raise
        told.append(f"judge: {judge.name}; encoder: {encoder.name}")
        return cls(book, of_train, of_held_out, processor, judge, encoder, tuple(told))

    def close(self) -> None:
        """Free the judge."""
        self.judge.close()


def _fitting(book: PromptBook, processor: Any, config: Config, left_out: Counter[str]) -> list[int]:
    """Return the numbers of the histories that leave room for a completion; count the others."""
    settings = config.training
    limit = _context(config.base)
    rooms = [settings.longest_prompt, None if limit is None else limit - settings.max_new_tokens]
    room = min((room for room in rooms if room is not None), default=None)
    numbers = list(range(len(book.histories)))
    if room is None:
        return numbers
    if room < 1:
        raise ConfigError(
            f"{config.base}: reads and writes {limit} tokens, and training.max_new_tokens = "
            f"{settings.max_new_tokens} leaves none of them for a prompt"
        )
    lengths = book.lengths(numbers, processor)
    fitting = [number for number, length in zip(numbers, lengths, strict=True) if length <= room]
    if len(fitting) < len(numbers):
        left_out[f"longer than {room} tokens"] += len(numbers) - len(fitting)
    if not fitting:
        raise ConfigError(f"no prompt has at most {room} tokens; the shortest has {min(lengths)}")
    return fitting


def _samples(histories: Sequence[History]) -> list[str]:
    """Return some texts that an encoder must be able to read."""
    return [history.reference for history in histories[:_TRIED]]


def _context(base: Path | str) -> int | None:
    """Return how many tokens a policy can read and write."""
    from transformers import AutoConfig

    try:
        text = AutoConfig.from_pretrained(base, trust_remote_code=False).get_text_config()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{base}: cannot be loaded: {error}") from error
    limit = getattr(text, "max_position_embeddings", None)
    return None if limit is None else int(limit)


def _own_device(source: JudgeSource) -> JudgeSource:
    """Put a judge on the device of this process, unless the config says where."""
    local = os.environ.get("LOCAL_RANK")
    if source.device is not None or local is None or not torch.cuda.is_available():
        return source
    return source.model_copy(update={"device": f"cuda:{local}"})


# --- checks ------------------------------------------------------------------------------------


def example_turn(reply: str) -> SupportTurn:
    """Return a complete turn, to try things with."""
    return SupportTurn(
        Reasoning(
            HistoryStep("They have begun to talk.", Stage.EXPLORATION),
            EmotionStep("They sound low.", Sentiment.NEGATIVE, Emotion.SADNESS, 3),
            StrategyStep("It is not clear yet what happened.", Strategy.QUESTION),
        ),
        reply,
    )


def check_tags(base: Path | str, processor: Any) -> None:
    """See that a turn survives the policy's tokenizer.

    Raises:
        ConfigError: It does not, so that every turn would be taken for incomplete.
    """
    text = render(example_turn("What happened?"))
    ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    back = processor.batch_decode([ids], skip_special_tokens=True)[0]
    if not read(back).is_complete:
        raise ConfigError(
            f"{base}: its tokenizer loses the tags of the grammar (are they special tokens?): "
            f"{back[:60]!r}"
        )


def check_judge(judge: Judge, book: PromptBook, numbers: Sequence[int]) -> None:
    """Let the judge judge a turn, and one with a picture if prompts have some.

    Raises:
        ConfigError: It could not.
    """
    plain = next((n for n in numbers if not book.histories[n].has_pictures), None)
    pictured = next((n for n in numbers if book.histories[n].has_pictures), None)
    for number in (plain, pictured):
        if number is None:
            continue
        history = book.histories[number]
        (found,) = judge.judge(
            history.dialogue(book.pictures), [example_turn(history.reference)], [history.reference]
        )
        reasons = [
            outcome.reason
            for outcome in (*(found.steps or ()), found.response)
            if isinstance(outcome, Unscorable)
        ]
        if reasons or found.reward().total is None:
            shown = " with a picture" if number == pictured else ""
            told = reasons[0] if reasons else "it gave no verdict"
            raise ConfigError(f"judge {judge.name} cannot judge a turn{shown}: {told}")


def _check_reports(settings: GRPOSettings) -> None:
    """See that what metrics are reported to is installed."""
    for name in settings.report_to:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"training.report_to: {name} is not installed; `pip install {name}`, or leave it out"
            )


def _check_processes(last: Path | None) -> None:
    """See that a run goes on with as many processes as it was saved by.

    Raises:
        ConfigError: It would not; then it could not go on as it would have.
    """
    if last is None:
        return
    saved = len(list(last.glob("rng_state*.pth")))
    if saved != process_count():
        raise ConfigError(
            f"{last}: saved by {saved} processes, and now there are {process_count()}: the run "
            "would not go on as it began; start as many, or begin a new run from its weights"
        )


def _explain_full_disk(error: Exception, folder: Path) -> None:
    """Raise a sentence in the place of an error that comes from a full disk."""
    free = shutil.disk_usage(folder).free
    if free >= FULL_DISK and "No space left" not in str(error):
        return
    last = last_checkpoint(folder / "checkpoints")
    saved = f"step {step_of(last)} is saved" if last else "nothing is saved yet"
    raise BackendError(
        f"{folder}: the disk is full; {saved}. Make room, and go on with --resume {folder}"
    ) from error


# --- the trainer -------------------------------------------------------------------------------


def build_trainer(
    config: Config,
    ready: Preparation,
    directory: RunDirectory,
    stopping: StopRequest,
    kept: RolloutLog | None = None,
    last: Path | None = None,
    kind: type[GroupTrainer] = GroupTrainer,
) -> GroupTrainer:
    """Return the trainer, ready to begin.

    Args:
        config: All settings.
        ready: What was read and checked.
        directory: Where metrics and checkpoints go.
        stopping: Whether a person wants it to end.
        kept: Where a sample of the completions goes.
        last: The checkpoint to go on from.
        kind: The trainer, or one that does more.

    Raises:
        ConfigError: There are too few prompts for one generation.
    """
    settings = config.training
    steps, order = _plan(settings, ready.train)
    directory.log(
        "%d steps of %d completions (%d prompts): %d at once, %d times, in %d processes",
        steps,
        settings.batch_size * settings.accumulation * process_count(),
        settings.batch_size * settings.accumulation * process_count() // settings.group_size,
        *(settings.batch_size, settings.accumulation, process_count()),
    )
    arguments = grpo_arguments(settings, directory.path / "checkpoints", steps)
    model = _load_policy(config, arguments.device, last)
    adapter = None
    if settings.lora is not None:
        adapter = lora_config(model, settings.lora, freeze_vision=settings.freeze_vision)
    elif settings.freeze_vision and settings.adapter is None:
        freeze_image_encoder(model)
    reward = GroupReward(
        ready.judge,
        ready.encoder,
        config.reweighting,
        ready.book.histories,
        ready.book.pictures,
        settings.group_size,
        config.reward,
    )
    trainer = kind(
        book=ready.book,
        reward=reward,
        settings=settings,
        kept=kept,
        writer=_writing_copy(config, arguments.device, last),
        model=model,
        args=arguments,
        train_dataset=ready.book.data_set(order),
        eval_dataset=ready.book.data_set(ready.held_out) if settings.evaluate_every else None,
        processing_class=ready.processor,
        peft_config=adapter,
        callbacks=[
            MetricsToRunDirectory(directory, len(order) / len(ready.train)),
            SaveAndStop(stopping, settings.period),
        ],
    )
    if settings.quantize:
        keep_adapter_in_fp32(trainer.model)
    if settings.update == "shared":
        check_model(model)
    if trainer.is_fsdp_enabled and settings.rollouts == "shared":
        raise ConfigError(
            "training.rollouts = 'shared' runs the policy as often as a process has tokens to "
            "write, and FSDP needs all processes to run it equally often; use 'plain'"
        )
    return trainer


def _writing_copy(config: Config, device: torch.device, last: Path | None) -> RolloutModel | None:
    """Return the weights that write the completions, if they are others than those that are trained."""
    weights = config.training.rollout_weights
    if weights is None:
        return None
    if is_deepspeed_zero3_enabled():
        raise ConfigError(
            "training.rollout_weights needs a whole copy of the weights in every process, and under "
            "DeepSpeed ZeRO-3 whatever is loaded is split among them; leave it out, or use ZeRO-2"
        )
    copy: Any = load_base(
        _beginning(config, last), weights, config.training.precision, None, device
    )
    return RolloutModel(copy.to(device))


def _plan(settings: GRPOSettings, prompts: Sequence[int]) -> tuple[int, list[int]]:
    """Return the number of optimiser steps, and the prompts in the order in which they come."""
    per_step = settings.batch_size * settings.accumulation * process_count()
    per_generation = per_step * settings.generation_steps // settings.group_size
    if settings.max_steps > 0:
        steps = settings.max_steps
    else:
        steps = int(settings.epochs * len(prompts) // per_generation) * settings.period
    if steps < 1:
        raise ConfigError(
            f"{len(prompts)} prompts are fewer than the {per_generation} of one generation; lower "
            "training.accumulation or batch_size, or name max_steps"
        )
    generations = math.ceil(steps / settings.period)
    order = prompt_order(len(prompts), generations * per_generation, settings.seed)
    return steps, [prompts[place] for place in order]


def grpo_arguments(settings: GRPOSettings, checkpoints: Path, steps: int) -> GRPOConfig:
    """Return trl's arguments for our settings."""
    schedule: str = settings.schedule
    if schedule == "constant" and settings.warmup_share:
        schedule = "constant_with_warmup"
    evaluation: dict[str, Any] = {}
    if settings.evaluate_every:
        evaluation = {"eval_strategy": "steps", "eval_steps": settings.evaluate_every}
    of_vllm: dict[str, Any] = {}
    if settings.rollouts == "vllm":
        of_vllm = vllm_arguments(settings.vllm or VllmRollouts())
    return trainer_arguments(
        GRPOConfig,
        settings,
        checkpoints,
        max_steps=steps,
        learning_rate=settings.lr,
        lr_scheduler_type=schedule,
        warmup_steps=settings.warmup_share,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.accumulation,
        steps_per_generation=settings.accumulation * settings.generation_steps,
        num_iterations=settings.iterations,
        num_generations=settings.group_size,
        shuffle_dataset=False,  # `prompt_order` has drawn it
        max_completion_length=settings.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        beta=settings.kl,
        epsilon=settings.epsilon,
        epsilon_high=settings.epsilon_high,
        loss_type=settings.loss,
        importance_sampling_level=settings.ratio,
        scale_rewards=settings.scale,
        entropy_coef=settings.entropy_bonus,
        mask_truncated_completions=settings.mask_unfinished,
        # It would gather pictures from those processes alone that have some, and wait for ever.
        log_multimodal=False,
        report_to=list(settings.report_to),
        **evaluation,
        **of_vllm,
    )


def _beginning(config: Config, last: Path | None) -> Path | str:
    """Return where the weights to begin with are, those below an adapter if one is trained."""
    # The trainer reads an adapter from its checkpoint. Whole weights it reads by their names in
    # memory, which transformers 5 has changed on the way to disk: it would go on with the base's.
    return last if last is not None and not config.training.trains_adapter else config.base


def _load_policy(config: Config, device: torch.device, last: Path | None) -> PreTrainedModel:
    """Load the weights to begin with."""
    settings = config.training
    model = load_base(
        _beginning(config, last), settings.weights, settings.precision, settings.quantize, device
    )
    if settings.adapter is None:
        return model
    try:
        adapted: Any = PeftModel.from_pretrained(model, settings.adapter, is_trainable=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{settings.adapter}: cannot be loaded: {error}") from error
    trained: PreTrainedModel = adapted
    return trained
