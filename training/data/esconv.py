"""ESConv as the SFT and reward stages read it (Liu et al. 2021, https://arxiv.org/abs/2106.01144).

One JSON object per line, speakers `usr` (seeker) and `sys` (supporter), a strategy on every
supporter utterance. Neighbouring utterances of one speaker (21 % of them) are joined, because a
page shows them as one turn.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.errors import ConfigError
from compeer_core.taxonomy import Emotion, Strategy, map_emotion, map_strategy


@dataclass(frozen=True)
class AnnotatedDialogue:
    """A dialogue with the labels that ESConv's workers and survey gave it."""

    dialogue: Dialogue
    """Merged turns; `id` is `esconv/<split>/<line>`."""
    strategies: tuple[Strategy | None, ...]
    """One entry per turn; None for the seeker. A joined turn has the strategy of its longest part."""
    every_strategy: tuple[tuple[Strategy, ...], ...]
    """For each turn all strategies of its parts, in order, without repetition; the seeker has none."""
    emotion: Emotion
    problem: str
    """ESConv's problem type, lower case."""
    initial_intensity: int
    """The seeker's rating before the talk, 1 to 5."""
    final_intensity: int
    """The rating after it, 1 to 5; the initial one where the survey was not filled in."""


def read_esconv(path: Path, split: str) -> Iterator[AnnotatedDialogue]:
    """Yield the dialogues of one split.

    Raises:
        ConfigError: The file is missing, or a line is not in ESConv's layout.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file (ESConv's {split} split, JSON lines)")
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file):
            if not line.strip():
                continue
            try:
                yield _annotated(json.loads(line), f"esconv/{split}/{number}")
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{path}, line {number + 1}: not an ESConv dialogue ({error!r})"
                ) from error


def _annotated(row: dict[str, Any], identifier: str) -> AnnotatedDialogue:
    turns: list[list[dict[str, str]]] = []
    for entry in row["dialog"]:
        if entry["speaker"] not in {"usr", "sys"}:
            raise ValueError(f"unknown speaker {entry['speaker']!r}")
        if not entry["text"].strip():
            continue
        if turns and turns[-1][0]["speaker"] == entry["speaker"]:
            turns[-1].append(entry)
        else:
            turns.append([entry])
    emotion = map_emotion("esconv", row["emotion_type"])
    if emotion is None:
        raise ValueError(f"unknown emotion_type {row['emotion_type']!r}")
    survey = row["survey_score"]["seeker"]
    initial = int(survey["initial_emotion_intensity"])
    return AnnotatedDialogue(
        dialogue=Dialogue(tuple(_utterance(turn) for turn in turns), id=identifier),
        strategies=tuple(_strategy(turn) for turn in turns),
        every_strategy=tuple(_every_strategy(turn) for turn in turns),
        emotion=emotion,
        problem=row["problem_type"].strip().lower(),
        initial_intensity=initial,
        final_intensity=int(survey.get("final_emotion_intensity") or initial),
    )


def _utterance(turn: list[dict[str, str]]) -> Utterance:
    speaker = Speaker.SEEKER if turn[0]["speaker"] == "usr" else Speaker.SUPPORTER
    return Utterance(speaker, "\n".join(entry["text"].strip() for entry in turn))


def _strategy(turn: list[dict[str, str]]) -> Strategy | None:
    if turn[0]["speaker"] == "usr":
        return None
    return _strategy_of(max(turn, key=lambda entry: len(entry["text"])))


def _every_strategy(turn: list[dict[str, str]]) -> tuple[Strategy, ...]:
    if turn[0]["speaker"] == "usr":
        return ()
    return tuple(dict.fromkeys(map(_strategy_of, turn)))


def _strategy_of(entry: dict[str, str]) -> Strategy:
    strategy = map_strategy("esconv", entry["strategy"])
    if strategy is None:
        raise ValueError(f"unknown strategy {entry['strategy']!r}")
    return strategy
