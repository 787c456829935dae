"""Blind rating of replies: `python -m training evaluate reading <config.toml>`.

All policies answer the same contexts once. The first run writes two files and stops: `sheet.jsonl` for the
reader, with one context per line and its replies in random order, and `key.json`, which maps replies to
policies and must be hidden from the reader. The reader writes `judgements.jsonl` according to `rubric.md`;
the second run computes the metrics.

The reader is a person or an LLM, which the result states. Rule-based measures of all turns (completeness,
repetition, invented quotations) are reported as well.
"""

import datetime
import json
import logging
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from compeer_core.backends.protocol import Sampling
from compeer_core.cer import Case, CaseUtterance
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.grounding import invented_quotations
from compeer_core.ngrams import loops
from compeer_core.reasoning import read, reply_of
from compeer_core.row_files import write_rows
from compeer_core.stats import Floats, bootstrap_weights, estimate, weighted_mean
from training.common import results
from training.common.fingerprints import digest
from training.common.run_directory import versions
from training.data.pictures import Pictures
from training.data.records import read_records
from training.evaluation.answer_store import clear_stores
from training.evaluation.contexts import Contexts, read_contexts, sampled_turns
from training.evaluation.policy_answers import PolicySource, gate_state
from training.stages import WaitingForPeople, refuse_resume

_log = logging.getLogger(__name__)

SHEET, KEY, JUDGEMENTS, TURNS = "sheet.jsonl", "key.json", "judgements.jsonl", "turns.jsonl"
REPLIES = "replies.md"
OWN = ("", "written")
"""Corpora whose text may be published."""
NO_REPLY = "(no reply)"
RUBRIC = Path(__file__).with_name("rubric.md")
RATERS = {"llm": "LLM rater", "person": "human rater"}
"""How tables name the reader, by the source of the labels."""


class Config(FrozenModel):
    """`[evaluate reading]`: policies, contexts and reader."""

    policies: tuple[PolicySource, ...] = Field(min_length=1)
    """The first is compared with each of the others."""
    contexts: tuple[Contexts, ...] = Field(min_length=1)
    output: Path
    """Folder of the run."""
    name: str = Field(pattern=r"^reading_[\w-]+$")
    """Name of the results file."""
    results: Path = results.FOLDER
    reader: str
    """Description of the reader for the result, such as the name of an LLM."""
    label_source: Literal["person", "llm"]
    faces: Path | None = None
    """Folder of the packed faces, for contexts that show one."""
    temperature: float = Field(default=0.7, ge=0)
    top_p: float = Field(default=0.9, gt=0, le=1)
    max_new_tokens: int = Field(default=300, gt=0)
    seed: int = 0
    command: str = (
        "python -m training evaluate reading training/configs/small/evaluate_reading.toml"
    )
    """The command that reproduces the result."""

    @model_validator(mode="after")
    def _names_differ(self) -> "Config":
        names = [policy.name for policy in self.policies]
        if len(names) != len({*names}):
            raise ValueError("two policies have the same name")
        return self


class ReplyJudgement(FrozenModel):
    """The reader's ratings of a reply; see `rubric.md`."""

    grammatical: bool
    answers: bool
    """It responds to what was said."""
    may_hurt: bool
    claims_human: bool
    rank: int = Field(ge=1)
    """1 is the best of its context; equal numbers are ties."""


class Judgement(FrozenModel):
    """The reader's ratings of the replies to a context."""

    id: str
    replies: tuple[ReplyJudgement, ...] = Field(min_length=1)
    """In the order of the sheet."""


