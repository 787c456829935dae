"""The stages of `python -m training`, and the interface of a stage module.

A stage is a module with two public names:

``Config``
    A `FrozenModel` with a docstring under every field. The keys of the stage's TOML file are its
    fields; a file lists only those that differ from the defaults.
``run(config, *, resume, dry_run)``
    Runs the stage to completion. `resume` is the run directory to resume, or None for a new run.
    With `dry_run` it checks what can be checked in seconds (files, shapes, labels) and writes no
    result.

An interrupted stage (Ctrl-C) saves its state and raises `StoppedEarly`: if it returned, a recipe
would mark it as done. A stage that needs input from people raises `WaitingForPeople`. A wrong
setting raises `ConfigError`, any other failure the user can fix a `CompeerError`; both are printed
as one sentence, without a traceback.

A stage's module is imported only when that stage runs, so `--help` does not wait for torch.

To add a stage, write its module and add an entry to `STAGES`. A two-word name takes two arguments
on the command line.
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
    """A stage's module and a one-line summary."""

    module: str
    summary: str
    flags: Mapping[str, str] = field(default_factory=dict)
    """Config keys that are also command-line flags, with their help text:
    `{"max_requests": "..."}` adds `--max-requests VALUE`."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Config keys that the command line names in order, with their help text; `--config` is optional then."""


