"""Flawed variants of written turns as judged CER rows: `python -m training cer flawed <config.toml>`.

A large language model rewrote supporter turns for known contexts: some parts with a mistake of a named kind, some
reworded and still right (`assets/cer/README.md`). The writer's intention is the label, so a reward model can learn
from turns that differ in sense, not in style. A wrong part must not give itself away: `filtered` drops variants that a
classifier recognises without their context (adversarial filtering, as in https://arxiv.org/abs/2002.04108).
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline

from compeer_core.cer import Candidate, Case, CerRecord, DecidedBy
from compeer_core.config import FrozenModel
from compeer_core.reasoning import render
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Preference
from training.cer.context_turns import ContextTurn, joined, read_turns
from training.cer.pairs import pair_of
from training.cer.requests.seeding import stable_hash
from training.stages import refuse_resume

_log = logging.getLogger(__name__)

Part = Literal["history", "emotion", "strategy", "reply"]
PARTS: tuple[Part, ...] = ("history", "emotion", "strategy", "reply")
WRITER = DecidedBy(kind="model", name="a large language model that wrote the variant")
_FOLDS = 5


class Config(FrozenModel):
    """`[cer flawed]`: the variants and the rows that hold their contexts."""

    variants: tuple[Path, ...] = Field(min_length=1)
    """Files of variants: JSON lines, compressed with gzip."""
    contexts: tuple[Path, ...] = Field(min_length=1)
    """Files of CER rows, written by `cer written`. A variant without a row is dropped and counted."""
    output: Path
    """Folder that receives `rows.jsonl`."""
    drop_share: float = Field(default=0.42, ge=0, lt=1)
    """Share of the variants to drop: those that give their labels away."""


class FlawedTurn(ContextTurn):
    """One line of the file: a whole turn, and what is wrong with it."""

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
    refuse_resume(resume, "this stage takes seconds")
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
        ConfigError: See `read_turns` and `joined`.
    """
    cases: dict[str, tuple[Case, FlawedTurn]] = {}
    for case, placed in joined(read_turns(config.variants, FlawedTurn), config.contexts):
        cases.setdefault(placed.turn.context, (case, placed.turn))
    variants = [variant for _, variant in cases.values()]
    kept = filtered(variants, config.drop_share)
    for about, shown in (
        ("all variants", variants),
        ("kept variants", [v for v, keep in zip(variants, kept, strict=True) if keep]),
    ):
        for part in PARTS:
            if (alone := _alone(shown, part)) is not None:
                auroc = roc_auc_score(alone.wrong, alone.predicted)
                _log.info("%s, %s alone: AUROC %.3f, n = %d", about, part, auroc, len(alone.wrong))
    for (case, variant), keep in zip(cases.values(), kept, strict=True):
        if keep:
            yield _row(case, variant)


def filtered(variants: Sequence[FlawedTurn], drop_share: float) -> list[bool]:
    """Return which variants to keep: not those whose changed parts give their label away.

    A variant is as revealing as its most revealing part.
    """
    revealing = np.zeros(len(variants))
    for part in PARTS:
        if (alone := _alone(variants, part)) is not None:
            correct = np.where(alone.wrong, alone.predicted, 1 - alone.predicted)
            revealing[alone.places] = np.maximum(revealing[alone.places], correct)
    kept = np.ones(len(variants), dtype=bool)
    drop = int(drop_share * len(variants))
    kept[np.argsort(-revealing, kind="stable")[:drop]] = False
    return [bool(keep) for keep in kept]


@dataclass(frozen=True)
class _Alone:
    """How far a part gives away whether it is wrong, without its conversation."""

    places: list[int]
    """Of the variants in which the part was changed."""
    wrong: NDArray[np.bool_]
    predicted: NDArray[np.float64]
    """Probability of wrong, by a logistic regression on words, pairs of words and labels of the other folds."""


def _alone(variants: Sequence[FlawedTurn], part: Part) -> _Alone | None:
    """Predict from a part alone whether it is wrong; None if there are too few of either kind."""
    places = [at for at, v in enumerate(variants) if part in v.wrong or part in v.reworded]
    wrong = np.array([part in variants[at].wrong for at in places], dtype=bool)
    if min(wrong.sum(), (~wrong).sum()) < _FOLDS:
        return None
    classifier = make_pipeline(
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True),
        LogisticRegression(C=3, max_iter=1000, class_weight="balanced"),
    )
    texts = [variants[at].own_text(part) for at in places]
    folds = StratifiedKFold(_FOLDS, shuffle=True, random_state=0)
    predicted = cross_val_predict(classifier, texts, wrong, cv=folds, method="predict_proba")[:, 1]
    return _Alone(places, wrong, predicted)


def _row(case: Case, variant: FlawedTurn) -> CerRecord:
    candidate = Candidate(
        author="llm",
        reply=variant.reply,
        turn=render(variant.support_turn()),
        steps=tuple(part not in variant.wrong for part in PARTS[:3]),
        steps_by=WRITER,
        reason=variant.why,
    )
    name = f"{case.id}/flawed"
    if "reply" not in (*variant.wrong, *variant.reworded):
        return CerRecord(id=name, case=case, first=candidate)
    return pair_of(
        name,
        case,
        candidate,
        Candidate(author="llm", reply=variant.original_reply),
        preference=Preference.SECOND if "reply" in variant.wrong else Preference.BOTH,
        by=WRITER,
        swapped=stable_hash("flawed", case.id) % 2 == 1,
    )
