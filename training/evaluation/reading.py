"""Replies judged by a careful reader who does not know whose they are: `python -m training evaluate reading`.

Every policy answers the same contexts once. The first run writes two files and stops: `sheet.jsonl` for the reader,
one context a line with the replies in an order drawn for it, and `key.json`, which tells whose they are and is
not for the reader. The reader writes `judgements.jsonl` by the rubric in `rubric.md`; a second run counts.

The reader may be a person or a large language model, and the result says which. What can be counted without a
reader (complete turns, loops, quotations that nobody said) stands beside, of all turns that were written.
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
from compeer_core.reasoning import TAGS, read
from training.common import results
from training.common.diversity import loops
from training.common.fingerprints import digest
from training.common.run_directory import versions
from training.data.histories import read_histories
from training.data.pictures import Pictures
from training.data.quotations import invented
from training.data.samples import drawn, read_records, write_records
from training.evaluation.answering import Asked, PolicySource, answering, seed_of
from training.evaluation.kept_answers import forget, kept_file
from training.evaluation.metrics import Floats, drawn_weights, estimate, weighted_mean
from training.stages import WaitingForPeople

_log = logging.getLogger(__name__)

SHEET, KEY, JUDGEMENTS, TURNS = "sheet.jsonl", "key.json", "judgements.jsonl", "turns.jsonl"
REPLIES = "replies.md"
OWN = ("", "written")
"""Corpora whose words may be printed."""
RUBRIC = Path(__file__).with_name("rubric.md")


class Contexts(FrozenModel):
    """Some contexts of a file."""

    path: Path
    """Rows of CER, or samples of the SFT stage; or a text file (`.txt`) with one first message a line."""
    count: int = Field(gt=0)
    """So many are drawn, or all if there are fewer."""


class Config(FrozenModel):
    """`[evaluate reading]`: who answers what, and who reads."""

    policies: tuple[PolicySource, ...] = Field(min_length=1)
    """The first is compared with each of the others."""
    contexts: tuple[Contexts, ...] = Field(min_length=1)
    output: Path
    """Folder of the run."""
    name: str = Field(pattern=r"^reading_[\w-]+$")
    """Of the file in `results`."""
    results: Path = results.FOLDER
    reader: str
    """Who reads, in words for the result, such as the name of a large language model."""
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
    """The command that makes the result again."""

    @model_validator(mode="after")
    def _names_differ(self) -> "Config":
        names = [policy.name for policy in self.policies]
        if len(names) != len({*names}):
            raise ValueError("two policies have one name")
        return self


class ReplyJudgement(FrozenModel):
    """What the reader says of one reply; see `rubric.md`."""

    grammatical: bool
    answers: bool
    """It answers what was said."""
    may_hurt: bool
    claims_human: bool
    rank: int = Field(ge=1)
    """1 is the best of its context; equal numbers are ties."""


class Judgement(FrozenModel):
    """What the reader says of one context."""

    id: str
    replies: tuple[ReplyJudgement, ...] = Field(min_length=1)
    """In the order of the sheet."""


class SheetLine(FrozenModel):
    """What the reader sees of one context."""

    id: str
    conversation: tuple[str, ...]
    replies: tuple[str, ...]

    @model_validator(mode="after")
    def _has_words(self) -> "SheetLine":
        if not self.conversation:
            raise ValueError(f"{self.id}: no conversation")
        return self


class WrittenTurn(FrozenModel):
    """What a policy wrote for a context."""

    policy: str
    context: str
    source: str
    """The dialogue that the context comes from: intervals draw whole sources."""
    corpus: str
    """Empty for a first message."""
    conversation: tuple[str, ...]
    messages: tuple[str, ...]
    """The seeker's."""
    text: str


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Let the policies answer, or count what the reader has said.

    Raises:
        WaitingForPeople: The sheet is written and nobody has read it yet.
    """
    if resume is not None and resume != config.output:
        raise ConfigError("evaluate reading goes on by itself: leave --resume out")
    histories = list(_drawn(config))
    _log.info("%d contexts, %d policies", len(histories), len(config.policies))
    if dry_run:
        return
    judgements = config.output / JUDGEMENTS
    asked = digest(config.model_dump(mode="json", exclude={"results", "reader", "label_source"}))
    if not (config.output / KEY).is_file():
        if judgements.exists():
            raise ConfigError(f"{judgements} belongs to an earlier sheet; move it away")
        _write_sheet(config, _written(config, histories), asked)
        forget(config.output)
    if json.loads((config.output / KEY).read_text(encoding="utf-8"))["asked"] != asked:
        raise ConfigError(
            f"{config.output}: its sheet was made with other settings; choose another output"
        )
    if not judgements.is_file():
        raise WaitingForPeople(
            f"{config.output / SHEET} is to be read by {config.output / 'rubric.md'}; write the "
            f"judgements into {judgements} and run this again"
        )
    _publish(config, list(read_records(judgements, Judgement)))


def _drawn(config: Config) -> Iterator[Case]:
    for contexts in config.contexts:
        if contexts.path.suffix == ".txt":
            yield from _first_messages(contexts.path)[: contexts.count]
            continue
        found, _ = read_histories([contexts.path], "test")
        yield from (row.case for row in drawn(found, contexts.count, config.seed))


def _first_messages(path: Path) -> list[Case]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    return [
        Case(
            id=f"{path.stem}-{number}",
            dialogue_id=f"{path.stem}-{number}",
            source_id=f"{path.stem}-{number}",
            corpus="",
            language="en",
            split="test",
            licence="",
            round=0,
            rounds=1,
            history=(CaseUtterance(speaker=Speaker.SEEKER, text=line),),
            original=None,
        )
        for number, line in enumerate(filter(None, map(str.strip, lines)), start=1)
    ]


def _written(config: Config, histories: Sequence[Case]) -> list[WrittenTurn]:
    pictures = Pictures(None, config.faces)
    sampling = Sampling(
        temperature=config.temperature, top_p=config.top_p, max_new_tokens=config.max_new_tokens
    )
    turns = []
    for policy in config.policies:
        asked = (
            Asked(pictures.dialogue(history), (seed_of(number, config.seed),))
            for number, history in enumerate(histories)
        )
        with answering(policy) as answerer:
            kept = kept_file(config.output, policy.name)
            answers = answerer.answers(asked, sampling, len(histories), kept)
            for history, (answer,) in zip(histories, answers, strict=True):
                turns.append(
                    WrittenTurn(
                        policy=policy.name,
                        context=history.id,
                        source=history.source_id,
                        corpus=history.corpus,
                        conversation=tuple(_shown(said) for said in history.history),
                        messages=tuple(
                            said.text for said in history.history if said.speaker is Speaker.SEEKER
                        ),
                        text=answer.text,
                    )
                )
    return turns


def _shown(said: CaseUtterance) -> str:
    photo = " [with a photo of a face]" if said.images else ""
    return f"{said.speaker.value}{photo}: {said.text}"


def _reply_of(text: str) -> str:
    """Return the reply; of a policy that ignores the form altogether, all that it wrote."""
    reply = read(text).reply
    is_plain = not any(tag in text for tag in TAGS)
    return reply or (text.strip() if is_plain else "") or "(no reply)"


def _write_sheet(config: Config, turns: Sequence[WrittenTurn], asked: str) -> None:
    """Write turns, sheet and key; the key comes last, so that a run cut short begins again."""
    by_context: dict[str, list[WrittenTurn]] = {}
    for turn in turns:
        by_context.setdefault(turn.context, []).append(turn)
    rng = np.random.default_rng([config.seed, 1])
    lines: list[SheetLine] = []
    key: dict[str, dict[str, Any]] = {}
    for place in rng.permutation(len(by_context)).tolist():
        together = [*by_context.values()][place]
        order = rng.permutation(len(together)).tolist()
        name = f"c{len(lines) + 1:03}"
        replies = tuple(_reply_of(together[number].text) for number in order)
        lines.append(SheetLine(id=name, conversation=together[0].conversation, replies=replies))
        key[name] = {
            "context": together[0].context,
            "source": together[0].source,
            "policies": [together[number].policy for number in order],
        }
    config.output.mkdir(parents=True, exist_ok=True)
    write_records(config.output / TURNS, turns)
    write_records(config.output / SHEET, lines)
    shutil.copy(RUBRIC, config.output / "rubric.md")
    fresh = config.output / f"{KEY}.new"
    fresh.write_text(json.dumps({"asked": asked, "lines": key}, indent=1), encoding="utf-8")
    fresh.replace(config.output / KEY)


def _publish(config: Config, judgements: Sequence[Judgement]) -> None:
    key = json.loads((config.output / KEY).read_text(encoding="utf-8"))["lines"]
    turns = list(read_records(config.output / TURNS, WrittenTurn))
    names = [policy.name for policy in config.policies]
    metrics = [*reader_metrics(names, key, judgements), *counted_metrics(turns)]
    result = results.Result(
        name=config.name,
        title=f"Replies read by {config.reader}, in random order, without their names",
        date=datetime.datetime.now(datetime.UTC).date(),
        model=", ".join(policy.name for policy in config.policies),
        label_source=f"{config.label_source} ({config.reader}), and rule where it says so",
        command=config.command,
        versions=versions(("torch", "transformers", "peft")),
        seed=config.seed,
        interval="95 % interval over source dialogues",
        compared="Policy",
        metrics=tuple(metrics),
    )
    results.publish(result, config.results, config.output)
    (config.output / REPLIES).write_text(printed(key, turns, judgements), encoding="utf-8")


def printed(
    key: Mapping[str, Mapping[str, Any]],
    turns: Sequence[WrittenTurn],
    judgements: Sequence[Judgement],
) -> str:
    """Return all replies with what was said of them, as Markdown.

    Only first messages and this project's own dialogues are printed. Of every other corpus the name of the
    context stands for people's words.
    """
    by_place = {(turn.context, turn.policy): turn for turn in turns}
    lines = ["# All replies that were read", ""]
    for judgement in sorted(judgements, key=lambda judgement: judgement.id):
        entry = key[judgement.id]
        context = entry["context"]
        lines += [f"## {judgement.id}: {context}", ""]
        first = by_place[context, entry["policies"][0]]
        if first.corpus in OWN:
            lines += [f"> {_in_a_line(said)}  " for said in first.conversation] + [""]
        for policy, judged in zip(entry["policies"], judgement.replies, strict=True):
            reply = _in_a_line(_reply_of(by_place[context, policy].text))
            lines.append(f"- {policy} ({_said_of(judged)}): {reply}")
        lines.append("")
    return "\n".join(lines)


def _in_a_line(text: str) -> str:
    return " ".join(text.split())


def _said_of(judged: ReplyJudgement) -> str:
    faults = [
        words
        for words, is_fault in (
            ("not grammatical", not judged.grammatical),
            ("does not answer", not judged.answers),
            ("may hurt", judged.may_hurt),
            ("claims to be human", judged.claims_human),
        )
        if is_fault
    ]
    return f"rank {judged.rank}; {', '.join(faults) or 'no fault'}"


def reader_metrics(
    policies: Sequence[str], key: Mapping[str, Mapping[str, Any]], judgements: Sequence[Judgement]
) -> Iterator[results.Metric]:
    """Yield the shares of replies that pass each question, and how often the first policy is preferred.

    Args:
        policies: Their names; the first is compared with each of the others.
        key: Of each line of the sheet, the policies in its order, and the source of its context.
        judgements: One for each line.

    Raises:
        ConfigError: A line has no judgement, two, or one with another number of replies.
    """
    by_line = {judgement.id: judgement for judgement in judgements}
    if by_line.keys() != key.keys() or len(by_line) != len(judgements):
        odd = sorted(by_line.keys() ^ key.keys())[:3] or ["some twice"]
        raise ConfigError(f"judgements and sheet do not belong together: {', '.join(odd)}")
    said: dict[str, list[ReplyJudgement]] = {}
    for line, entry in key.items():
        if len(by_line[line].replies) != len(entry["policies"]):
            raise ConfigError(f"{line}: {len(entry['policies'])} replies were to be judged")
        for policy, judged in zip(entry["policies"], by_line[line].replies, strict=True):
            said.setdefault(policy, []).append(judged)
    weights = drawn_weights([entry["source"] for entry in key.values()])
    questions = ("grammatical", "answers", "may_hurt", "claims_human")
    titles = ("grammatical", "answers what was said", "may hurt", "claims to be human")
    for question, title in zip(questions, titles, strict=True):
        for policy in policies:
            passed = [float(getattr(judged, question)) for judged in said[policy]]
            yield _share(title, passed, weights, "read", policy)
    first, *others = policies
    for other in others:
        ranks = zip(said[first], said[other], strict=True)
        wins = [(mine.rank < its.rank) + (mine.rank == its.rank) / 2 for mine, its in ranks]
        yield _share(f"preferred to {other} (a tie is half)", wins, weights, "in pairs", first)


def counted_metrics(turns: Sequence[WrittenTurn]) -> Iterator[results.Metric]:
    """Yield what can be counted by rule: complete turns, loops, steps with invented quotations."""
    for policy in sorted({turn.policy for turn in turns}):
        mine = [turn for turn in turns if turn.policy == policy]
        readings = [read(turn.text) for turn in mine]
        weights = drawn_weights([turn.source for turn in mine])
        complete = [float(reading.is_complete) for reading in readings]
        yield _share("complete", complete, weights, "by rule", policy)
        looping = [float(loops(turn.text)) for turn in mine]
        yield _share("loops (a 4-gram three times)", looping, weights, "by rule", policy)
        exact = [
            float(not any(invented(turn.text.partition("<reply>")[0], turn.messages)))
            if reading.is_complete
            else math.nan
            for turn, reading in zip(mine, readings, strict=True)
        ]
        if any(complete):
            name = "no invented quotation, of complete turns"
            yield _share(name, exact, weights, "by rule", policy)


def _share(
    name: str, values: Sequence[float], weights: Floats, about: str, of: str
) -> results.Metric:
    known = len(values) - sum(math.isnan(value) for value in values)
    found = estimate(weighted_mean(weights, values), known)
    return results.measured(name, found, unit="%", of=of, about=about)
