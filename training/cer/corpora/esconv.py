"""ESConv (Liu et al. 2021, https://arxiv.org/abs/2106.01144) in its common layouts.

- lines: one object per line, speakers `usr` and `sys`, `text`; the layout of its data set card.
- original: one array, `speaker`, `annotation` and `content`, with the seeker's feedback; the failed
  dialogues use it too, with the speakers `speaker` (who seeks help) and `listener`.
- MultiESC (https://github.com/lwgkzl/MultiESC): one object per line, turns joined and
  tokenised, feedback and the cause of the emotion.
- windows: one context window per line, utterances as `<number> <who> <turn> [Strategy] text` between
  ` EOS `, where who is 0 for the seeker and 1 for the supporter.

A dialogue has the same `source_id` in all of them, derived from its opening, because the layouts have
no ids.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from compeer_core.dialogue import Speaker
from training.cer.corpora.builder import Builder, RawUtterance, rating
from training.cer.corpora.reading import (
    Row,
    converted,
    json_array,
    json_lines,
    labels_of,
    opening_key,
    plain,
    text_lines,
)
from training.cer.records import Dropped, Reason, SourceDialogue

_SPEAKERS: Mapping[str, Speaker] = MappingProxyType(
    {
        **dict.fromkeys(("usr", "seeker", "speaker"), Speaker.SEEKER),
        **dict.fromkeys(("sys", "supporter", "listener"), Speaker.SUPPORTER),
    }
)
_SURVEY_OF_THE_FEELING = ("initial_emotion_intensity", "final_emotion_intensity")


def _builder(path: Path, dropped: Dropped, split: str | None) -> Builder:
    return Builder("esconv", "en", "CC BY-NC 4.0", path, dropped, split, vocabulary="esconv")


def load_lines(path: Path, dropped: Dropped, split: str | None = None) -> Iterator[SourceDialogue]:
    """Yield the dialogues of a split in the layout of the data set card."""
    return _load(path, dropped, split, "lines", json_lines(path, dropped))


def load_original(
    path: Path, dropped: Dropped, split: str | None = None
) -> Iterator[SourceDialogue]:
    """Yield the dialogues of ESConv.json, or FailedESConv.json with split `failed`."""
    return _load(path, dropped, split, "original", json_array(path, dropped))


def load_multiesc(
    path: Path, dropped: Dropped, split: str | None = None
) -> Iterator[SourceDialogue]:
    """Yield the dialogues of a split in MultiESC's layout; the texts stay tokenised."""
    return _load(path, dropped, split, "multiesc", json_lines(path, dropped))


def _load(
    path: Path, dropped: Dropped, split: str | None, layout: str, rows: Iterator[Row]
) -> Iterator[SourceDialogue]:
    builder = _builder(path, dropped, split)

    def convert(row: Row) -> SourceDialogue | None:
        record: dict[str, Any] = row.value
        utterances = [_raw_utterance(entry) for entry in record["dialog"]]
        survey = record.get("survey_score") or {}
        seeker = survey.get("seeker") or {}
        ratings = {
            f"{who}_{what}": int(given)
            for who, answers in survey.items()
            for what, given in (answers or {}).items()
            if what not in _SURVEY_OF_THE_FEELING and given not in {None, ""}
        }
        return builder.dialogue(
            row.where,
            id=f"esconv/{layout}/{split or 'all'}/{row.where}",
            source_id=opening_key(utterance.text for utterance in utterances),
            utterances=utterances,
            emotion=record["emotion_type"],
            problem=record["problem_type"].strip().lower(),
            situation=record["situation"].strip(),
            before=rating(seeker.get("initial_emotion_intensity", record.get("init_intensity"))),
            after=rating(seeker.get("final_emotion_intensity", record.get("final_intensity"))),
            survey=ratings,
            labels=labels_of(record, ["experience_type"]),
        )

    return converted(rows, convert, path, dropped)


def _raw_utterance(entry: dict[str, Any]) -> RawUtterance:
    annotation = entry.get("annotation", entry)
    speaker = _SPEAKERS[entry["speaker"]]
    labels = labels_of(entry, ["cause"])
    others = annotation.get("all_strategy") or []
    if len(others) > 1:  # a joined turn; its strategy is the first
        labels["all_strategy"] = "; ".join(others)
    return RawUtterance(
        speaker,
        entry["content"] if "content" in entry else entry["text"],
        strategy=plain(annotation.get("strategy")),
        feedback=rating(annotation.get("feedback")),
        labels=labels,
    )


_WINDOW_PART = re.compile(
    r"(?P<number>[\d.]+) (?P<who>[01]) (?P<turn>\d+) (?:\[(?P<strategy>[^\]]*)\] )?(?P<text>.*)",
    re.DOTALL,
)


def load_windows(
    path: Path, dropped: Dropped, split: str | None = None
) -> Iterator[SourceDialogue]:
    """Yield each context window as a dialogue; the windows of one dialogue share a source.

    Windows are in order, so a new dialogue begins where the turn numbers restart. The number before
    each turn number is 1.0 for the utterance to predict and 0.0 otherwise.
    """
    builder = _builder(path, dropped, split)
    windows: list[tuple[int | str, dict[int, RawUtterance]]] = []
    for row in chain(text_lines(path), [None]):
        window = None
        if row is not None:
            if not row.value.strip():
                continue
            parts = [_WINDOW_PART.fullmatch(part) for part in row.value.split(" EOS ")]
            window = {int(part["turn"]): _part(part) for part in parts if part is not None}
            if None in parts:
                dropped.add(Reason.ANOTHER_LAYOUT, path, row.where)
                continue
        if windows and (window is None or max(window) <= max(windows[-1][1])):
            yield from _dialogues_of_windows(builder, windows)
            windows = []
        if row is not None and window is not None:
            windows.append((row.where, window))


def _part(part: re.Match[str]) -> RawUtterance:
    speaker = Speaker.SUPPORTER if part["who"] == "1" else Speaker.SEEKER
    return RawUtterance(speaker, part["text"], strategy=part["strategy"] or "")


def _dialogues_of_windows(
    builder: Builder, windows: list[tuple[int | str, dict[int, RawUtterance]]]
) -> Iterator[SourceDialogue]:
    whole = {turn: utterance for _, window in windows for turn, utterance in window.items()}
    source_id = opening_key(whole[turn].text for turn in sorted(whole))
    for where, window in windows:
        dialogue = builder.dialogue(
            where,
            id=f"esconv/windows/{builder.split or 'all'}/{where}",
            source_id=source_id,
            utterances=window.values(),
        )
        if dialogue is not None:
            yield dialogue
