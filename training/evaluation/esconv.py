"""A policy on dialogues it never saw: `python -m training evaluate esconv <config.toml>`.

Every supporter turn of ESConv's test split is answered from the corpus's own history (turns of one
speaker in a row are one turn; a turn before which the seeker has said nothing is none), greedily and
with the sampling of the policy's card. Reported, each beside what a guess would reach:

- labels: how often strategy, emotion and stage are the corpus's;
- replies: BLEU, ROUGE-L and distinct-n, with what others have published
  (`published_esconv.toml`), and how many loop or are not complete;
- pictures: the emotion with a photo that fits, without one, and with one that contradicts the text;
- perplexity of the corpus's own turns, and what earlier stages measured on held-out data.

Intervals are at 95 % and draw whole dialogues. The run folder keeps every turn (`turns.<way>.jsonl`),
and some of them to be read by a person (`replies.md`). An evaluation that was stopped goes on with the
turns that are written.
"""

import datetime
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import Field

from compeer_core.backends.protocol import Sampling
from compeer_core.cer import CerRecord
from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.prompts import policy_messages
from compeer_core.reasoning import parse, read
from compeer_core.registry import SamplingOverrides
from training.common import results
from training.common.run_directory import versions
from training.data.faces import Face, face_class_of, read_faces
from training.data.pictures import Pictures
from training.data.samples import drawn, read_records, write_records
from training.evaluation.answering import Answerer, Asked, PolicySource, answering, seed_of
from training.evaluation.esconv_measures import (
    PUBLISHED,
    Answer,
    label_metrics,
    picture_metrics,
    published,
    reply_metrics,
)
from training.evaluation.kept_answers import forget, kept_file
from training.evaluation.likelihood import LikelihoodModel
from training.evaluation.metrics import perplexity, share
from training.evaluation.shown_faces import shown

logger = logging.getLogger(__name__)


class Config(FrozenModel):
    """What is measured, on what."""

    samples: Path
    """CER rows (`cer rules`), of which those of the test split are used."""
    faces: Path
    """Folder of the packed faces."""
    policy: PolicySource
    sampling: SamplingOverrides = SamplingOverrides()
    """As in the policy's card; what is not named is the page's default."""
    turns: int | None = Field(default=None, gt=0)
    """Turns that the policy answers, drawn by the seed; None is all."""
    picture_turns: int = Field(default=400, ge=0)
    """Turns that are answered once more with each kind of photo, greedily."""
    perplexity_turns: int = Field(default=300, ge=0)
    """Turns whose likelihood is taken."""
    printed: int = Field(default=50, ge=0)
    """Sampled turns that are written down to be read by a person."""
    tower: Path | None = None
    """`vision.json` of the vision stage; its numbers are taken over as they are."""
    pretraining: Path | None = None
    """`metrics.jsonl` of the pre-training run; its last validation loss is taken over."""
    pretraining_tokens: int = 48 * 512
    """On how many tokens that loss was taken: `validation_blocks` times `block_size`."""
    at_once: int = Field(default=16, gt=0)
    """Turns that are written together."""
    device: str | None = None
    folder: Path
    """Where turns, tables and `replies.md` go."""
    output: Path = results.FOLDER
    """Folder of the results files."""
    name: str = "esconv_nano"
    """Name of the results file."""
    command: str = "python -m training evaluate esconv training/configs/nano/evaluate_esconv.toml"
    """Recorded with the numbers."""
    label_source: str = (
        "ESConv's workers (strategy; emotion of the dialogue); stage, and Neutral or Joy of single "
        "turns, by rule (training/cer/rule_reasoning.py)"
    )
    seed: int = 0


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Measure and write the results file; a dry run reads the rows."""
    if resume is not None:
        raise ConfigError("an evaluation goes on by itself where it stopped: begin it again")
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
    with answering(config.policy, at_once=config.at_once, device=config.device) as answerer:
        metrics = [
            *_measured(answerer, chosen, photos, config),
            *_seen(answerer, samples, faces, photos, config),
        ]
    metrics += [
        *perplexity_metrics(
            config.policy, drawn(samples, config.perplexity_turns, config.seed), photos
        ),
        *training_metrics(config),
    ]
    result = results.Result(
        name=config.name,
        title=f"{config.policy.name} on ESConv's test split",
        date=datetime.datetime.now(tz=datetime.UTC).date(),
        model=config.policy.name,
        label_source=config.label_source,
        command=config.command,
        versions=versions(("torch", "transformers")),
        seed=config.seed,
        interval="95 % interval over source dialogues",
        compared="Who",
        metrics=tuple(metrics),
    )
    results.publish(result, config.output, config.folder)
    forget(config.folder)


def _measured(
    answerer: Answerer, samples: Sequence[CerRecord], photos: Pictures, config: Config
) -> Iterator[results.Metric]:
    """Yield what the answers are worth, as they are written greedily and with the card's sampling."""
    found: dict[str, list[Answer]] = {}
    for way, sampling in _ways(config).items():
        kept = kept_file(config.folder, way)
        found[way] = answers_to(answerer, samples, photos, sampling, config.seed, kept)
        _keep(config.folder / f"turns.{way}.jsonl", found[way])
    _print_some(config.folder / "replies.md", drawn(found["sampled"], config.printed, config.seed))
    yield from (*label_metrics(found), *reply_metrics(found), *published(PUBLISHED))


