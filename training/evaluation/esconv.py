"""Evaluates a policy on ESConv's test split: `python -m training evaluate esconv <config.toml>`.

Each supporter turn is answered from the corpus's history, greedily and, unless left out, with the sampling settings of
the policy's card. Consecutive turns of a speaker are joined; turns before the seeker's first message are
skipped. Reported, with baselines:

- labels: agreement of strategy, emotion and stage with the corpus
- replies: BLEU, ROUGE-L and distinct-n, and the shares of complete and of repetitive turns
- images: the emotion step with a matching photo, without one, and with one that contradicts the text
- perplexity of the corpus's turns

95 % intervals resample whole dialogues. The run folder contains all turns (`turns.<setting>.jsonl`) and a
random sample of them for reading (`replies.md`). An interrupted evaluation resumes by itself.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import Field

from compeer_core.backends.protocol import Sampling
from compeer_core.cer import CerRecord
from compeer_core.config import FrozenModel
from compeer_core.prompts import policy_messages
from compeer_core.reasoning import parse, read
from compeer_core.registry import SamplingOverrides
from training.common import results
from training.common.jsonl import replace_rows
from training.data.faces import Face, face_class_of, read_faces
from training.data.pictures import Pictures
from training.data.records import drawn, read_records
from training.evaluation.answer_store import clear_stores, store_path
from training.evaluation.esconv_measures import (
    Answer,
    label_metrics,
    picture_metrics,
    reply_metrics,
)
from training.evaluation.face_swap import with_swapped_faces
from training.evaluation.likelihood import LikelihoodModel
from training.evaluation.metrics import perplexity
from training.evaluation.policy_answers import (
    Answerer,
    AnswerRequest,
    PolicySource,
    gate_state,
    loaded_policy,
    seed_of,
)
from training.stages import refuse_resume

logger = logging.getLogger(__name__)


class Config(FrozenModel):
    """Policy, data and settings."""

    samples: Path
    """CER rows (`cer rules`), of which those of the test split are used."""
    faces: Path
    """Folder of the packed faces."""
    policy: PolicySource
    sampling: SamplingOverrides = SamplingOverrides()
    """As in the policy's card; missing values are the demo's defaults."""
    sampled: bool = True
    """Whether turns are sampled as well; greedy ones take half the time."""
    turns: int | None = Field(default=None, ge=0)
    """Number of turns to answer, sampled by the seed; None answers all, 0 leaves labels and replies out."""
    picture_turns: int = Field(default=400, ge=0)
    """Number of turns to answer greedily with each kind of photo."""
    perplexity_turns: int = Field(default=300, ge=0)
    """Number of turns to compute the perplexity of."""
    printed: int = Field(default=50, ge=0)
    """Number of turns in `replies.md`."""
    at_once: int = Field(default=16, gt=0)
    """Batch size in turns."""
    device: str | None = None
    folder: Path
    """Folder for turns, tables and `replies.md`."""
    output: Path = results.FOLDER
    """Folder of the results files."""
    name: str = "esconv"
    """Name of the results file."""
    command: str = "python -m training evaluate esconv training/configs/small/evaluate_esconv.toml"
    """Recorded with the numbers."""
    label_source: str = (
        "ESConv's workers (strategy; emotion of the dialogue); stage, and Neutral or Joy of single "
        "turns, by rule (training/cer/rule_reasoning.py)"
    )
    seed: int = 0


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Evaluate and write the results file; a dry run only reads the inputs."""
    refuse_resume(resume, "an evaluation resumes by itself")
    samples = [
        record
        for record in read_records(config.samples, CerRecord)
        if record.case.split == "test" and record.first.turn
    ]
    faces = read_faces(config.faces)
    photos = Pictures(None, config.faces)
    if dry_run:
        return
    chosen = samples if config.turns is None else drawn(samples, config.turns, config.seed)
    config.folder.mkdir(parents=True, exist_ok=True)
    with loaded_policy(config.policy, at_once=config.at_once, device=config.device) as answerer:
        metrics = [
            *_answer_metrics(answerer, chosen, photos, config),
            *_photo_metrics(answerer, samples, faces, photos, config),
        ]
    metrics += perplexity_metrics(
        config.policy, drawn(samples, config.perplexity_turns, config.seed), photos
    )
    result = results.made(
        name=config.name,
        title=f"{config.policy.name} on ESConv's test split",
        model=config.policy.name,
        label_source=config.label_source,
        command=config.command,
        seed=config.seed,
        gate=gate_state([config.policy]),
        interval="95 % CI over source dialogues",
        compared="System",
        metrics=tuple(metrics),
    )
    results.publish(result, config.output, config.folder)
    clear_stores(config.folder)


