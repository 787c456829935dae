"""The stages that `python -m training` offers, and what a stage module must hold.

A stage is one module with two public names:

``Config``
    A `FrozenModel` with a docstring under every field. The stage's TOML file is exactly this model:
    its keys are the fields, and a file names only what differs from the defaults.
``run(config, *, resume, dry_run)``
    Does the work and returns once all of it is done. `resume` is the run directory to go on with, or
    None to begin. With `dry_run` it checks what can be checked in seconds (files, shapes, labels)
    and writes no result.

A stage that was asked to stop (Ctrl-C) saves, then raises `StoppedEarly`; returning would tell a
recipe that the stage is done. One that can only go on after people have done their part raises
`WaitingForPeople`. A wrong setting raises `ConfigError`, anything else that a person can
cure a `CompeerError`: both are printed as one sentence, without a traceback.

Modules are imported only when their stage is asked for, so that `--help` and a typing error do not
wait for torch.

To add a stage, write its module and add one line to `STAGES`. A name of two words is typed as two.
"""

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast

from compeer_core.config import FrozenModel
from compeer_core.errors import CompeerError, ConfigError


@dataclass(frozen=True)
class Stage:
    """One line of the table: where a stage lives and what it does, in one sentence."""

    module: str
    summary: str
    flags: Mapping[str, str] = field(default_factory=dict)
    """Keys of the config that the command line also offers as a flag of that name, and what each
    is good for: `{"max_requests": "..."}` gives `--max-requests VALUE`."""


STAGES: Mapping[str, Stage] = MappingProxyType(
    {
        "cer": Stage(
            "training.cer.pipeline",
            "build CER: from raw corpora to annotated rows that are ready for training",
            flags={"max_requests": "stop after this many requests to the generators, all kept"},
        ),
        "cer written": Stage(
            "training.cer.written", "turn the written dialogues into rows of CER to learn from"
        ),
        "cer rules": Stage(
            "training.cer.esconv_rules", "turn ESConv with reasoning by rule into rows of CER"
        ),
        "tokenizer": Stage("training.nano.tokenizer", "learn the tokenizer of COMPEER-nano"),
        "pretrain": Stage("training.nano.pretrain", "pre-train COMPEER-nano on plain English"),
        "vision teacher": Stage(
            "training.vision.teacher", "train the network from which the image tower learns"
        ),
        "vision": Stage("training.vision.train", "teach the image tower of COMPEER-nano faces"),
        "base": Stage("training.base.build", "make the base of COMPEER-small from a GGUF file"),
        "base tower": Stage(
            "training.base.tower", "give the base the image tower of another checkpoint"
        ),
        "encoder": Stage(
            "training.encoder.distil", "teach the sentence encoder of the redundancy terms"
        ),
        "sft dialogues": Stage(
            "training.sft.dialogues",
            "fine-tune a small policy on whole dialogues, each read once",
        ),
        "sft adapter": Stage(
            "training.sft.adapter", "train a LoRA adapter on a small base, dialogue by dialogue"
        ),
        "sft cer": Stage("training.sft.cer", "fine-tune a policy on turns of CER rows"),
        "merge": Stage(
            "training.finetune.merge", "merge a LoRA adapter into the weights it was trained on"
        ),
        "extract": Stage(
            "training.finetune.extract",
            "write what a training changed as a LoRA adapter of a given rank",
        ),
        "reward": Stage(
            "training.reward_model.train", "train UnifiReward, a PRM or an ORM on rows of CER"
        ),
        "grpo": Stage("training.grpo.train", "reinforce a policy with a reward model (GRPO)"),
        "export": Stage(
            "training.finetune.export", "write a checkpoint or an adapter as it is shipped"
        ),
        "evaluate esconv": Stage(
            "training.evaluation.esconv", "measure a policy on turns of ESConv"
        ),
        "evaluate grpo": Stage(
            "training.evaluation.grpo", "compare policies on the same held-out histories"
        ),
        "evaluate reward": Stage(
            "training.evaluation.reward", "compare judges on rows of CER that they never saw"
        ),
        "evaluate reading": Stage(
            "training.evaluation.reading",
            "let a careful reader judge replies of several policies without knowing whose they are",
        ),
        "evaluate consistency": Stage(
            "training.evaluation.consistency",
            "measure how often verdicts on steps and on the reply contradict each other",
        ),
        "benchmark": Stage("training.benchmark.measure", "measure speed and memory of the demo"),
        "benchmark judging": Stage(
            "training.benchmark.judging", "measure what judging a round costs, naive and shared"
        ),
        "benchmark grpo": Stage(
            "training.benchmark.grpo", "measure what a step of GRPO costs, part by part"
        ),
        "run": Stage("training.recipe", "run the stages of a recipe in order, skipping done ones"),
    }
)


class StoppedEarly(CompeerError):
    """A stage saved its state and stopped before its end because it was asked to."""


class WaitingForPeople(StoppedEarly):
    """A stage did all it can until people have done their part; the message says what that is."""


class StageModule(Protocol):
    """What this package expects of a stage module; see the module docstring."""

    Config: type[FrozenModel]

    # The config is the module's own `Config`, which a protocol cannot say.
    def run(self, config: Any, *, resume: Path | None, dry_run: bool) -> None: ...


def load_stage(name: str, stages: Mapping[str, Stage] = STAGES) -> StageModule:
    """Import the module of a stage.

    Raises:
        ConfigError: No stage has this name.
    """
    if name not in stages:
        near = difflib.get_close_matches(name, stages, n=1)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        raise ConfigError(f"unknown stage '{name}'{hint}; the stages are {', '.join(stages)}")
    return cast("StageModule", importlib.import_module(stages[name].module))
