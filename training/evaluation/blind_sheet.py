"""A sheet that a person or an LLM judges blind, in two runs of a stage.

The first run samples the turns, writes these files into its output and stops:

```text
sheet.jsonl   for the reader: a line per question, in random order
rubric.md     for the reader: how to judge a line
key.json      what the lines hide
turns.jsonl   the turns of the policies
```

The reader writes `judgements.jsonl`, a row for each line of the sheet; the second run computes the metrics.
"""

import json
import logging
import math
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import Field

from compeer_core.cer import Case, CaseUtterance
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.row_files import json_lines, parse_row, read_json, replacing, write_rows
from compeer_core.stats import Floats, estimate, weighted_mean
from training.common import results
from training.common.fingerprints import digest
from training.common.run_directory import RunDirectory
from training.evaluation.answer_store import clear_stores
from training.evaluation.contexts import BlindConfig, SampledTurn, read_contexts
from training.evaluation.policy_answers import Policies, PolicySource, gate_state
from training.stages import WaitingForPeople, refuse_resume

_log = logging.getLogger(__name__)

SHEET, KEY, JUDGEMENTS, TURNS = "sheet.jsonl", "key.json", "judgements.jsonl", "turns.jsonl"
NO_REPLY = "(no reply)"
RATERS = {"llm": "LLM rater", "person": "human rater"}
"""How tables name the reader, by the source of the labels."""


class SheetConfig(BlindConfig):
    """Policies, contexts and reader."""

    policies: Policies[PolicySource] = Field(min_length=1)
    name: str
    """Name of the results file."""
    reader: str
    """Description of the reader for the result, such as the name of an LLM."""
    label_source: Literal["person", "llm"]
    command: str
    """The command that reproduces the result."""


class Key(FrozenModel):
    """`key.json`: what raters must not see."""

    asked: str
    """Digest of the settings of the sheet."""
    lines: dict[str, dict[str, Any]]
    """What each line hides, by its ID."""


class Line(FrozenModel):
    """What the sheet and the judgements have for each question."""

    id: str


AnyLine = TypeVar("AnyLine", bound=Line)


class WrittenTurn(FrozenModel):
    """A policy's turn for a context."""

    policy: str
    context: str
    source: str
    """Source dialogue of the context, the unit of resampling."""
    corpus: str
    """Empty for a first message."""
    conversation: tuple[str, ...]
    messages: tuple[str, ...]
    """The seeker's messages."""
    text: str

    @classmethod
    def of(cls, turn: SampledTurn, **fields: Any) -> Self:
        """Return the row of a sampled turn; `fields` are those of a subclass."""
        case = turn.case
        said_by_seeker = [each for each in case.history if each.speaker is Speaker.SEEKER]
        return cls(
            policy=turn.policy,
            context=case.id,
            source=case.source_id,
            corpus=case.corpus,
            conversation=tuple(map(_as_line, case.history)),
            messages=tuple(each.text for each in said_by_seeker),
            text=turn.text,
            **fields,
        )


def _as_line(utterance: CaseUtterance) -> str:
    photo = " [with a photo of a face]" if utterance.images else ""
    return f"{utterance.speaker.value}{photo}: {utterance.text}"


@dataclass(frozen=True)
class Sheet:
    """What the first run writes."""

    turns: Sequence[WrittenTurn]
    lines: Sequence[Line]
    key: Mapping[str, Mapping[str, Any]]
    """What each line hides, by its ID."""


def contexts_of(config: SheetConfig, resume: Path | None) -> list[Case]:
    """Return the contexts to answer.

    Raises:
        ConfigError: A file of contexts is wrong, or `resume` is another folder than the output.
    """
    if resume != config.output:
        refuse_resume(resume, "a stage with a sheet resumes by itself")
    contexts = list(read_contexts(config.contexts, config.seed))
    _log.info("%d contexts, %d policies", len(contexts), len(config.policies))
    return contexts


def judgements_of(
    config: SheetConfig, rubric: Path, kind: type[AnyLine], make: Callable[[], Sheet]
) -> dict[str, AnyLine]:
    """Return the reader's judgements of all lines, by their IDs; write the sheet if there is none.

    Args:
        config: The stage's.
        rubric: Copied into the output.
        kind: A row of the judgements.
        make: Samples the turns; an interrupted call is resumed.

    Raises:
        WaitingForPeople: The sheet is written, the judgements are missing.
        ConfigError: They do not match the sheet, or the sheet does not match the settings.
    """
    output, judgements = config.output, config.output / JUDGEMENTS
    settings = digest(config.model_dump(mode="json", exclude={"results", "reader", "label_source"}))
    if not (output / KEY).is_file():
        if judgements.exists():
            raise ConfigError(f"{judgements} belongs to an earlier sheet; move it elsewhere")
        RunDirectory.continued(
            output, config
        )  # now, since the turns are sampled with these weights
        sheet = make()
        write_rows(output / TURNS, sheet.turns)
        write_rows(output / SHEET, sheet.lines)
        shutil.copy(rubric, output / "rubric.md")
        with replacing(output / KEY) as file:  # last, so that an interrupted run starts again
            json.dump({"asked": settings, "lines": sheet.key}, file, indent=1)
        clear_stores(output)
    key = read_json(output / KEY, Key)
    if key.asked != settings:
        raise ConfigError(
            f"{output}: the sheet was written with other settings; choose another output"
        )
    if not judgements.is_file():
        raise WaitingForPeople(
            f"rate {output / SHEET} according to {output / 'rubric.md'}, write the judgements to "
            f"{judgements} and run this command again"
        )
    return _matched(judgements, kind, key.lines.keys())


def read_key(config: SheetConfig) -> dict[str, dict[str, Any]]:
    """Return what each line of the sheet hides, by its ID."""
    return read_json(config.output / KEY, Key).lines


def _matched(path: Path, kind: type[AnyLine], lines: Collection[str]) -> dict[str, AnyLine]:
    """Read one judgement of each line of the sheet."""
    found: dict[str, AnyLine] = {}
    for where, text in json_lines(path):
        judgement = parse_row(kind, where, text)
        if judgement.id not in lines:
            raise ConfigError(f"{where}: the sheet has no line {judgement.id!r}")
        if judgement.id in found:
            raise ConfigError(f"{where}: {judgement.id} was judged before; keep one judgement")
        found[judgement.id] = judgement
    if missing := [line for line in lines if line not in found]:
        raise ConfigError(f"{path}: {len(missing)} lines are not judged, first {missing[0]}")
    return found


def publish(config: SheetConfig, title: str, metrics: Iterable[results.Metric]) -> None:
    """Save the result, and its table in the output."""
    RunDirectory.continued(config.output, config)
    result = results.made(
        ("torch", "transformers", "peft"),
        name=config.name,
        title=f"{title} by {config.reader}",
        model=", ".join(policy.name for policy in config.policies),
        label_source=f"{config.label_source} ({config.reader}), and rule where it says so",
        command=config.command,
        seed=config.seed,
        gate=gate_state(config.policies),
        interval="95 % CI over source dialogues",
        compared="Policy",
        metrics=tuple(metrics),
    )
    results.publish(result, config.results, config.output)


def share(
    name: str, values: Sequence[float], weights: Floats, about: str, of: str
) -> results.Metric:
    """Return the mean of the known values as a share; see `compeer_core.stats.weighted_mean`."""
    known = len(values) - sum(math.isnan(value) for value in values)
    mean = estimate(weighted_mean(weights, values), known)
    return results.measured(name, mean, unit="%", of=of, about=about)
