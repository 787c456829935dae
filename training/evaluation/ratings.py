"""Answers to blind comparisons: reading them without accepting a wrong one, and joining them with the key.

Files are the annotation desk's (`compeer_core.annotation.annotations`), in a folder for each source of labels:

```text
<ratings>/person/*.jsonl, *.csv   answers of people
<ratings>/llm/*.jsonl, *.csv      answers of language models
```

The two are never put together. Revisions count as at the desk: within a file, the later answer replaces the earlier.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from compeer_core.annotation.annotations import (
    Annotation,
    Answer,
    by_item,
    opinions,
    placed_annotations,
)
from compeer_core.errors import ConfigError
from compeer_core.reasoning import Part
from compeer_core.taxonomy import Preference
from training.evaluation.pair_items import PairKey

LabelSource = Literal["person", "llm"]
SOURCES: tuple[LabelSource, ...] = get_args(LabelSource)
_SUFFIXES = (".csv", ".jsonl", ".csv.gz", ".jsonl.gz")


@dataclass(frozen=True)
class Rating:
    """One rater's answer about one item."""

    key: PairKey
    rater: str
    preference: Preference
    """In the order in which the rater saw the replies."""
    shown: tuple[str, str]
    """The models in that order."""

    @property
    def winner(self) -> str | None:
        """The preferred model; None for a tie or if neither reply is acceptable."""
        return {Preference.FIRST: self.shown[0], Preference.SECOND: self.shown[1]}.get(
            self.preference
        )


def rating_files(folder: Path) -> dict[LabelSource, list[Path]]:
    """Return the files with answers, by source; sources without a file are left out.

    Raises:
        ConfigError: A file is outside the folders of the sources, or has another suffix.
    """
    found: dict[LabelSource, list[Path]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path.parent.parent != folder or path.parent.name not in SOURCES:
            raise ConfigError(
                f"{path}: who answered? Move it to {folder / 'person'} (people) or {folder / 'llm'} "
                "(language models)"
            )
        if not path.name.endswith(_SUFFIXES):
            raise ConfigError(f"{path}: answers are .jsonl or .csv files; remove or convert it")
        found.setdefault(SOURCES[SOURCES.index(path.parent.name)], []).append(path)
    return found


def read_ratings(
    files: Mapping[LabelSource, Sequence[Path]], known: Mapping[str, PairKey]
) -> dict[LabelSource, list[Annotation]]:
    """Return all answers by source, revisions included.

    Args:
        files: See `rating_files`.
        known: The keys of the items, by id.

    Raises:
        ConfigError: An answer cannot be read, is about an unknown item, or a second one of the same rater that is
            no revision; or a rater is both a person and a language model. The message names file and row.
    """
    answers: dict[LabelSource, list[Annotation]] = {}
    met: dict[str, tuple[LabelSource, str]] = {}
    last: dict[tuple[str, str], tuple[Path, str, Annotation]] = {}
    for source, paths in files.items():
        for path in paths:
            for where, each in placed_annotations(path):
                if each.item_id not in known:
                    raise ConfigError(
                        f"{where}: item {each.item_id} is not in the key; these answers belong to "
                        "another study"
                    )
                other_source, elsewhere = met.setdefault(each.annotator, (source, where))
                if other_source != source:
                    raise ConfigError(
                        f"{where}: {each.annotator} answers as {source} here and as {other_source} in "
                        f"{elsewhere}; people and language models need names of their own"
                    )
                earlier = last.get((each.item_id, each.annotator))
                if earlier is not None and (earlier[0] != path or each.date <= earlier[2].date):
                    raise ConfigError(
                        f"{where}: {each.annotator} has answered about item {each.item_id} before "
                        f"({earlier[1]}); only a later answer in the same file is a revision"
                    )
                last[each.item_id, each.annotator] = (path, where, each)
                answers.setdefault(source, []).append(each)
    return answers


def standing_ratings(
    answers: Sequence[Annotation], known: Mapping[str, PairKey], source: LabelSource
) -> list[Rating]:
    """Return the answers that count, in the order of the items.

    Of people, these are the first two independent answers: whoever decides a conflict at the desk has seen both.
    Of language models, all count, since none sees another's answer.
    """
    return list(_standing(answers, known, source))


def _standing(
    answers: Sequence[Annotation], known: Mapping[str, PairKey], source: LabelSource
) -> Iterator[Rating]:
    of_item = by_item(answers)
    for item_id, key in known.items():
        annotations = of_item.get(item_id, [])
        measured = opinions(annotations, Part.REPLY)
        shown_first = {each.annotator: each.shown_first for each in annotations}
        chosen = measured.independent if source == "person" else measured.latest
        for rater, preference in _preferences(chosen).items():
            in_order = shown_first[rater] == "first"
            yield Rating(
                key=key,
                rater=rater,
                preference=preference if in_order else preference.swapped(),
                shown=key.models if in_order else key.models[::-1],
            )


def independent_answers(
    answers: Sequence[Annotation], items: Sequence[str]
) -> list[dict[str, Preference]]:
    """Return the first two independent answers about each item, by rater, for their agreement.

    Preferences refer to the item's order of replies. It is random, so agreement by chance is that of raters who
    cannot know the models.
    """
    of_item = by_item(answers)
    return [_preferences(opinions(of_item.get(item, []), Part.REPLY).independent) for item in items]


def _preferences(answers: Mapping[str, Answer]) -> dict[str, Preference]:
    return {rater: answer for rater, answer in answers.items() if isinstance(answer, Preference)}