STAGES: Mapping[str, Stage] = MappingProxyType(
    {
        "cer": Stage(
            "training.cer.pipeline",
            "build CER from raw corpora: ingest, filter, generate, annotate",
            flags={"max_requests": "stop after this many generator requests; responses are saved"},
        ),
        "cer written": Stage(
            "training.cer.written", "convert the shipped LLM-written dialogues to CER rows"
        ),
        "cer mirror": Stage(
            "training.cer.mirror",
            "join the shipped LLM-written mirroring turns with their contexts",
        ),
        "cer corrected": Stage(
            "training.cer.corrected",
            "join the shipped corrections of COMPEER-small's turns with their contexts",
        ),
        "cer graded": Stage(
            "training.cer.graded", "make rows of the shipped graded turns of COMPEER-small"
        ),
        "cer flawed": Stage(
            "training.cer.flawed",
            "convert the shipped flawed variants to judged CER rows",
        ),
        "cer contrast": Stage(
            "training.cer.contrast",
            "convert the shipped opposite versions of judged steps to CER rows",
        ),
        "cer sanity": Stage(
            "training.cer.sanity", "pair fitting replies with rule-made corruptions"
        ),
        "cer rules": Stage(
            "training.cer.esconv_rules", "convert ESConv to CER rows with rule-based reasoning"
        ),
        "vision teacher": Stage(
            "training.vision.teacher", "train the CNN that the image tower is distilled from"
        ),
        "vision": Stage(
            "training.vision.train", "train the image tower of a small model on facial expressions"
        ),
        "base": Stage("training.base.build", "build the base of COMPEER-small from a GGUF file"),
        "base tower": Stage(
            "training.base.tower", "transfer the image tower of another checkpoint to the base"
        ),
        "encoder": Stage(
            "training.encoder.distil", "distil the sentence encoder of the redundancy terms"
        ),
        "risk": Stage("training.risk.train", "train the learned check for signs of danger"),
        "sft adapter": Stage(
            "training.sft.adapter", "train a LoRA adapter on a small base, one dialogue per row"
        ),
        "sft seeker": Stage(
            "training.sft.seeker", "train the small seeker of simulated dialogues as a LoRA adapter"
        ),
        "sft preference": Stage(
            "training.sft.preference", "train a LoRA adapter by DPO on pairs of turns"
        ),
        "sft cer": Stage(
            "training.sft.cer", "fine-tune a policy on CER turns whose labels are all correct"
        ),
        "merge": Stage("training.finetune.merge", "merge a LoRA adapter into its base model"),
        "extract": Stage(
            "training.finetune.extract",
            "approximate the difference of two checkpoints by a LoRA adapter",
        ),
        "reward": Stage(
            "training.reward_model.train", "train UnifiReward, a PRM or an ORM on CER rows"
        ),
        "reward adapter": Stage(
            "training.reward_model.adapter", "train a judge as a LoRA adapter on a small base"
        ),
        "grpo": Stage("training.grpo.train", "train a policy against a reward model with GRPO"),
        "export": Stage(
            "training.finetune.export", "write the files of a checkpoint or adapter to ship"
        ),
        "evaluate esconv": Stage(
            "training.evaluation.esconv", "evaluate a policy on ESConv's test split"
        ),
        "evaluate grpo": Stage(
            "training.evaluation.grpo", "compare policies on the same held-out histories"
        ),
        "evaluate reward": Stage(
            "training.evaluation.reward", "compare reward models on held-out CER rows"
        ),
        "evaluate reading": Stage(
            "training.evaluation.blind_reading",
            "have a person or LLM rate replies of several policies, blinded",
        ),
        "evaluate steering": Stage(
            "training.evaluation.steering",
            "have a person or LLM judge, blinded, whether replies carry out a forced strategy",
        ),
        "evaluate human": Stage(
            "training.evaluation.human",
            "write a blind study of several models for raters, and analyse their answers",
        ),
        "evaluate consistency": Stage(
            "training.evaluation.consistency",
            "measure how often step verdicts and reply verdicts contradict each other",
        ),
        "evaluate esc-eval": Stage(
            "training.evaluation.esc_eval",
            "ESC-Eval: rate dialogues with a simulated seeker on seven dimensions",
        ),
        "evaluate sage": Stage(
            "training.evaluation.sage",
            "SAGE: measure how dialogues change the emotion of a simulated seeker",
        ),
        "evaluate compare": Stage(
            "training.evaluation.compare",
            "test whether two runs with the same settings differ on their shared dialogues",
            arguments={"first": "folder of run A", "second": "folder of run B"},
        ),
        "evaluate report": Stage(
            "training.evaluation.report",
            "write a page of results, plots and transcripts of evaluations",
        ),
        "benchmark": Stage(
            "training.benchmark.measure", "measure the speed and memory use of the demo"
        ),
        "benchmark judging": Stage(
            "training.benchmark.judging", "time judging a group: naive, sessions, shared prefill"
        ),
        "benchmark decoding": Stage(
            "training.benchmark.decoding", "compare the speed and NLL of ways to decode on a CPU"
        ),
        "benchmark serving": Stage(
            "training.benchmark.serving", "measure the demo while several seekers chat at once"
        ),
        "benchmark grpo": Stage(
            "training.benchmark.grpo", "time the parts of a GRPO training step"
        ),
        "run": Stage("training.recipe", "run the stages of a recipe in order, skipping done ones"),
    }
)


class StoppedEarly(CompeerError):
    """A stage was interrupted and saved its state."""


class WaitingForPeople(StoppedEarly):
    """A stage needs input from people before it can continue; the message says what."""


class StageModule(Protocol):
    """The interface of a stage module; see the module docstring."""

    Config: type[FrozenModel]

    # `config` is an instance of the module's own `Config`, which a protocol cannot express.
    def run(self, config: Any, *, resume: Path | None, dry_run: bool) -> None: ...


def load_stage(name: str, stages: Mapping[str, Stage] = STAGES) -> StageModule:
    """Import the module of a stage.

    Raises:
        ConfigError: There is no stage of this name.
    """
    if name not in stages:
        matches = difflib.get_close_matches(name, stages, n=1)
        hint = f" (did you mean '{matches[0]}'?)" if matches else ""
        raise ConfigError(f"unknown stage '{name}'{hint}; the stages are {', '.join(stages)}")
    return cast("StageModule", importlib.import_module(stages[name].module))


def refuse_resume(resume: Path | None, reason: str) -> None:
    """Reject --resume in a stage that has nothing to resume.

    Raises:
        ConfigError: `resume` is set; the message is `reason`.
    """
    if resume is not None:
        raise ConfigError(f"{reason}: leave out --resume")
