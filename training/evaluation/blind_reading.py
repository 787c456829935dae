"""Blind rating of replies: `python -m training evaluate reading <config.toml>`.

All policies answer the same contexts once. A line of the sheet (`training.evaluation.blind_sheet`) has a context
and the replies to it in random order; the key maps them to policies. The reader judges according to `rubric.md`.

The reader is a person or an LLM, which the result states. Rule-based measures of all turns (completeness,
repetition, invented quotations) are reported as well.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from compeer_core.cer import Case
from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.grounding import invented_quotations
from compeer_core.ngrams import loops
from compeer_core.reasoning import read, reply_of
from compeer_core.stats import bootstrap_weights
from training.common import results
from training.data.pictures import Pictures
from training.data.records import read_records
from training.evaluation.blind_sheet import (
    NO_REPLY,
    RATERS,
    TURNS,
    Line,
    Sheet,
    SheetConfig,
    WrittenTurn,
    contexts_of,
    judgements_of,
    publish,
    read_key,
    share,
)
from training.evaluation.contexts import sampled_turns

REPLIES = "replies.md"
OWN = ("", "written")
"""Corpora whose text may be published."""
RUBRIC = Path(__file__).with_name("rubric.md")


class Config(SheetConfig):
    """`[evaluate reading]`: policies, contexts and reader. The first policy is compared with each of the others."""

    name: str = Field(pattern=r"^reading_[\w-]+$")
    command: str = (
        "python -m training evaluate reading training/configs/small/evaluate_reading.toml"
    )


class ReplyJudgement(FrozenModel):
    """The reader's ratings of a reply; see `rubric.md`."""

    grammatical: bool
    answers: bool
    """It responds to what was said."""
    may_hurt: bool
    claims_human: bool
    rank: int = Field(ge=1)
    """1 is the best of its context; equal numbers are ties."""


class Judgement(Line):
    """The reader's ratings of the replies to a context."""

    replies: tuple[ReplyJudgement, ...] = Field(min_length=1)
    """In the order of the sheet."""


class SheetLine(Line):
    """A context and its replies, as shown to the reader."""

    conversation: tuple[str, ...] = Field(min_length=1)
    replies: tuple[str, ...]


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Write the sheet, or compute the metrics once the reader's judgements exist.

    Raises:
        WaitingForPeople: The sheet is written, the judgements are missing.
    """
    contexts = contexts_of(config, resume)
    if dry_run:
        return

    def make() -> Sheet:
        return _sheet(_generate_turns(config, contexts), config.seed)

    judgements = judgements_of(config, RUBRIC, Judgement, make)
    names = [policy.name for policy in config.policies]
    key, turns = read_key(config), list(read_records(config.output / TURNS, WrittenTurn))
    metrics = [
        *reader_metrics(names, key, judgements, RATERS[config.label_source]),
        *rule_metrics(turns),
    ]
    publish(config, "Replies rated blind", metrics)
    (config.output / REPLIES).write_text(rated_replies(key, turns, judgements), encoding="utf-8")


def _generate_turns(config: Config, contexts: Sequence[Case]) -> list[WrittenTurn]:
    pictures = Pictures(None, config.faces)
    turns = sampled_turns(
        config.policies, contexts, pictures, config.sampling, config.output, config.seed
    )
    return [*map(WrittenTurn.of, turns)]


def _sheet(turns: Sequence[WrittenTurn], seed: int) -> Sheet:
    by_context: dict[str, list[WrittenTurn]] = {}
    for turn in turns:
        by_context.setdefault(turn.context, []).append(turn)
    rng = np.random.default_rng([seed, 1])
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
    return Sheet(turns, lines, key)


def rated_replies(
    key: Mapping[str, Mapping[str, Any]],
    turns: Sequence[WrittenTurn],
    judgements: Mapping[str, Judgement],
) -> str:
    """Return all replies with their ratings, as Markdown.

    Conversations are included for first messages and this project's own dialogues only. For other corpora
    just the name of the context is given.
    """
    by_context = {(turn.context, turn.policy): turn for turn in turns}
    lines = ["# All rated replies", ""]
    for name, judgement in sorted(judgements.items()):
        entry = key[name]
        context = entry["context"]
        lines += [f"## {name}: {context}", ""]
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
    judgements: Mapping[str, Judgement],
    rater: str,
) -> Iterator[results.Metric]:
    """Yield the share of replies for each question, and how the first policy compares with the others.

    Args:
        policies: Their names; the first is compared with each of the others.
        key: For each line of the sheet, the policies in order and the source of the context.
        judgements: One for each line.
        rater: One of `RATERS`.

    Raises:
        ConfigError: A judgement has another number of replies than its line.
    """
    ratings: dict[str, list[ReplyJudgement]] = {}
    for line, entry in key.items():
        count, expected = len(judgements[line].replies), len(entry["policies"])
        if count != expected:
            raise ConfigError(f"{line}: {count} replies are judged, {expected} are expected")
        for policy, rating in zip(entry["policies"], judgements[line].replies, strict=True):
            ratings.setdefault(policy, []).append(rating)
    weights = bootstrap_weights([entry["source"] for entry in key.values()])
    questions = ("grammatical", "answers", "may_hurt", "claims_human")
    titles = ("grammatical", "answers the message", "may hurt", "claims to be human")
    for question, title in zip(questions, titles, strict=True):
        for policy in policies:
            passed = [float(getattr(rating, question)) for rating in ratings[policy]]
            yield share(title, passed, weights, rater, policy)
    first, *others = policies
    for other in others:
        pairs = zip(ratings[first], ratings[other], strict=True)
        wins = [(a.rank < b.rank) + (a.rank == b.rank) / 2 for a, b in pairs]
        yield share(f"preferred over {other} (ties count half)", wins, weights, "pairwise", first)
        for question, title in (("answers", "answers the message"), ("may_hurt", "may hurt")):
            gained = [
                float(getattr(a, question)) - float(getattr(b, question))
                for a, b in zip(ratings[first], ratings[other], strict=True)
            ]
            yield share(f"{title}: difference to {other}", gained, weights, "pairwise", first)


def rule_metrics(turns: Sequence[WrittenTurn]) -> Iterator[results.Metric]:
    """Yield rule-based measures: completeness, repetition, invented quotations."""
    for policy in sorted({turn.policy for turn in turns}):
        own = [turn for turn in turns if turn.policy == policy]
        readings = [read(turn.text) for turn in own]
        weights = bootstrap_weights([turn.source for turn in own])
        complete = [float(reading.is_complete) for reading in readings]
        yield share("complete", complete, weights, "by rule", policy)
        looping = [float(loops(turn.text)) for turn in own]
        yield share("repetition rate (4-gram >= 3x)", looping, weights, "by rule", policy)
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
            yield share(name, exact, weights, "by rule", policy)