class SheetLine(FrozenModel):
    """A context and its replies, as shown to the reader."""

    id: str
    conversation: tuple[str, ...] = Field(min_length=1)
    replies: tuple[str, ...]


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


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Write the sheet, or compute the metrics once the reader's judgements exist.

    Raises:
        WaitingForPeople: The sheet is written, the judgements are missing.
    """
    if resume != config.output:
        refuse_resume(resume, "evaluate reading resumes by itself")
    histories = list(read_contexts(config.contexts, config.seed))
    _log.info("%d contexts, %d policies", len(histories), len(config.policies))
    if dry_run:
        return
    judgements = config.output / JUDGEMENTS
    settings = digest(config.model_dump(mode="json", exclude={"results", "reader", "label_source"}))
    if not (config.output / KEY).is_file():
        if judgements.exists():
            raise ConfigError(f"{judgements} belongs to an earlier sheet; move it elsewhere")
        _write_sheet(config, _generate_turns(config, histories), settings)
        clear_stores(config.output)
    if json.loads((config.output / KEY).read_text(encoding="utf-8"))["asked"] != settings:
        raise ConfigError(
            f"{config.output}: the sheet was written with other settings; choose another output"
        )
    if not judgements.is_file():
        raise WaitingForPeople(
            f"rate {config.output / SHEET} according to {config.output / 'rubric.md'}, write the "
            f"judgements to {judgements} and run this command again"
        )
    _publish(config, list(read_records(judgements, Judgement)))


def _generate_turns(config: Config, histories: Sequence[Case]) -> list[WrittenTurn]:
    sampling = Sampling(
        temperature=config.temperature, top_p=config.top_p, max_new_tokens=config.max_new_tokens
    )
    pictures = Pictures(None, config.faces)
    return [
        WrittenTurn(
            policy=turn.policy,
            context=turn.case.id,
            source=turn.case.source_id,
            corpus=turn.case.corpus,
            conversation=tuple(map(_as_line, turn.case.history)),
            messages=tuple(
                utterance.text
                for utterance in turn.case.history
                if utterance.speaker is Speaker.SEEKER
            ),
            text=turn.text,
        )
        for turn in sampled_turns(
            config.policies, histories, pictures, sampling, config.output, config.seed
        )
    ]


def _as_line(utterance: CaseUtterance) -> str:
    photo = " [with a photo of a face]" if utterance.images else ""
    return f"{utterance.speaker.value}{photo}: {utterance.text}"


def _write_sheet(config: Config, turns: Sequence[WrittenTurn], settings: str) -> None:
    """Write turns, sheet and key. The key is last, so that an interrupted run starts again."""
    by_context: dict[str, list[WrittenTurn]] = {}
    for turn in turns:
        by_context.setdefault(turn.context, []).append(turn)
    rng = np.random.default_rng([config.seed, 1])
    lines: list[SheetLine] = []
    key: dict[str, dict[str, Any]] = {}
    for place in rng.permutation(len(by_context)).tolist():
        candidates = [*by_context.values()][place]
        order = rng.permutation(len(candidates)).tolist()
        name = f"c{len(lines) + 1:03}"
        replies = tuple(reply_of(candidates[number].text) or NO_REPLY for number in order)
        lines.append(SheetLine(id=name, conversation=candidates[0].conversation, replies=replies))
        key[name] = {
            "context": candidates[0].context,
            "source": candidates[0].source,
            "policies": [candidates[number].policy for number in order],
        }
    config.output.mkdir(parents=True, exist_ok=True)
    write_rows(config.output / TURNS, turns)
    write_rows(config.output / SHEET, lines)
    shutil.copy(RUBRIC, config.output / "rubric.md")
    temporary = config.output / f"{KEY}.new"
    temporary.write_text(json.dumps({"asked": settings, "lines": key}, indent=1), encoding="utf-8")
    temporary.replace(config.output / KEY)


def _publish(config: Config, judgements: Sequence[Judgement]) -> None:
    key = json.loads((config.output / KEY).read_text(encoding="utf-8"))["lines"]
    turns = list(read_records(config.output / TURNS, WrittenTurn))
    names = [policy.name for policy in config.policies]
    metrics = [
        *reader_metrics(names, key, judgements, RATERS[config.label_source]),
        *rule_metrics(turns),
    ]
    result = results.Result(
        name=config.name,
        title=f"Replies rated blind by {config.reader}",
        date=datetime.datetime.now(datetime.UTC).date(),
        model=", ".join(policy.name for policy in config.policies),
        label_source=f"{config.label_source} ({config.reader}), and rule where it says so",
        command=config.command,
        versions=versions(("torch", "transformers", "peft")),
        seed=config.seed,
        gate=gate_state(config.policies),
        interval="95 % CI over source dialogues",
        compared="Policy",
        metrics=tuple(metrics),
    )
    results.publish(result, config.results, config.output)
    (config.output / REPLIES).write_text(rated_replies(key, turns, judgements), encoding="utf-8")


def rated_replies(
    key: Mapping[str, Mapping[str, Any]],
    turns: Sequence[WrittenTurn],
    judgements: Sequence[Judgement],
) -> str:
    """Return all replies with their ratings, as Markdown.

    Conversations are included for first messages and this project's own dialogues only. For other corpora
    just the name of the context is given.
    """
    by_context = {(turn.context, turn.policy): turn for turn in turns}
    lines = ["# All rated replies", ""]
    for judgement in sorted(judgements, key=lambda judgement: judgement.id):
        entry = key[judgement.id]
        context = entry["context"]
        lines += [f"## {judgement.id}: {context}", ""]
        first = by_context[context, entry["policies"][0]]
        if first.corpus in OWN:
            lines += [f"> {_single_line(line)}  " for line in first.conversation] + [""]
        for policy, rating in zip(entry["policies"], judgement.replies, strict=True):
            reply = _single_line(reply_of(by_context[context, policy].text) or NO_REPLY)
            lines.append(f"- {policy} ({_summary(rating)}): {reply}")
        lines.append("")
    return "\n".join(lines)


def _single_line(text: str) -> str:
    return " ".join(text.split())


def _summary(rating: ReplyJudgement) -> str:
    faults = [
        name
        for name, is_fault in (
            ("not grammatical", not rating.grammatical),
            ("does not answer", not rating.answers),
            ("may hurt", rating.may_hurt),
            ("claims to be human", rating.claims_human),
        )
        if is_fault
    ]
    return f"rank {rating.rank}; {', '.join(faults) or 'no fault'}"


def reader_metrics(
    policies: Sequence[str],
    key: Mapping[str, Mapping[str, Any]],
    judgements: Sequence[Judgement],
    rater: str,
) -> Iterator[results.Metric]:
    """Yield the share of replies for each question, and how often the first policy is preferred.

    Args:
        policies: Their names; the first is compared with each of the others.
        key: For each line of the sheet, the policies in order and the source of the context.
        judgements: One for each line.
        rater: One of `RATERS`.

    Raises:
        ConfigError: A line has no judgement, several, or one with another number of replies.
    """
    by_line = {judgement.id: judgement for judgement in judgements}
    if by_line.keys() != key.keys() or len(by_line) != len(judgements):
        mismatched = sorted(by_line.keys() ^ key.keys())[:3] or ["duplicates"]
        raise ConfigError(f"judgements do not match the sheet: {', '.join(mismatched)}")
    ratings: dict[str, list[ReplyJudgement]] = {}
    for line, entry in key.items():
        count, expected = len(by_line[line].replies), len(entry["policies"])
        if count != expected:
            raise ConfigError(f"{line}: {count} replies are judged, {expected} are expected")
        for policy, rating in zip(entry["policies"], by_line[line].replies, strict=True):
            ratings.setdefault(policy, []).append(rating)
    weights = bootstrap_weights([entry["source"] for entry in key.values()])
    questions = ("grammatical", "answers", "may_hurt", "claims_human")
    titles = ("grammatical", "answers the message", "may hurt", "claims to be human")
    for question, title in zip(questions, titles, strict=True):
        for policy in policies:
            passed = [float(getattr(rating, question)) for rating in ratings[policy]]
            yield _share(title, passed, weights, rater, policy)
    first, *others = policies
    for other in others:
        pairs = zip(ratings[first], ratings[other], strict=True)
        wins = [(a.rank < b.rank) + (a.rank == b.rank) / 2 for a, b in pairs]
        yield _share(f"preferred over {other} (ties count half)", wins, weights, "pairwise", first)


def rule_metrics(turns: Sequence[WrittenTurn]) -> Iterator[results.Metric]:
    """Yield rule-based measures: completeness, repetition, invented quotations."""
    for policy in sorted({turn.policy for turn in turns}):
        own = [turn for turn in turns if turn.policy == policy]
        readings = [read(turn.text) for turn in own]
        weights = bootstrap_weights([turn.source for turn in own])
        complete = [float(reading.is_complete) for reading in readings]
        yield _share("complete", complete, weights, "by rule", policy)
        looping = [float(loops(turn.text)) for turn in own]
        yield _share("repetition rate (4-gram >= 3x)", looping, weights, "by rule", policy)
        exact = [
            float(
                not invented_quotations(
                    turn.text.partition("<reply>")[0], turn.messages, exact=True
                )
            )
            if reading.is_complete
            else math.nan
            for turn, reading in zip(own, readings, strict=True)
        ]
        if any(complete):
            name = "complete turns without an invented quotation"
            yield _share(name, exact, weights, "by rule", policy)


def _share(
    name: str, values: Sequence[float], weights: Floats, about: str, of: str
) -> results.Metric:
    known = len(values) - sum(math.isnan(value) for value in values)
    share = estimate(weighted_mean(weights, values), known)
    return results.measured(name, share, unit="%", of=of, about=about)
