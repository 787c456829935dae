"""GRPO of a policy with a reward model (COMPEER, Eq. 2 and 3): `python -m training grpo <config.toml>`.

Beside the files of every run (`training.common.run_directory`), the run directory holds
`rollouts.jsonl`, a sample of completions with their rewards; `plots/`; and `model` or `adapter`.

Mistakes are found before step 0: batches that would split groups, checkpoints between two
generations, a judge that is missing or cannot judge such turns, a policy whose tokenizer drops the
tags. Prompts that are too long are skipped and counted.
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
from compeer_core.cer import CerRecord, Split
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
from training.data.histories import has_pictures, read_histories, shortened
from training.data.pictures import Pictures
from training.data.records import drawn
from training.finetune.base_model import freeze_image_encoder, load_base, lora_config
from training.finetune.trl_common import (
    MetricsToRunDirectory,
    SaveAndStop,
    checkpoint_to_resume,
    keep_adapter_in_fp32,
    last_checkpoint,
    open_processor,
    remove_incomplete_checkpoints,
    save_trained,
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

_ENCODER_CHECK_TEXTS = 200
FULL_DISK = 1 << 20
"""Free space in bytes below which a disk counts as full."""


class Config(FrozenModel):
    """`[grpo]`: which prompts, which policy, which judge, how long."""

    prompts: tuple[Path, ...] = Field(min_length=1)
    """Files of CER rows; the histories of the train split are the prompts. Paper: histories H of CER."""
    rewritten: tuple[Path, ...] = ()
    """Files of CER rows rewritten by personality (`variants/persona.jsonl`), as further prompts. Paper:
    URP's dialogues are rewritten; here that is a switch of its own, beside `reweighting`."""
    history_characters: int | None = Field(default=None, gt=0)
    """Drop the oldest utterances of a history beyond this, of held-out ones too; None drops none."""
    prompt_limit: int | None = Field(default=None, gt=0)
    """Number of histories to use, drawn by the seed; None uses all."""
    held_out: tuple[Path, ...] = ()
    """Files of CER rows to evaluate on every `training.evaluate_every` steps."""
    held_out_split: Split = "valid"
    """Their split."""
    held_out_limit: int = Field(default=32, gt=0)
    """How many of them, drawn by seed 0 whatever the run's seed is."""
    base: Path | str
    """Checkpoint, or name on the Hub, of the policy to start from: COMPEER-SFT."""
    output: Path
    """Run directory."""
    data_dir: Path | None = None
    """Folder of corpora, for histories with pictures of their own."""
    faces: Path | None = None
    """Folder of the packed faces, for histories that show one."""
    style: Style = "trained"
    """Whether the policy was trained on the output grammar, or a prompt must ask for it."""
    encoder: str | None = None
    """For Eq. 6: a folder, or `hf:NAME` of a sentence-transformers model; None uses the shipped one."""
    judge: JudgeSource
    """The reward model."""
    reward: RewardSettings = RewardSettings()
    """The value of a judgement."""
    reweighting: Reweighting = Reweighting()
    """The penalty on repetition: URP. `form = "off"` is UR."""
    training: GRPOSettings = GRPOSettings()
    """How to train."""


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Check everything, then train; a dry run only checks."""
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
    last = checkpoint_to_resume(checkpoints, resume=resume is not None)
    _check_processes(last)
    if last is not None and settings.rollouts == "vllm":
        directory.log(
            "vLLM does not restore its sampler: completions differ from an uninterrupted run"
        )
    ready = Preparation.of(config)
    try:
        for line in ready.log_lines:
            directory.log("%s", line)
        if is_first():
            remove_incomplete_checkpoints(checkpoints)
        directory.rewind(step_of(last))
        rollout_log = RolloutLog(directory.path, settings.rollouts_kept, settings.group_size)
        rollout_log.rewind(step_of(last))
        stopping = StopRequest()
        trainer = build_trainer(config, ready, directory, stopping, rollout_log, last)
        try:
            with stopping:
                trainer.train(resume_from_checkpoint=str(last) if last else None)
            if stopping.requested:
                raise StoppedEarly(f"saved; continue with --resume {directory.path}")
            save_trained(trainer, directory.path, config.base, is_adapter=settings.trains_adapter)
        except (OSError, RuntimeError) as error:
            _explain_full_disk(error, directory.path)
            raise
        if is_first():
            plot_run(list(directory.rows()), directory.path / "plots")
    finally:
        ready.close()


# --- preparation -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preparation:
    """Everything read and checked before step 0."""

    book: PromptBook
    train: list[int]
    """Numbers of the prompts to train on."""
    held_out: list[int]
    processor: Any
    judge: Judge
    encoder: SentenceEncoder
    log_lines: tuple[str, ...]
    """What to log about it."""

    @classmethod
    def of(cls, config: Config) -> "Preparation":
        """Read and check.

        Raises:
            ConfigError: A setting does not fit; the message says which.
            CheckpointError: The checkpoint of the policy or the judge cannot be loaded.
        """
        settings = config.training
        processor = open_processor(config.base)
        # trl pads prompts on the left and aligns the processor's picture fields with them.
        processor.tokenizer.padding_side = "left"
        check_tags(config.base, processor)
        train, skipped = read_histories([*config.prompts, *config.rewritten], "train")
        train = drawn(train, config.prompt_limit, settings.seed)
        held_out: list[CerRecord] = []
        if config.held_out:
            candidates, _ = read_histories(config.held_out, config.held_out_split)
            train_sources = {record.case.source_id for record in train}
            held_out = [r for r in candidates if r.case.source_id not in train_sources]
            if len(held_out) < len(candidates):
                skipped["held out, but of a training dialogue"] += len(candidates) - len(held_out)
            held_out = drawn(held_out, config.held_out_limit, 0)
        elif settings.evaluate_every:
            raise ConfigError("training.evaluate_every: name the held-out prompts (`held_out`)")
        pictures = Pictures(config.data_dir, config.faces)
        reserved = control_tokens(processor.tokenizer)
        records = [shortened(r, config.history_characters) for r in (*train, *held_out)]
        book = PromptBook(records, pictures, config.style, reserved)
        numbers = _fitting(book, processor, config, skipped)
        train_numbers = [number for number in numbers if number < len(train)]
        held_out_numbers = [number for number in numbers if number >= len(train)]
        per_pass = max(1, settings.batch_size * process_count() // settings.group_size)
        del held_out_numbers[len(held_out_numbers) - len(held_out_numbers) % per_pass :]
        if settings.evaluate_every and not held_out_numbers:
            raise ConfigError(
                f"too few held-out prompts: one forward pass takes {per_pass}; add files to "
                "`held_out` or lower training.batch_size"
            )
        judge = _own_device(config.judge).load()
        try:
            check_judge(judge, book, train_numbers)
            texts = [record.case.original or "" for record in train[:_ENCODER_CHECK_TEXTS]]
            encoder = load_encoder(config.encoder, samples=texts)
        except BaseException:
            judge.close()
            raise
        log_lines = (
            *(f"skipped: {count} x {reason}" for reason, count in sorted(skipped.items())),
            f"{len(train_numbers)} prompts to train on, {len(held_out_numbers)} held out",
            f"judge: {judge.name}; encoder: {encoder.name}",
        )
        return cls(book, train_numbers, held_out_numbers, processor, judge, encoder, log_lines)

    def close(self) -> None:
        """Free the judge."""
        self.judge.close()


def _fitting(book: PromptBook, processor: Any, config: Config, skipped: Counter[str]) -> list[int]:
    """Return the numbers of the prompts that leave room for a completion; count the others."""
    settings = config.training
    context = _context(config.base)
    limits = [settings.longest_prompt, context and context - settings.max_new_tokens]
    room = min((limit for limit in limits if limit is not None), default=None)
    numbers = list(range(len(book.records)))
    if room is None:
        return numbers
    if room < 1:
        raise ConfigError(
            f"{config.base}: has a context of {context} tokens, and training.max_new_tokens = "
            f"{settings.max_new_tokens} leaves none of them for a prompt; lower it"
        )
    lengths = book.lengths(numbers, processor)
    fitting = [number for number, length in zip(numbers, lengths, strict=True) if length <= room]
    if len(fitting) < len(numbers):
        skipped[f"longer than {room} tokens"] += len(numbers) - len(fitting)
    if not fitting:
        raise ConfigError(
            f"no prompt fits into {room} tokens (the shortest has {min(lengths)}); raise "
            "training.longest_prompt or set history_characters"
        )
    return fitting


def _context(base: Path | str) -> int | None:
    """Return the context length of a policy in tokens; None if its config names none."""
    from transformers import AutoConfig

    try:
        text = AutoConfig.from_pretrained(base, trust_remote_code=False).get_text_config()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{base}: cannot be loaded: {error}") from error
    limit = getattr(text, "max_position_embeddings", None)
    return None if limit is None else int(limit)


def _own_device(source: JudgeSource) -> JudgeSource:
    """Put a judge on the device of this process, unless the config names one."""
    local = os.environ.get("LOCAL_RANK")
    if source.device is not None or local is None or not torch.cuda.is_available():
        return source
    return source.model_copy(update={"device": f"cuda:{local}"})


# --- checks ------------------------------------------------------------------------------------


def example_turn(reply: str) -> SupportTurn:
    """Return a complete turn for checks."""
    return SupportTurn(
        Reasoning(
            HistoryStep("They have begun to talk.", Stage.EXPLORATION),
            EmotionStep("They sound low.", Sentiment.NEGATIVE, Emotion.SADNESS, 3),
            StrategyStep("It is not clear yet what happened.", Strategy.QUESTION),
        ),
        reply,
    )


def check_tags(base: Path | str, processor: Any) -> None:
    """Check that a turn survives the policy's tokenizer.

    Raises:
        ConfigError: It does not, so every turn would count as incomplete.
    """
    text = render(example_turn("What happened?"))
    ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    back = processor.batch_decode([ids], skip_special_tokens=True)[0]
    if not read(back).is_complete:
        raise ConfigError(
            f"{base}: its tokenizer drops the tags of the grammar; make sure that they are not special "
            f"tokens: {back[:60]!r}"
        )


def check_judge(judge: Judge, book: PromptBook, numbers: Sequence[int]) -> None:
    """Check that the judge can judge a turn, and one with a picture if any prompt has one.

    Raises:
        ConfigError: It cannot.
    """
    plain = next((n for n in numbers if not has_pictures(book.records[n])), None)
    pictured = next((n for n in numbers if has_pictures(book.records[n])), None)
    for number in (plain, pictured):
        if number is None:
            continue
        case = book.records[number].case
        reference = case.original or ""
        (judgement,) = judge.judge(
            book.pictures.dialogue(case), [example_turn(reference)], [reference]
        )
        outcomes = (*(judgement.steps or ()), judgement.response)
        reasons = [outcome.reason for outcome in outcomes if isinstance(outcome, Unscorable)]
        if reasons or judgement.reward().total is None:
            where = " with a picture" if number == pictured else ""
            reason = reasons[0] if reasons else "it gave no verdict"
            raise ConfigError(f"judge {judge.name} cannot judge a turn{where}: {reason}")


def _check_reports(settings: GRPOSettings) -> None:
    """Check that the packages of `report_to` are installed."""
    for name in settings.report_to:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"training.report_to: {name} is not installed; run `pip install {name}` or remove it"
            )


def _check_processes(last: Path | None) -> None:
    """Check that a run resumes with as many processes as saved it."""
    if last is None:
        return
    saved = len(list(last.glob("rng_state*.pth")))
    if saved != process_count():
        raise ConfigError(
            f"{last}: saved by {saved} processes, and now there are {process_count()}: the run "
            "would not continue unchanged; start as many, or begin a new run from its weights"
        )


def _explain_full_disk(error: Exception, folder: Path) -> None:
    """Replace an error caused by a full disk by one that says so."""
    free = shutil.disk_usage(folder).free
    if free >= FULL_DISK and "No space left" not in str(error):
        return
    last = last_checkpoint(folder / "checkpoints")
    saved = f"step {step_of(last)} is saved" if last else "nothing is saved yet"
    raise BackendError(
        f"{folder}: the disk is full; {saved}. Make room, then continue with --resume {folder}"
    ) from error


# --- the trainer -------------------------------------------------------------------------------


def build_trainer(
    config: Config,
    ready: Preparation,
    directory: RunDirectory,
    stopping: StopRequest,
    rollout_log: RolloutLog | None = None,
    last: Path | None = None,
    kind: type[GroupTrainer] = GroupTrainer,
) -> GroupTrainer:
    """Return the trainer.

    Args:
        config: All settings.
        ready: The prepared prompts and models.
        directory: Receives metrics and checkpoints.
        stopping: Set when the user asks to stop.
        rollout_log: Receives a sample of the completions.
        last: The checkpoint to resume from.
        kind: The trainer class.

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
        ready.book.records,
        ready.book.pictures,
        settings.group_size,
        config.reward,
    )
    trainer = kind(
        book=ready.book,
        reward=reward,
        settings=settings,
        rollout_log=rollout_log,
        rollout_model=_rollout_model(config, arguments.device, last),
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
            "training.rollouts = 'shared' runs the policy a different number of times in each "
            "process, and FSDP needs equal numbers; use 'plain'"
        )
    return trainer


