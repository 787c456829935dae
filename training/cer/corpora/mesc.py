"""MESC (Chu et al. 2024, https://arxiv.org/abs/2408.03650): scenes of therapy from a TV series.

The CSV has clean text and times, an emotion for each utterance and a strategy for each of the
therapist's. The JSON files add the problem and the situation, and after nearly every text a video
model's caption of the picture, which is moved to a separate field. A scene has the same `source_id`
in both.
"""

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from compeer_core.dialogue import Speaker
from training.cer.corpora.builder import Builder, RawUtterance
from training.cer.corpora.reading import (
    Row,
    converted,
    csv_rows,
    json_array,
    labels_of,
    opening_key,
)
from training.cer.records import Dropped, SourceDialogue

_COLUMNS = ("Utterance", "Speaker", "Emotion", "Strategy", "Dialogue_ID")
_PLACE = ("Season", "Episode", "StartTime", "EndTime")
_SPEAKERS = {
    **dict.fromkeys(("Client", "user"), Speaker.SEEKER),
    **dict.fromkeys(("Therapist", "sys"), Speaker.SUPPORTER),
}
_KEY_LETTERS = 200
"""Scenes are parts of longer sessions with similar openings: 60 letters would not be unique."""

# The beginnings of captions in the public files. Compared with the clean texts of the CSV, this splits
# every utterance of both files correctly.
_CAPTION = re.compile(
    r"\s*\bThe (?:emotion(?:al)? state of the speaker\b|speaker(?:'s (?:emotion|facial)"
    r"| (?:seems|appears|is|in the|looks|does|has|could|may|cannot)\b)).*",
    re.DOTALL,
)


def _builder(path: Path, dropped: Dropped, split: str | None) -> Builder:
    licence = "none stated; text of a TV series"
    return Builder("mesc", "en", licence, path, dropped, split, vocabulary="mesc")


def load_csv(path: Path, dropped: Dropped, split: str | None = None) -> Iterator[SourceDialogue]:
    """Yield the scenes of MESC.csv, which holds all splits."""
    builder = _builder(path, dropped, split)
    rows = csv_rows(path, dropped, _COLUMNS)
    scenes = (
        Row(list(scene), number)
        for number, scene in groupby(rows, lambda row: row.value["Dialogue_ID"])
    )

    def convert(scene: Row) -> SourceDialogue | None:
        utterances = [
            RawUtterance(
                _SPEAKERS[row.value["Speaker"]],
                row.value["Utterance"],
                strategy="" if row.value["Strategy"] == "undefined" else row.value["Strategy"],
                emotion=row.value["Emotion"],
                labels=labels_of(row.value, _PLACE),
            )
            for row in scene.value
        ]
        return builder.dialogue(
            scene.where,
            id=f"mesc/csv/{scene.where}",
            source_id=opening_key((utterance.text for utterance in utterances), _KEY_LETTERS),
            utterances=utterances,
            labels={"Dialogue_ID": str(scene.where)},
        )

    return converted(scenes, convert, path, dropped)


def load_json(path: Path, dropped: Dropped, split: str | None = None) -> Iterator[SourceDialogue]:
    """Yield the scenes of one split, with captions in their own field."""
    builder = _builder(path, dropped, split)

    def convert(row: Row) -> SourceDialogue | None:
        record: dict[str, Any] = row.value
        utterances = [_raw_utterance(entry) for entry in record["dialog"]]
        return builder.dialogue(
            row.where,
            id=f"mesc/json/{split or 'all'}/{row.where}",
            source_id=opening_key((utterance.text for utterance in utterances), _KEY_LETTERS),
            utterances=utterances,
            problem=" ".join(record["problem_type"].lower().split()),
            situation=record["situation"].strip(),
        )

    return converted(json_array(path, dropped), convert, path, dropped)


def _raw_utterance(entry: dict[str, Any]) -> RawUtterance:
    text: str = entry["text"]
    caption = _CAPTION.search(text)
    return RawUtterance(
        _SPEAKERS[entry["speaker"]],
        text[: caption.start()] if caption else text,
        strategy=entry.get("strategy", ""),
        emotion=entry["emotion"],
        caption=caption.group().strip() if caption else None,
    )
