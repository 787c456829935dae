"""Annotation: write the items that annotators see, and turn their answers into CER rows.

In the paper each reasoning step is judged on its own ("True" or "False") and the reply is compared
with the original sentence (four answers), by two annotators; "in cases of disagreement, a third
annotator adjudicated", and a label without a majority is dropped.

`items` writes the turns for annotators, who can use the annotation desk of the demo or a spreadsheet
(`compeer_core.annotation.annotations`). The key, which names the authors, stays private. `settle`
joins answers and key. It can run at any time: it writes the settled rows and lists what still needs a
second or third annotator.

Each question is settled separately: a row may have two steps and no preference.

A model can answer instead of people (`by_models`). One reading is then enough; of items that were read
twice, to measure agreement, those keep a label on which both readings agree.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from compeer_core.annotation.agreement import Agreement, Consensus, Unsettled
from compeer_core.annotation.annotations import (
    QUESTIONS,
    Annotation,
    AnnotationItem,
    Answer,
    ItemKey,
    Opinions,
    agreement,
    by_item,
    labelled,
    opinions,
    read_annotations,
)
from compeer_core.cer import Case, CerRecord
from compeer_core.config import FrozenModel
from compeer_core.reasoning import Part, SupportTurn, read
from compeer_core.row_files import write_rows
from training.cer.records import StepReport
from training.cer.requests.seeding import generator_for, stable_hash
from training.common.progress import count_lines, track
from training.data.records import read_records

INCOMPLETE = "incomplete turn"
REPEATED = "repeated turn for the same case"
NO_MAJORITY = "no two annotators agree"

_log = logging.getLogger(__name__)


class Need(FrozenModel):
    """An item that needs another annotator."""

    item_id: str
    questions: Mapping[Part, Unsettled]
    annotators: tuple[str, ...]
    """Those who have answered; another person is needed."""


class DroppedAnswer(FrozenModel):
    """A question on which no two annotators agree."""

    item_id: str
    case_id: str
    question: Part
    answers: Mapping[str, str]
    """By annotator; a preference refers to the item's order of replies."""


# --- For annotators -----------------------------------------------------------------------------


def items(
    turns: Iterable[tuple[Case, str, str]], output: Path, key: Path, *, seed: int
) -> StepReport:
    """Write the annotation items and their key, in the order of the turns.

    Args:
        turns: Case, author and text of each generated turn.
        output: Receives `AnnotationItem` rows; neither ids nor order reveal the authors.
        key: Receives `ItemKey` rows. Do not give it to annotators.
        seed: Draws the order of the two replies.
    """
    dropped: defaultdict[str, Counter[str]] = defaultdict(Counter)
    read_count = 0

    def keys() -> Iterator[ItemKey]:
        nonlocal read_count
        seen: set[str] = set()
        for case, author, text in turns:
            read_count += 1
            item_id = f"{stable_hash('item', case.id, author, text):032x}"
            if not read(text).is_complete:
                dropped[case.corpus][INCOMPLETE] += 1
            elif item_id in seen:
                dropped[case.corpus][REPEATED] += 1
            else:
                seen.add(item_id)
                yield _key(item_id, case, author, text, seed)

    written = write_rows(key, keys())
    orders: Counter[str] = Counter()
    write_rows(output, map(_shown, _counted(read_records(key, ItemKey), orders)))
    return StepReport(
        step="items",
        read=read_count,
        written=written,
        dropped=dropped,
        figures={
            "original first": orders["first"],
            "original second": orders["second"],
            "one reply only": orders["none"],
        },
    )


def _counted(keys: Iterable[ItemKey], orders: Counter[str]) -> Iterator[ItemKey]:
    for key in keys:
        orders[key.original or "none"] += 1
        yield key


def _key(item_id: str, case: Case, author: str, text: str, seed: int) -> ItemKey:
    original: Literal["first", "second"] | None = None
    if case.original is not None and case.original.strip() != _turn(text).reply.strip():
        first = generator_for(seed, "order", item_id).random() < 0.5
        original = "first" if first else "second"
    return ItemKey(item_id=item_id, case=case, author=author, turn=text, original=original)


def _turn(text: str) -> SupportTurn:
    return read(text).turn


def _shown(key: ItemKey) -> AnnotationItem:
    turn = _turn(key.turn)
    replies = None
    if key.original is not None and key.case.original is not None:
        pair = (key.case.original, turn.reply)
        replies = pair if key.original == "first" else pair[::-1]
    return AnnotationItem.of(key.item_id, key.case, turn, replies)


# --- From annotators ----------------------------------------------------------------------------


