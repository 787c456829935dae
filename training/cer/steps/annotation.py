"""Annotation: from generated turns to what people see, and from what they answer to rows of CER.

The paper has each reasoning step judged on its own ("True" or "False") and the reply compared with
the original sentence (four answers), by two annotators, "in cases of disagreement, a third annotator
adjudicated", and drops what no two people agree on.

`items` lays out the turns for annotators, who answer wherever they like: at the annotation desk of
the page, or in a spreadsheet (`compeer_core.annotation.annotations`). Who wrote what stays behind in the
key. `settle` takes the answers and the key together. It can be called at any time: what is settled
by then is written, and what still needs a second or third annotator is listed.

Each question is settled for itself: a row may have two steps and no preference.
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
from training.cer.records import StepReport
from training.cer.requests.seeding import generator_for, stable_hash
from training.common.progress import count_lines, track
from training.data.samples import read_records, write_records

INCOMPLETE = "not a complete turn: nothing to judge step by step"
REPEATED = "the same turn for the same case again"
NO_MAJORITY = "no two people agree"

_log = logging.getLogger(__name__)


class Need(FrozenModel):
    """An item that somebody has yet to look at."""

    item_id: str
    questions: Mapping[Part, Unsettled]
    annotators: tuple[str, ...]
    """Who has answered already: it takes somebody else."""


class DroppedAnswer(FrozenModel):
    """A question about an item on which no two people agree."""

    item_id: str
    case_id: str
    question: Part
    answers: Mapping[str, str]
    """By annotator; a preference is in the item's order of replies."""


# --- For annotators -----------------------------------------------------------------------------


def items(
    turns: Iterable[tuple[Case, str, str]], output: Path, key: Path, *, seed: int
) -> StepReport:
    """Write what annotators see, and the key to it, row by row in the order of the turns.

    Args:
        turns: Case, author and text of each generated turn.
        output: Receives `AnnotationItem` rows: neither their ids nor their order tell anything
            about authors.
        key: Receives `ItemKey` rows. Keep it away from annotators.
        seed: Decides which reply stands first.
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

    written = write_records(key, keys())
    orders: Counter[str] = Counter()
    write_records(output, map(_shown, _counted(read_records(key, ItemKey), orders)))
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
) -> StepReport:
    """Write the rows that people agree on, by the paper's rule, and how well they agreed before.

    Args:
        key: `ItemKey` rows, as `items` wrote them.
        annotations: Files of annotations, .csv or .jsonl, in any mixture. Rows may be there more
            than once, and revised: of each person the latest by date counts.
        output: Receives `CerRecord` rows in the order of the key, one for each item with at least
            one settled question.
        needs: Receives `Need` rows.
        dropped: Receives `DroppedAnswer` rows.
        seed: Of the intervals.

    Raises:
        ConfigError: A file is missing or has a value that is none.
    """
    settling = _Settling(annotations, seed)
    written = write_records(output, settling.records(key))
    write_records(needs, settling.needs)
    write_records(dropped, settling.dropped)
    return settling.report(written)


class _Settling:
    """Goes through the items once, and remembers what is open, dropped and counted."""

    def __init__(self, paths: Iterable[Path], seed: int) -> None:
        self.needs: list[Need] = []
        self.dropped: list[DroppedAnswer] = []
        self._figures: Counter[str] = Counter()
        self._by_corpus: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._items = 0
        self._seed = seed
        self._answers = by_item(self._without_repetition(paths))
        self._used: list[Annotation] = []

    def _without_repetition(self, paths: Iterable[Path]) -> Iterator[Annotation]:
        seen: set[Annotation] = set()
        for path in paths:
            for annotation in read_annotations(path):
                self._figures["annotations"] += 1
                bare = annotation.model_copy(update={"note": ""})  # notes are long, and not needed
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
            if item.original is None:  # a preference, if any, is about nothing
                answers = [a.model_copy(update={"preference": None}) for a in answers]
            self._used += answers
            self._figures["annotations revised"] += len(answers) - len(
                {answer.annotator for answer in answers}
            )
            record = self._record(item, answers)
            if record is not None:
                yield record

    def _record(self, item: ItemKey, answers: list[Annotation]) -> CerRecord | None:
        asked = [part for part in QUESTIONS if part is not Part.REPLY or item.original]
        said = {part: opinions(answers, part) for part in asked}
        self._note_open(item, said, answers)
        settled = {
            part: outcome
            for part, each in said.items()
            if isinstance(outcome := each.outcome, Consensus)
        }
        for part, consensus in settled.items():
            self._figures[f"{part}: settled"] += 1
            self._figures[f"{part}: adjudicated"] += consensus.adjudicated
        return labelled(item.record(), said)

    def _note_open(
        self, item: ItemKey, said: Mapping[Part, Opinions], answers: list[Annotation]
    ) -> None:
        waiting: dict[Part, Unsettled] = {}
        for part, each in said.items():
            outcome = each.outcome
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
            people = dict.fromkeys(a.annotator for a in sorted(answers, key=lambda a: a.date))
            self.needs.append(
                Need(item_id=item.item_id, questions=waiting, annotators=tuple(people))
            )

    def report(self, written: int) -> StepReport:
        unknown = sum(map(len, self._answers.values()))
        if unknown:
            _log.warning("%s annotations are of items that the key does not have", unknown)
        figures: dict[str, float | int | str | None] = {
            **self._figures,
            "annotations of other items": unknown,
            "items that need somebody": len(self.needs),
        }
        for part, found in agreement(self._used, seed=self._seed).items():
            figures |= _figures(part, found)
        return StepReport(
            step="settle",
            read=self._items,
            written=written,
            dropped=self._by_corpus,
            figures=figures,
        )


def _figures(part: Part, found: Agreement) -> dict[str, float | int | str | None]:
    figures: dict[str, float | int | str | None] = {
        f"{part}: items with two answers": found.n_items
    }
    for name in ("raw", "alpha", "ac1"):
        measure = getattr(found, name)
        for end in ("value", "low", "high"):
            ending = "" if end == "value" else f" {end}"
            figures[f"{part}: {name}{ending}"] = None if measure is None else getattr(measure, end)
    return figures
