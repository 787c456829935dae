"""A policy on dialogues it never saw: `python -m training evaluate esconv <config.toml>`.

The policy answers turns of ESConv's test split with the sampling of its card. Reported are the share
of turns that parse as complete, how often its labels are the corpus's, and the perplexity of the
corpus's own turns.

The results go to `assets/results`, from where README and cards take them.
"""

import datetime
import json
import logging
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.policy import Controls, Policy
from compeer_core.prompts import policy_messages
from compeer_core.reasoning import Reading, TurnFinished, parse
from compeer_core.registry import Registry
from training import results
from training.evaluation.likelihood import LikelihoodModel
from training.evaluation.metrics import (
    Estimate,
    perplexity,
    share,
)
from training.faces import read_faces
from training.run_directory import versions
from training.samples import Sample, drawn, read_records

logger = logging.getLogger(__name__)


class Config(FrozenModel):
    """What is measured, on what."""

    samples: Path
    """`samples.test.jsonl` of the SFT run."""
    faces: Path
    """Folder of the packed faces."""
    checkpoint: Path
    """The policy's checkpoint, for its perplexity."""
    tower: Path | None = None
    """`vision.json` of the vision stage; its numbers are taken over as they are."""
    pretraining: Path | None = None
    """`metrics.jsonl` of the pre-training run; its last validation loss is taken over."""
    pretraining_tokens: int = 48 * 512
    """On how many tokens that loss was taken: `validation_blocks` times `block_size`."""
    models: Path = Path("assets/models.toml")
    """The list of models."""
    policy: str = ""
    """A name of that list; empty is its default."""
    turns: int = 100
    """Turns that the policy answers, drawn by the seed."""
    perplexity_turns: int = 300
    """Turns whose likelihood is taken."""
    output: Path = results.FOLDER
    """Folder of the results files."""
    name: str = "esconv_nano"
    """Name of the results file."""
    command: str = "python -m training evaluate esconv training/configs/nano/evaluate_esconv.toml"
    """Recorded with the numbers."""
    transcript: Path | None = None
    """Where the sampled turns are written, to be read by a person."""
    seed: int = 0


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Measure and write the results files; a dry run loads the models and the rows."""
    if resume is not None:
        raise ConfigError("an evaluation cannot be resumed: begin it again")
    registry = Registry.from_toml(config.models)
    policy = registry.policy(config.policy)
    samples = list(read_records(config.samples, Sample))
    photos = {face.file: face.data for face in read_faces(config.faces)}
    if dry_run:
        return
    metrics = [
        *policy_metrics(policy, drawn(samples, config.turns, config.seed), photos, config),
        *perplexity_metrics(
            config.checkpoint, drawn(samples, config.perplexity_turns, config.seed), photos
        ),
        *training_metrics(config),
    ]
    title = f"{policy.name} on turns of ESConv's test split"
    source = "ESConv's workers (strategy, emotion); stage and emotion of single turns by rule"
    _save(config, config.name, title, policy.name, metrics, source)


def policy_metrics(
    policy: Policy, samples: Sequence[Sample], photos: dict[str, bytes], config: Config
) -> list[results.Metric]:
    """Let the policy answer every sample and compare its labels with the corpus's."""
    readings: list[Reading] = []
    for number, sample in enumerate(samples):
        sampling = replace(policy.sampling, seed=config.seed + number)
        stream = policy.respond(
            sample.dialogue(photos), Controls(sampling=sampling), threading.Event()
        )
        *_, last = stream
        assert isinstance(last, TurnFinished)
        readings.append(last.reading)
    if config.transcript is not None:
        _write_transcript(config.transcript, samples, readings)
    gold = [parse(sample.completion).reasoning for sample in samples]
    complete = [reading.is_complete for reading in readings]
    pairs: dict[str, list[tuple[object, str]]] = {"stage": [], "emotion": [], "strategy": []}
    for reading, true in zip(readings, gold, strict=True):
        pairs["stage"].append((reading.history and reading.history.stage, str(true.history.stage)))
        pairs["emotion"].append(
            (reading.emotion and reading.emotion.emotion, str(true.emotion.emotion))
        )
        pairs["strategy"].append(
            (reading.strategy and reading.strategy.strategy, str(true.strategy.strategy))
        )
    metrics = [_metric("Turns that parse as complete", share(sum(complete), len(complete)))]
    for name, values in pairs.items():
        right = sum(written == true for written, true in values)
        commonest, count = Counter(true for _, true in values).most_common(1)[0]
        metrics += [
            _metric(f"{name.capitalize()} as in the corpus", share(right, len(values))),
            _metric(
                f"{name.capitalize()}: always the commonest",
                share(count, len(values)),
                note=commonest,
            ),
        ]
    return metrics


def perplexity_metrics(
    checkpoint: Path, samples: Sequence[Sample], photos: dict[str, bytes]
) -> list[results.Metric]:
    """Return the perplexity of the corpus's turns, and of their replies alone."""
    model = LikelihoodModel(checkpoint)
    seen = [
        model.surprise(policy_messages(s.dialogue(photos), "trained"), s.completion)
        for s in samples
    ]
    turn = perplexity([s.turn_loss for s in seen], [s.turn_tokens for s in seen])
    reply = perplexity([s.reply_loss for s in seen], [s.reply_tokens for s in seen])
    return [
        _metric("Perplexity of whole turns", turn, unit="", note="reasoning text is rule-made"),
        _metric("Perplexity of replies", reply, unit="", note="after the corpus's own reasoning"),
    ]


def training_metrics(config: Config) -> list[results.Metric]:
    """Return what earlier stages measured on held-out data, read from their reports."""
    metrics: list[results.Metric] = []
    if config.tower is not None:
        report = json.loads(config.tower.read_text(encoding="utf-8"))
        n = int(report["validation_photos"])
        accuracy = share(round(report["validation_accuracy"] * n), n)
        metrics.append(
            _metric("Image tower alone: expressions named rightly", accuracy, note="7 classes")
        )
    if config.pretraining is not None:
        rows = config.pretraining.read_text(encoding="utf-8").splitlines()
        losses = [row for row in map(json.loads, rows) if "validation_loss" in row]
        metrics.append(
            results.Metric(
                name="Loss after pre-training, nats a token",
                value=losses[-1]["validation_loss"],
                n=config.pretraining_tokens,
                note="tokens of ESConv's validation dialogues",
            )
        )
    return metrics


def _metric(name: str, estimate: Estimate, *, unit: str = "%", note: str = "") -> results.Metric:
    return results.measured(name, estimate, unit=unit, note=note)


def _save(
    config: Config,
    name: str,
    title: str,
    model: str,
    metrics: Sequence[results.Metric],
    source: str,
) -> None:
    result = results.Result(
        name=name,
        title=title,
        date=datetime.datetime.now(tz=datetime.UTC).date(),
        model=model,
        label_source=source,
        command=config.command,
        versions=versions(("torch", "transformers")),
        seed=config.seed,
        metrics=tuple(metrics),
    )
    results.save(result, config.output)
    logger.info("%s", results.render(result))


def _write_transcript(path: Path, samples: Sequence[Sample], readings: Sequence[Reading]) -> None:
    """Write what was asked, what was answered and what the corpus says, one turn after another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for sample, reading in zip(samples, readings, strict=True):
            last = sample.history[-1]
            file.write(f"## {sample.id}\n\nSeeker: {last.text}\n")
            file.write(f"Photo: {last.face}\n" if last.face else "")
            file.write(f"\nModel:\n{reading.raw}\n\nCorpus:\n{sample.completion}\n\n")
