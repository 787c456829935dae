"""Finished runs of evaluations, read back from their folders: settings, dialogues, and measures of each dialogue."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from compeer_core.annotation.annotations import AnnotationItem
from compeer_core.errors import ConfigError
from compeer_core.ngrams import loops
from compeer_core.reasoning import read, reply_of
from compeer_core.row_files import read_json, read_rows
from training.common.run_directory import CONFIG_FILE, Record, read_record
from training.evaluation import blind_reading, blind_sheet, esc_eval, human, sage, steering
from training.evaluation.esc_eval_scores import (
    AVERAGE,
    BEST,
    DIMENSIONS,
    UNREADABLE,
    Scores,
    Transcripts,
    name_of,
)
from training.evaluation.simulated_dialogues import FAILED, Conversation
from training.stages import STAGES, load_stage

HIDDEN = "(a conversation of {corpus}, whose licence may not allow to show it)"


class Measure(NamedTuple):
    """What is measured of each dialogue."""

    name: str
    unit: Literal["%", ""] = "%"


class Line(NamedTuple):
    """An utterance."""

    speaker: str
    text: str
    note: str = ""
    """Such as the emotion after it."""


@dataclass(frozen=True)
class Transcript:
    """A dialogue of a run."""

    model: str
    dialogue: str
    """Its name, the same in all runs with the same settings."""
    lines: tuple[Line, ...]
    source: str = ""
    """The unit of resampling; empty for the dialogue itself."""
    note: str = ""
    values: Mapping[Measure, float] = field(default_factory=dict)
    """Shares in [0, 1] where the unit is "%"; a measure that cannot be read is left out."""
    emotions: tuple[float, ...] = ()
    """In SAGE: the seeker's emotion at each of its messages."""


@dataclass(frozen=True)
class SavedRun:
    """A run with at least one dialogue."""

    path: Path
    stage: str
    """Such as "evaluate sage"."""
    record: Record
    config: Any
    """Of the stage's own type."""
    transcripts: tuple[Transcript, ...]
    failed: tuple[Transcript, ...]
    """Dialogues that ended without a usable text, as far as they went."""

    @property
    def is_small_simulation(self) -> bool:
        """Whether its seeker is an adapter of `sft seeker`."""
        return isinstance(self.config, esc_eval.Config | sage.Config) and self.config.is_small


def read_run(path: Path) -> SavedRun:
    """Read a finished run of `READERS`.

    Raises:
        ConfigError: A file is missing or truncated, it is a run of another stage, or it has no dialogue.
    """
    record = read_record(path)
    names = {stage.module: name for name, stage in STAGES.items()}
    stage = names.get(record.stage, record.stage)
    if stage not in READERS:
        raise ConfigError(f"{path}: is a run of {stage!r}; expected one of {', '.join(READERS)}")
    try:
        config = load_stage(stage).Config.model_validate(record.config)
    except ValidationError as error:
        detail = error.errors()[0]
        key = ".".join(map(str, detail["loc"]))
        raise ConfigError(f"{path / CONFIG_FILE}: config.{key}: {detail['msg']}") from error
    try:
        transcripts = tuple(READERS[stage](path, config))
    except KeyError as error:
        raise ConfigError(f"{path}: its files do not fit together: {error} is missing") from error
    if not transcripts:
        raise ConfigError(f"{path}: has no finished dialogue; run {stage} again, it resumes")
    return SavedRun(path, stage, record, config, transcripts, tuple(_failed(path)))


def _failed(run: Path) -> Iterator[Transcript]:
    path = run / FAILED
    for row in read_rows(path, _Failed) if path.is_file() else ():
        model, _, dialogue = row.dialogue.partition("/")
        turns = Conversation(row.dialogue, row.lines).turns
        lines = tuple(Line(speaker.value, text) for speaker, text in turns)
        yield Transcript(model, dialogue, lines, note=f"failed: {row.problem}")


class _Failed(BaseModel):
    dialogue: str
    problem: str
    lines: list[str]


def _esc_eval(run: Path, config: esc_eval.Config) -> Iterator[Transcript]:
    held = itertools.product((policy.name for policy in config.policies), config.cards)
    files = [run / "result" / f"{model}_{language}.json" for model, language in held]
    for path in (*files, *config.transcripts):
        model, language = name_of(path)
        scores = {
            judge.name: read_json(
                (judge.scores or run / "score" / judge.name) / f"{model}_{language}.json", Scores
            )
            for judge in config.judges
        }
        for number, texts in read_json(path, Transcripts).items():
            values: dict[Measure, float] = {}
            for judge, of_judge in scores.items():
                rated = {
                    name: of_judge.get(number, {}).get(key, UNREADABLE) / BEST
                    for key, name in DIMENSIONS.items()
                }
                known = {name: share for name, share in rated.items() if share >= 0}
                if len(known) == len(rated):
                    known[AVERAGE] = fmean(known.values())
                values |= {
                    Measure(f"{language}, {judge}: {name}"): share for name, share in known.items()
                }
            pairs = (text.partition("：") for text in texts)
            lines = tuple(Line(speaker, text) for speaker, _, text in pairs)
            yield Transcript(model, f"{language}/{number}", lines, values=values)


