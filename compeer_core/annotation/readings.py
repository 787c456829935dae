"""Answers of language models (readers), and how far people agree with them.

Readers answer the annotators' questions after docs/rubric.md, and their answers come as JSON lines of
`Annotation`. At the desk they are stored with their items and hidden. People answer a random share of the items
without seeing them; `reader_agreement` then compares a person's answer with the label that the readers gave.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from compeer_core.annotation.agreement import Agreement, Consensus, measure_agreement
from compeer_core.annotation.annotations import (
    QUESTIONS,
    Annotation,
    AnnotationItem,
    opinions,
    parse_annotation,
)
from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.reasoning import STEPS, Part
from compeer_core.row_files import json_lines

PERSON, READER = "person", "reader"

Item = TypeVar("Item")


@dataclass(frozen=True)
class Reading:
    """A reader's answer and its place in a file."""

    where: str
    annotation: Annotation


def read_readings(path: Path) -> dict[str, list[Reading]]:
    """Return readers' answers by item.

    Args:
        path: A .jsonl file of `Annotation`, which may be gzipped.

    Raises:
        ConfigError: A line is no annotation, leaves a step open, or answers for a reader who has
            answered about that item before. The message names file and line.
    """
    readings: dict[str, list[Reading]] = {}
    for where, line in json_lines(path):
        annotation = parse_annotation(where, line)
        for part, verdict in zip(STEPS, annotation.steps, strict=True):
            if verdict is None:
                raise ConfigError(
                    f"{where}: item {annotation.item_id}: the {part} step has no verdict; readers say "
                    "true or false for each step"
                )
        of_item = readings.setdefault(annotation.item_id, [])
        for earlier in of_item:
            if earlier.annotation.annotator == annotation.annotator:
                raise ConfigError(
                    f"{where}: {annotation.annotator} has answered about item {annotation.item_id} "
                    f"already ({earlier.where}); give each reader a name of its own"
                )
        of_item.append(Reading(where, annotation))
    if not readings:
        raise ConfigError(f"{path}: is empty")
    return readings


def check_readings(
    readings: Mapping[str, Sequence[Reading]], items: Iterable[AnnotationItem], path: Path
) -> None:
    """Check that readers' answers belong to the items of a file.

    Raises:
        ConfigError: An answer is about no item of the file, or prefers no reply where there are two. The
            message names file and line.
    """
    known = {item.id: item for item in items}
    for item_id, of_item in readings.items():
        item = known.get(item_id)
        for reading in of_item:
            if item is None:
                raise ConfigError(f"{reading.where}: there is no item {item_id} in {path}")
            if item.replies is not None and reading.annotation.preference is None:
                raise ConfigError(
                    f"{reading.where}: item {item_id} has two replies, and no preference is given"
                )


def draw(items: Sequence[Item], ids: Sequence[str], share: float, seed: int = 0) -> list[Item]:
    """Return a random share of items in their order, at least one.

    Args:
        items: The items.
        ids: Their ids, which with the seed decide the draw: the same for every order of the items.
        share: In (0, 1], rounded to whole items.
        seed: Of the draw.
    """

    def rank(number: int) -> bytes:
        return hashlib.sha256(f"{seed} {ids[number]}".encode()).digest()

    count = max(1, round(share * len(items)))
    drawn = sorted(sorted(range(len(items)), key=rank)[:count])
    return [items[number] for number in drawn]


class ReaderAgreement(FrozenModel):
    """The agreement of people with the readers' labels."""

    items: int
    """Items that readers have answered."""
    answered: int
    """Of these, items that need no more independent answers by people."""
    questions: Mapping[Part, Agreement]
    """Of the person who answered first with the readers' label, on items that have both."""
    stricter: Mapping[Part, int]
    """By step: items where the person says wrong and the readers right."""
    milder: Mapping[Part, int]
    """By step: items where the person says right and the readers wrong."""


def reader_agreement(
    items: int,
    answers: Mapping[str, Sequence[Annotation]],
    readings: Mapping[str, Sequence[Annotation]],
    *,
    seed: int = 0,
) -> ReaderAgreement:
    """Compare the first independent answer of a person with the readers' label.

    The label is the one that training would use: that of one reader, or of all where several have answered
    and agree (`Opinions.outcome_of_readers`). Other items are left out.

    Args:
        items: Number of items that readers have answered.
        answers: People's answers about items that need no more independent ones.
        readings: Readers' answers about the same items.
        seed: Of the bootstrap.
    """
    questions: dict[Part, Agreement] = {}
    stricter: dict[Part, int] = {}
    milder: dict[Part, int] = {}
    for part, labels in QUESTIONS.items():
        pairs = []
        for item, of_item in readings.items():
            label = opinions(of_item, part).outcome_of_readers
            people = opinions(answers.get(item, ()), part).independent
            if isinstance(label, Consensus) and people:
                pairs.append({PERSON: next(iter(people.values())), READER: label.label})
        questions[part] = measure_agreement(pairs, labels, seed=seed)
        if part is not Part.REPLY:
            stricter[part] = sum(pair == {PERSON: False, READER: True} for pair in pairs)
            milder[part] = sum(pair == {PERSON: True, READER: False} for pair in pairs)
    return ReaderAgreement(
        items=items, answered=len(answers), questions=questions, stricter=stricter, milder=milder
    )