def _seen(
    answerer: Answerer,
    samples: Sequence[CerRecord],
    faces: Sequence[Face],
    photos: Pictures,
    config: Config,
) -> Iterator[results.Metric]:
    """Yield what photos change, in greedy answers to some of the turns."""
    if not config.picture_turns:
        return
    by_class: dict[str, list[str]] = {}
    for face in faces:
        if face.split == "valid":
            by_class.setdefault(face.face_class, []).append(face.file)
    asked = drawn(samples, config.picture_turns, config.seed)
    conditions = shown(asked, by_class, face_class_of(config.faces), config.seed)
    greedy = _ways(config)["greedy"]
    yield from picture_metrics(
        {
            condition: answers_to(
                *(answerer, rows, photos, greedy, config.seed),
                kept_file(config.folder, f"greedy.{condition}"),
            )
            for condition, rows in conditions.items()
        }
    )


def _ways(config: Config) -> dict[str, Sampling]:
    as_in_card = config.sampling.applied()
    return {"greedy": replace(as_in_card, temperature=0.0), "sampled": as_in_card}


def answers_to(
    answerer: Answerer,
    samples: Sequence[CerRecord],
    photos: Pictures,
    sampling: Sampling,
    seed: int,
    kept: Path,
) -> list[Answer]:
    """Let the policy answer; the same seed for the same place in every call, kept in a file."""
    asked = (
        Asked(photos.dialogue(sample.case), (seed_of(number, seed),))
        for number, sample in enumerate(samples)
    )
    turns = answerer.answers(asked, sampling, len(samples), kept)
    found = []
    for sample, (turn,) in zip(samples, turns, strict=True):
        gold = parse(sample.first.turn or "")
        found.append(Answer(sample, read(turn.text), gold.reasoning, gold.reply))
    return found


# --- likelihood, and what earlier stages measured -------------------------------------------------


def perplexity_metrics(
    policy: PolicySource, samples: Sequence[CerRecord], photos: Pictures
) -> Iterator[results.Metric]:
    """Yield the perplexity of the corpus's turns, and of their replies alone."""
    if not samples:
        return
    model = LikelihoodModel(policy.source, policy.adapter)
    seen = [
        model.surprise(policy_messages(photos.dialogue(s.case), policy.style), s.first.turn or "")
        for s in samples
    ]
    for of, found in (
        ("whole turns (reasoning is rule-made)", [(s.turn_loss, s.turn_tokens) for s in seen]),
        ("replies, after the corpus's reasoning", [(s.reply_loss, s.reply_tokens) for s in seen]),
    ):
        losses, tokens = zip(*found, strict=True)
        value = perplexity(losses, tokens)
        yield results.measured("perplexity", value, of=of, about="the corpus's own turns")


def training_metrics(config: Config) -> Iterator[results.Metric]:
    """Yield what earlier stages measured on held-out data, read from their reports."""
    if config.tower is not None:
        report = json.loads(config.tower.read_text(encoding="utf-8"))
        n = int(report["validation_photos"])
        right = share(round(report["validation_accuracy"] * n), n)
        of, about = "image tower alone", "expressions of validation photos, 7 classes"
        yield results.measured("named rightly", right, unit="%", of=of, about=about)
    if config.pretraining is not None:
        rows = config.pretraining.read_text(encoding="utf-8").splitlines()
        losses = [row for row in map(json.loads, rows) if "validation_loss" in row]
        yield results.Metric(
            name="nats a token",
            value=losses[-1]["validation_loss"],
            n=config.pretraining_tokens,
            of="after pre-training",
            about="loss on ESConv's validation dialogues",
        )


# --- what is kept ------------------------------------------------------------------------------


class _Turn(FrozenModel):
    """A line of `turns.<way>.jsonl`."""

    id: str
    text: str
    complete: bool


def _keep(path: Path, answers: Sequence[Answer]) -> None:
    write_records(
        path,
        (
            _Turn(id=one.sample.id, text=one.reading.raw, complete=one.reading.is_complete)
            for one in answers
        ),
    )


def _print_some(path: Path, answers: Sequence[Answer]) -> None:
    """Write what was asked, what was answered and what the corpus says, one turn after another."""
    with path.open("w", encoding="utf-8") as file:
        for one in answers:
            last = one.sample.case.history[-1]
            file.write(f"## {one.sample.id}\n\nSeeker: {last.text}\n")
            file.writelines(f"Photo: {name}\n" for name in last.images)
            file.write(f"\n```text\n{one.reading.raw.strip()}\n```\n\n")
            file.write(f"In the corpus: {one.reference}\n\n")