def _answer_metrics(
    answerer: Answerer, samples: Sequence[CerRecord], photos: Pictures, config: Config
) -> Iterator[results.Metric]:
    """Yield the metrics of greedy and of sampled answers."""
    if not samples:
        return
    answers: dict[str, list[Answer]] = {}
    for setting, sampling in _sampling_settings(config).items():
        if setting == "sampled" and not config.sampled:
            continue
        stored = store_path(config.folder, setting)
        answers[setting] = answers_to(answerer, samples, photos, sampling, config.seed, stored)
        _write_turns(config.folder / f"turns.{setting}.jsonl", answers[setting])
    printed = drawn(answers["sampled" if config.sampled else "greedy"], config.printed, config.seed)
    _write_replies(config.folder / "replies.md", printed)
    yield from (*label_metrics(answers), *reply_metrics(answers))


def _photo_metrics(
    answerer: Answerer,
    samples: Sequence[CerRecord],
    faces: Sequence[Face],
    photos: Pictures,
    config: Config,
) -> Iterator[results.Metric]:
    """Yield the effect of photos on greedy answers to some of the turns."""
    if not config.picture_turns:
        return
    by_class: dict[str, list[str]] = {}
    for face in faces:
        if face.split == "valid":
            by_class.setdefault(face.face_class, []).append(face.file)
    chosen = drawn(samples, config.picture_turns, config.seed)
    conditions = with_swapped_faces(chosen, by_class, face_class_of(config.faces), config.seed)
    greedy = _sampling_settings(config)["greedy"]
    yield from picture_metrics(
        {
            condition: answers_to(
                *(answerer, rows, photos, greedy, config.seed),
                store_path(config.folder, f"greedy.{condition}"),
            )
            for condition, rows in conditions.items()
        }
    )


def _sampling_settings(config: Config) -> dict[str, Sampling]:
    sampled = config.sampling.applied()
    return {"greedy": replace(sampled, temperature=0.0), "sampled": sampled}


def answers_to(
    answerer: Answerer,
    samples: Sequence[CerRecord],
    photos: Pictures,
    sampling: Sampling,
    seed: int,
    stored: Path,
) -> list[Answer]:
    """Answer samples, with a seed that depends on the position only; answers are stored in a file."""
    requests = (
        AnswerRequest(photos.dialogue(sample.case), (seed_of(number, seed),))
        for number, sample in enumerate(samples)
    )
    turns = answerer.answers(requests, sampling, len(samples), stored)
    answers = []
    for sample, (turn,) in zip(samples, turns, strict=True):
        gold = parse(sample.first.turn or "")
        answers.append(Answer(sample, read(turn.text), gold.reasoning, gold.reply))
    return answers


# --- perplexity -----------------------------------------------------------------------------------


def perplexity_metrics(
    policy: PolicySource, samples: Sequence[CerRecord], photos: Pictures
) -> Iterator[results.Metric]:
    """Yield the perplexity of the corpus's turns, and of their replies."""
    if not samples:
        return
    model = LikelihoodModel(policy.source, policy.adapter)
    scores = [
        model.score(policy_messages(photos.dialogue(s.case), policy.style), s.first.turn or "")
        for s in samples
    ]
    for of, pairs in (
        ("whole turns (reasoning is rule-made)", [(s.turn_loss, s.turn_tokens) for s in scores]),
        ("replies, after the corpus's reasoning", [(s.reply_loss, s.reply_tokens) for s in scores]),
    ):
        losses, tokens = zip(*pairs, strict=True)
        value = perplexity(losses, tokens)
        yield results.measured("perplexity", value, of=of, about="the corpus's own turns")


# --- output files ------------------------------------------------------------------------------


def _write_turns(path: Path, answers: Sequence[Answer]) -> None:
    rows = (
        {"id": each.sample.id, "text": each.reading.raw, "complete": each.reading.is_complete}
        for each in answers
    )
    replace_rows(path, rows)


def _write_replies(path: Path, answers: Sequence[Answer]) -> None:
    """Write the seeker's message, the answer and the corpus's reply of each turn."""
    with path.open("w", encoding="utf-8") as file:
        for answer in answers:
            last = answer.sample.case.history[-1]
            file.write(f"## {answer.sample.id}\n\nSeeker: {last.text}\n")
            file.writelines(f"Photo: {name}\n" for name in last.images)
            file.write(f"\n```text\n{answer.reading.raw.strip()}\n```\n\n")
            file.write(f"In the corpus: {answer.reference}\n\n")