class _Message(BaseModel):
    role: Literal["user", "assistant"]
    content: str
    emotion: float | None = Field(default=None, alias="emotion-point")


class _SageDialogue(BaseModel):
    id: str
    emo_point: float
    history: list[_Message]


def _sage(run: Path, config: sage.Config) -> Iterator[Transcript]:
    speakers = {"user": "seeker", "assistant": "supporter"}
    for policy, seed in itertools.product(config.policies, config.seeds):
        path = run / "dialogues" / f"{policy.name}_seed{seed}.jsonl"
        for row in read_rows(path, _SageDialogue):
            yield Transcript(
                policy.name,
                row.id,
                tuple(
                    Line(
                        speakers[said.role],
                        said.content,
                        "" if said.emotion is None else f"emotion {said.emotion:g}",
                    )
                    for said in row.history
                ),
                note=f"seed {seed}",
                values={
                    Measure("final emotion", ""): row.emo_point,
                    Measure("success"): float(row.emo_point >= sage.SUCCESS),
                    Measure("failure"): float(row.emo_point < sage.FAILURE),
                },
                emotions=tuple(said.emotion for said in row.history if said.emotion is not None),
            )


def _reading(run: Path, config: blind_reading.Config) -> Iterator[Transcript]:
    key = read_json(run / blind_sheet.KEY, blind_sheet.Key).lines
    ratings: dict[tuple[str, str], blind_reading.ReplyJudgement] = {}
    for row in read_rows(run / blind_sheet.JUDGEMENTS, blind_reading.Judgement):
        for policy, rating in zip(key[row.id]["policies"], row.replies, strict=True):
            ratings[key[row.id]["context"], policy] = rating
    for turn in read_rows(run / blind_sheet.TURNS, blind_sheet.WrittenTurn):
        rating = ratings[turn.context, turn.policy]
        yield _written(
            turn,
            {
                Measure("grammatical"): rating.grammatical,
                Measure("answers the message"): rating.answers,
                Measure("may hurt"): rating.may_hurt,
                Measure("claims to be human"): rating.claims_human,
                Measure("complete (by rule)"): read(turn.text).is_complete,
                Measure("repetition rate (by rule)"): loops(turn.text),
            },
        )


def _steering(run: Path, config: steering.Config) -> Iterator[Transcript]:
    for turn in read_rows(run / blind_sheet.TURNS, steering.SteeredTurn):
        yield _written(turn, {}, f"forced strategy: {turn.strategy}")


def _written(
    turn: blind_sheet.WrittenTurn, values: Mapping[Measure, bool], note: str = ""
) -> Transcript:
    pairs = (line.partition(": ") for line in turn.conversation)
    lines = [Line(speaker, text) for speaker, _, text in pairs]
    text = turn.text
    if turn.corpus not in blind_reading.OWN:  # its steps may quote the conversation
        lines = [Line("conversation", HIDDEN.format(corpus=turn.corpus))]
        text = reply_of(text) or blind_sheet.NO_REPLY
    lines.append(Line("supporter", text))
    shares = {measure: float(value) for measure, value in values.items()}
    return Transcript(turn.policy, turn.context, tuple(lines), turn.source, note, shares)


def _human(run: Path, config: human.Config) -> Iterator[Transcript]:
    items = {item.id: item for item in read_rows(run / human.PACKAGE / human.ITEMS, AnnotationItem)}
    for key in read_json(run / human.KEY, human.Key).items:
        lines = [Line(said.speaker.value, said.text) for said in items[key.item_id].history]
        turns: Sequence[str] = key.turns
        if key.corpus not in blind_reading.OWN:
            lines = [Line("conversation", HIDDEN.format(corpus=key.corpus))]
            turns = [reply_of(turn) or blind_sheet.NO_REPLY for turn in turns]
        lines += map(Line, key.models, turns)
        yield Transcript(" and ".join(sorted(key.models)), key.case, tuple(lines), key.source)


READERS: Mapping[str, Callable[[Path, Any], Iterator[Transcript]]] = {
    "evaluate esc-eval": _esc_eval,
    "evaluate sage": _sage,
    "evaluate reading": _reading,
    "evaluate steering": _steering,
    "evaluate human": _human,
}
"""The stages whose runs can be read back."""