def _rollout_model(config: Config, device: torch.device, last: Path | None) -> RolloutModel | None:
    """Return the rollout model; None where the trained weights generate."""
    weights = config.training.rollout_weights
    if weights is None:
        return None
    if is_deepspeed_zero3_enabled():
        raise ConfigError(
            "training.rollout_weights needs a full copy of the weights in every process, but DeepSpeed "
            "ZeRO-3 splits every model that is loaded; remove it, or use ZeRO-2"
        )
    source = _start_weights(config, last)
    model: Any = load_base(source, weights, config.training.precision, None, device)
    return RolloutModel(model.to(device))


def _plan(settings: GRPOSettings, prompts: Sequence[int]) -> tuple[int, list[int]]:
    """Return the number of optimiser steps, and the prompt numbers in order."""
    per_step = settings.batch_size * settings.accumulation * process_count()
    per_generation = per_step * settings.generation_steps // settings.group_size
    if settings.max_steps > 0:
        steps = settings.max_steps
    else:
        steps = int(settings.epochs * len(prompts) // per_generation) * settings.period
    if steps < 1:
        raise ConfigError(
            f"{len(prompts)} prompts are fewer than the {per_generation} of one generation; lower "
            "training.accumulation or batch_size, or set max_steps"
        )
    generations = math.ceil(steps / settings.period)
    order = prompt_order(len(prompts), generations * per_generation, settings.seed)
    return steps, [prompts[index] for index in order]


def grpo_arguments(settings: GRPOSettings, checkpoints: Path, steps: int) -> GRPOConfig:
    """Return trl's arguments for our settings."""
    schedule: str = settings.schedule
    if schedule == "constant" and settings.warmup_share:
        schedule = "constant_with_warmup"
    evaluation: dict[str, Any] = {}
    if settings.evaluate_every:
        evaluation = {"eval_strategy": "steps", "eval_steps": settings.evaluate_every}
    vllm: dict[str, Any] = {}
    if settings.rollouts == "vllm":
        vllm = vllm_arguments(settings.vllm or VllmRollouts())
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
        shuffle_dataset=False,  # `prompt_order` has shuffled it
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
        # It gathers pictures only from processes that have some, and would wait for ever.
        log_multimodal=False,
        report_to=list(settings.report_to),
        **evaluation,
        **vllm,
    )


def _start_weights(config: Config, last: Path | None) -> Path | str:
    """Return where to load the initial weights from, the base's if an adapter is trained."""
    # The trainer restores an adapter itself. It would look up full weights by their names in memory,
    # which transformers 5 changes when saving, and silently continue with the base's.
    return last if last is not None and not config.training.trains_adapter else config.base


def _load_policy(config: Config, device: torch.device, last: Path | None) -> PreTrainedModel:
    """Load the initial weights."""
    settings = config.training
    model = load_base(
        _start_weights(config, last),
        settings.weights,
        settings.precision,
        settings.quantize,
        device,
    )
    if settings.adapter is None:
        return model
    try:
        adapted: Any = PeftModel.from_pretrained(model, settings.adapter, is_trainable=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{settings.adapter}: cannot be loaded: {error}") from error
    trained: PreTrainedModel = adapted
    return trained