def settle(
    key: Path,
    annotations: Iterable[Path],
    output: Path,
    needs: Path,
    dropped: Path,
    *,
    seed: int = 0,
    by_models: bool = False,
) -> StepReport:
    """Write the rows that annotators agree on, by the paper's rule, and report their agreement.

    Args:
        key: `ItemKey` rows from `items`.
        annotations: Files of annotations, .csv or .jsonl. Rows may be repeated and revised: the
            latest of each annotator counts.
        output: Receives `CerRecord` rows in the order of the key, one for each item with at least
            one settled question.
        needs: Receives `Need` rows.
        dropped: Receives `DroppedAnswer` rows.
        seed: The seed of the confidence intervals.
        by_models: The annotators are models.

    Raises:
        ConfigError: A file is missing or has an invalid value.
    """
    settling = _Settling(annotations, seed, by_models)
    written = write_rows(output, settling.records(key))
    write_rows(needs, settling.needs)
    write_rows(dropped, settling.dropped)
    return settling.report(written)


class _Settling:
    """Reads the items once and collects what is open, dropped and counted."""

    def __init__(self, paths: Iterable[Path], seed: int, by_models: bool) -> None:
        self.needs: list[Need] = []
        self.dropped: list[DroppedAnswer] = []
        self._figures: Counter[str] = Counter()
        self._by_corpus: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._items = 0
        self._seed = seed
        self._by_models = by_models
        self._answers = by_item(self._without_repetition(paths))
        self._used: list[Annotation] = []

    def _without_repetition(self, paths: Iterable[Path]) -> Iterator[Annotation]:
        seen: set[Annotation] = set()
        for path in paths:
            for annotation in read_annotations(path):
                self._figures["annotations"] += 1
                bare = annotation.model_copy(update={"note": ""})  # notes are long and unused
                if bare in seen:
                    self._figures["annotations repeated"] += 1
                    continue
                seen.add(bare)
                yield bare

    def records(self, key: Path) -> Iterator[CerRecord]:
        for item in track(
            read_records(key, ItemKey), "settling annotations", total=count_lines(key), unit="items"
        ):
            self._items += 1
            answers = self._answers.pop(item.item_id, [])
            if item.original is None:  # there is nothing to prefer
                answers = [a.model_copy(update={"preference": None}) for a in answers]
            self._used += answers
            self._figures["annotations revised"] += len(answers) - len(
                {answer.annotator for answer in answers}
            )
            record = self._record(item, answers)
            if record is not None:
                yield record

    def _record(self, item: ItemKey, answers: list[Annotation]) -> CerRecord | None:
        questions = [part for part in QUESTIONS if part is not Part.REPLY or item.original]
        by_question = {part: opinions(answers, part) for part in questions}
        self._note_open(item, by_question, answers)
        for part, each in by_question.items():
            if isinstance(outcome := self._outcome(each), Consensus):
                self._figures[f"{part}: settled"] += 1
                self._figures[f"{part}: adjudicated"] += outcome.adjudicated
        return labelled(item.record(), by_question, by_models=self._by_models)

    def _outcome(self, answers: Opinions) -> Consensus[Answer] | Unsettled:
        return answers.outcome_of_readers if self._by_models else answers.outcome

    def _note_open(
        self, item: ItemKey, by_question: Mapping[Part, Opinions], answers: list[Annotation]
    ) -> None:
        waiting: dict[Part, Unsettled] = {}
        for part, each in by_question.items():
            outcome = self._outcome(each)
            if outcome is Unsettled.NO_CONSENSUS:
                self._by_corpus[item.case.corpus][f"{part}: {NO_MAJORITY}"] += 1
                self.dropped.append(
                    DroppedAnswer(
                        item_id=item.item_id,
                        case_id=item.case.id,
                        question=part,
                        answers={name: str(answer) for name, answer in each.latest.items()},
                    )
                )
            elif isinstance(outcome, Unsettled):
                waiting[part] = outcome
                self._figures[f"{part}: {outcome}"] += 1
        if waiting:
            annotators = dict.fromkeys(a.annotator for a in sorted(answers, key=lambda a: a.date))
            self.needs.append(
                Need(item_id=item.item_id, questions=waiting, annotators=tuple(annotators))
            )

    def report(self, written: int) -> StepReport:
        unknown = sum(map(len, self._answers.values()))
        if unknown:
            _log.warning("%s annotations belong to items that are not in the key", unknown)
        figures: dict[str, float | int | str | None] = {
            **self._figures,
            "annotations of other items": unknown,
            "items that need another annotator": len(self.needs),
        }
        for part, measured in agreement(self._used, seed=self._seed).items():
            figures |= _figures(part, measured)
        return StepReport(
            step="settle",
            read=self._items,
            written=written,
            dropped=self._by_corpus,
            figures=figures,
        )


def _figures(part: Part, measured: Agreement) -> dict[str, float | int | str | None]:
    figures: dict[str, float | int | str | None] = {
        f"{part}: items with two answers": measured.n_items
    }
    for name in ("raw", "alpha", "ac1"):
        measure = getattr(measured, name)
        for end in ("value", "low", "high"):
            ending = "" if end == "value" else f" {end}"
            figures[f"{part}: {name}{ending}"] = None if measure is None else getattr(measure, end)
    return figures
