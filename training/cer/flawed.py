"""Flawed variants of written turns as judged CER rows: `python -m training cer flawed <config.toml>`.

A large language model rewrote supporter turns for known contexts: some parts with a mistake of a named kind, some
reworded and still right (`assets/cer/README.md`). The writer's intention is the label, so a reward model can learn
from turns that differ in sense, not in style. A wrong part must not give itself away: `filtered` drops variants that a
classifier recognises without their context (adversarial filtering, as in https://arxiv.org/abs/2002.04108).
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import Pipeline, make_pipeline

from compeer_core.cer import Candidate, Case, CerRecord, DecidedBy
from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.reasoning import render
from compeer_core.row_files import json_lines, parse_row, write_rows
from compeer_core.taxonomy import Preference
from training.cer.mirror import context_of
from training.cer.requests.seeding import stable_hash
from training.cer.written import WrittenSupport
from training.data.records import read_records

_log = logging.getLogger(__name__)

Part = Literal["history", "emotion", "strategy", "reply"]
PARTS: tuple[Part, ...] = ("history", "emotion", "strategy", "reply")
WRITER = DecidedBy(kind="model", name="a large language model that wrote the variant")
_FOLDS = 5


class Config(FrozenModel):
    """`[cer flawed]`: the variants and the rows that hold their contexts."""

    variants: Path
    """The variants: JSON lines, compressed with gzip."""
    contexts: tuple[Path, ...] = Field(min_length=1)
    """Files of CER rows, written by `cer written`. A variant without a row is dropped and counted."""
    output: Path
    """Folder that receives `rows.jsonl`."""
    drop_share: float = Field(default=0.42, ge=0, lt=1)
    """Share of the variants to drop: those that give their labels away."""


class FlawedTurn(WrittenSupport):
    """One line of the file: a whole turn, and what is wrong with it."""

    context: str = Field(pattern=r"^\S+#\d+$")
    """Id of the case that the turn answers, without the number of a photo draw."""
    original_reply: str
    """The reply that was there before."""
    wrong: dict[Part, str]
    """The kind of mistake of each wrong part."""
    reworded: tuple[Part, ...]
    """Parts that were reworded and are right; all other parts are as they were, and right."""
    why: str
    """The writer's reason, empty if nothing is wrong."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if both := sorted({*self.wrong} & {*self.reworded}):
            raise ValueError(f"{both[0]} is both wrong and reworded")
        if not (self.wrong or self.reworded):
            raise ValueError("no part was changed")
        if bool(self.why) != bool(self.wrong):
            raise ValueError("`why` must name the mistakes, and be empty without any")
        return self

    def own_text(self, part: Part) -> str:
        """Return what a reader sees of a part: its text, and its labels as words."""
        return {
            "history": f"{self.history} {self.stage}",
            "emotion": f"{self.emotion_text} {self.emotion} intensity{self.intensity}",
            "strategy": f"{self.strategy_text} {self.strategy}",
            "reply": self.reply,
        }[part]


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Write the rows; a dry run reads everything and counts them."""
    if resume is not None:
        raise ConfigError("this stage cannot be resumed: run it again, it takes seconds")
    rows = list(flawed_rows(config))
    for split, count in sorted(Counter(row.case.split for row in rows).items()):
        _log.info("%s: %d variants", split, count)
    if not dry_run:
        write_rows(config.output / "rows.jsonl", rows)


def flawed_rows(config: Config) -> Iterator[CerRecord]:
    """Yield a judged row for each variant whose context is known, in the order of the contexts.

    One candidate is the variant, with the labels of its steps. If its reply was changed, the other is the original
    reply: preferred over a worse one, as good as a reworded one. The order is drawn by the case's id.

    Raises:
        ConfigError: A file is missing, a line is no variant, two variants have one context, or no variant has one.
    """
    variants = _read_variants(config.variants)
    cases: dict[str, Case] = {}
    for path in config.contexts:
        for record in read_records(path, CerRecord):
            context = context_of(record.case)
            if context in variants:
                cases.setdefault(context, record.case)
    if not cases:
        raise ConfigError(
            f"{config.variants}: none of {len(variants)} contexts is in "
            f"{', '.join(map(str, config.contexts))}; name the rows that `cer written` wrote"
        )
    if missing := len(variants) - len(cases):
        _log.info("dropped: %d of %d variants, whose contexts are missing", missing, len(variants))
    known = [variants[context] for context in cases]
    kept = filtered(known, config.drop_share)
    for case, variant, keep in zip(cases.values(), known, kept, strict=True):
        if keep:
            yield _row(case, variant)


def filtered(variants: Sequence[FlawedTurn], drop_share: float) -> list[bool]:
    """Return which variants to keep: not those whose changed parts give their label away.

    For each part a logistic regression on words, pairs of words and labels predicts from the other folds' parts
    whether it is wrong. A variant is as revealing as its most revealing part.
    """
    revealing = np.zeros(len(variants))
    for part in PARTS:
        changed = [at for at, v in enumerate(variants) if part in v.wrong or part in v.reworded]
        wrong = np.array([part in variants[at].wrong for at in changed], dtype=bool)
        if min(wrong.sum(), (~wrong).sum()) < _FOLDS:
            continue
        texts = [variants[at].own_text(part) for at in changed]
        predicted = cross_val_predict(
            _part_alone(), texts, wrong, cv=_folds(), method="predict_proba"
        )[:, 1]
        correct = np.where(wrong, predicted, 1 - predicted)
        revealing[changed] = np.maximum(revealing[changed], correct)
    kept = np.ones(len(variants), dtype=bool)
    drop = int(drop_share * len(variants))
    kept[np.argsort(-revealing, kind="stable")[:drop]] = False
    return [bool(keep) for keep in kept]


def _part_alone() -> Pipeline:
    return make_pipeline(
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True),
        LogisticRegression(C=3, max_iter=1000, class_weight="balanced"),
    )


def _folds() -> StratifiedKFold:
    return StratifiedKFold(_FOLDS, shuffle=True, random_state=0)


def _read_variants(path: Path) -> dict[str, FlawedTurn]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file (shipped as assets/cer/flawed.jsonl.gz)")
    variants: dict[str, FlawedTurn] = {}
    for where, line in json_lines(path):
        variant = parse_row(FlawedTurn, where, line)
        if variant.context in variants:
            raise ConfigError(f"{where}: context {variant.context} already has a variant")
        variants[variant.context] = variant
    return variants


def _row(case: Case, variant: FlawedTurn) -> CerRecord:
    candidate = Candidate(
        author="llm",
        reply=variant.reply,
        turn=render(variant.support_turn()),
        steps=tuple(part not in variant.wrong for part in PARTS[:3]),
        steps_by=WRITER,
        reason=variant.why,
    )
    row = CerRecord(id=f"{case.id}/flawed", case=case, first=candidate)
    if "reply" not in (*variant.wrong, *variant.reworded):
        return row
    original = Candidate(author="llm", reply=variant.original_reply)
    swap = stable_hash("flawed", case.id) % 2
    preference = Preference.BOTH
    if "reply" in variant.wrong:
        preference = Preference.FIRST if swap else Preference.SECOND
    pair = (original, candidate) if swap else (candidate, original)
    return row.model_copy(
        update={
            "first": pair[0],
            "second": pair[1],
            "preference": preference,
            "preference_by": WRITER,
        }
    )
