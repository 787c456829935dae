"""ESC-Eval's formats and numbers: dialogue and score files, rubrics, verdicts, per cents."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from compeer_core.config import FrozenModel
from compeer_core.prompts import fill
from compeer_core.row_files import replacing
from compeer_core.stats import Floats, bootstrap_weights, estimate, weighted_mean
from training.common import results

Language = Literal["en", "zh"]
Parser = Literal["strict", "official"]

ROUNDS = 5
SUPPORTER, SEEKER = "AI assistant：", "ESC-Role："
"""How lines of the official format begin."""
DIMENSIONS: Mapping[str, str] = {
    "fluency": "Fluency",
    "diversity": "Expression",
    "empathic": "Empathy",
    "suggestion": "Information",
    "human": "Humanoid",
    "tech": "Skillful",
    "overall": "Overall",
}
"""The official keys, and the names in COMPEER's Table 2."""
BEST = 4
"""The highest score; the lowest is 0."""
UNREADABLE = -1
AVERAGE, MEAN = "Average", "mean of judges"

Key = tuple[str, Language]
"""A model and a language."""
Line = Annotated[str, Field(pattern=f"^({SUPPORTER}|{SEEKER})")]
LINES = 1 + 2 * ROUNDS
Transcripts = dict[str, Annotated[list[Line], Field(min_length=LINES, max_length=LINES)]]
"""Dialogues in the official format, by the card's place in its file: a greeting and five rounds."""
Scores = dict[str, dict[str, Annotated[int, Field(ge=UNREADABLE, le=BEST)]]]
"""Scores by dialogue and dimension; `UNREADABLE` stands for a verdict that cannot be read."""

_ONLY_NUMBER = re.compile(r"[\s*_\"'(]*([0-4])[\s*_\"').]*")
_START = re.compile(f"^({SUPPORTER}|{SEEKER})")
_LABELS = {SUPPORTER: "**AI助手**：", SEEKER: "**用户**"}
"""What score.py writes instead of the names; ESC-RANK was trained on these."""


# --- verdicts ----------------------------------------------------------------------------------


class Rubrics(FrozenModel):
    """The rubrics of score.py, one of each list per dimension."""

    key_list: tuple[str, ...]
    dimension_list: tuple[str, ...]
    prompt_EN: tuple[str, ...]
    prompt_ZH: tuple[str, ...]

    @model_validator(mode="after")
    def _has_seven_dimensions(self) -> Self:
        lists = (self.dimension_list, self.prompt_EN, self.prompt_ZH)
        if self.key_list != tuple(DIMENSIONS) or {len(each) for each in lists} != {len(DIMENSIONS)}:
            raise ValueError(f"each list needs the dimensions {', '.join(DIMENSIONS)}, in order")
        return self

    def question(self, frame: str, dimension: str, language: Language, lines: Sequence[str]) -> str:
        """Return the question about a dialogue in the official format."""
        number = self.key_list.index(dimension)
        texts = self.prompt_EN if language == "en" else self.prompt_ZH
        dialogue = "\n\n".join(_START.sub(lambda start: _LABELS[start[1]], line) for line in lines)
        name = self.dimension_list[number]
        return fill(frame, rubric=texts[number].strip(), dialogue=dialogue, dimension=name)


def read_verdict(text: str, parser: Parser = "strict") -> int | None:
    """Return the score in a judge's answer; None if it cannot be read. See `esc_eval.Judge.parser`.

    Example:
        >>> [read_verdict(text) for text in ("3", "**4**.", "3 out of 4", "10")]
        [3, 4, None, None]
        >>> [read_verdict(text, "official") for text in ("3", "3 out of 4", "10", "good")]
        [3, 3, 0, None]
    """
    if parser == "official":
        return next((score for score in range(BEST + 1) if str(score) in text), None)
    match = _ONLY_NUMBER.fullmatch(text)
    return None if match is None else int(match[1])


# --- numbers -----------------------------------------------------------------------------------


def percentages(scores: Floats, weights: Floats) -> Floats:
    """Return the mean / 4 of each dimension, and last the mean of the seven.

    Args:
        scores: Shape (dialogues, 7), NaN where unreadable.
        weights: Resamples of dialogues, shape (rows, dialogues), see `bootstrap_weights`.

    Returns:
        Shape (rows, 8), in [0, 1].
    """
    means = [weighted_mean(weights, column) / BEST for column in scores.T]
    return np.column_stack([*means, np.mean(means, axis=0)])


def metrics(
    ratings: Mapping[str, Mapping[Key, Scores]],
    numbers: Mapping[Key, Sequence[str]],
    policies: Sequence[str] = (),
) -> Iterator[results.Metric]:
    """Yield per cents with CIs over dialogues, and counts of what is missing.

    Args:
        ratings: By judge. With several judges, their mean follows.
        numbers: The dialogues that should exist, by model and language.
        policies: Models with dialogues about the same cards: the first is compared with the others.
    """
    matrices = {
        key: {judge: _matrix(scores[key], numbers[key]) for judge, scores in ratings.items()}
        for key in numbers
    }
    for key, by_judge in matrices.items():
        model, language = key
        counts = _readable(by_judge)
        rated = len(next(iter(ratings.values()))[key])
        for judge, table in _tables(by_judge).items():
            about = f"{language}, {judge}"
            n = [*counts[judge], counts[judge].min()]
            for name, column, known in zip(
                [*DIMENSIONS.values(), AVERAGE], table.T, n, strict=True
            ):
                if known:
                    share = estimate(column, int(known))
                    yield results.measured(name, share, unit="%", of=model, about=about)
            if judge != MEAN and rated:
                verdicts = rated * len(DIMENSIONS)
                yield results.Metric(
                    name="unreadable verdicts",
                    value=verdicts - int(counts[judge].sum()),
                    n=verdicts,
                    of=model,
                    about=about,
                )
        yield results.Metric(
            name="failed dialogues",
            value=len(numbers[key]) - rated,
            n=len(numbers[key]),
            of=model,
            about=language,
        )
    for first, other in ((policies[0], other) for other in policies[1:]):
        for language in get_args(Language):
            if not {(first, language), (other, language)} <= numbers.keys():
                continue
            one, two = matrices[first, language], matrices[other, language]
            # adding 0 * x drops what is unknown in x
            firsts = {judge: one[judge] + 0 * two[judge] for judge in one}
            others = {judge: two[judge] + 0 * one[judge] for judge in one}
            counts = _readable(firsts)
            first_tables, other_tables = _tables(firsts), _tables(others)
            for judge in first_tables:
                difference = first_tables[judge][:, -1] - other_tables[judge][:, -1]
                if not np.isnan(difference[0]):
                    yield results.measured(
                        AVERAGE,
                        estimate(difference, int(counts[judge].min())),
                        unit="%",
                        of=first,
                        baseline=other,
                        about=f"{language}, {judge}",
                    )


def _matrix(scores: Scores, numbers: Sequence[str]) -> Floats:
    """Return scores as an array, shape (dialogues, 7), NaN where missing or unreadable."""
    values = [
        [scores.get(number, {}).get(key, UNREADABLE) for key in DIMENSIONS] for number in numbers
    ]
    matrix = np.array(values, dtype=np.float64)
    matrix[matrix == UNREADABLE] = np.nan
    return matrix


def _readable(by_judge: Mapping[str, Floats]) -> dict[str, NDArray[np.int64]]:
    """Return the readable verdicts on each dimension by judge, and the fewest of several judges, shape (7,)."""
    counts = {judge: (~np.isnan(matrix)).sum(axis=0) for judge, matrix in by_judge.items()}
    return counts | {MEAN: np.min([*counts.values()], axis=0)}


def _tables(by_judge: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return the percentages by judge, and of the mean of several judges."""
    dialogues = len(next(iter(by_judge.values())))
    weights = bootstrap_weights(range(dialogues))
    tables = {judge: percentages(matrix, weights) for judge, matrix in by_judge.items()}
    if len(tables) > 1:
        tables[MEAN] = np.mean([*tables.values()], axis=0)
    return tables


# --- files -------------------------------------------------------------------------------------


def name_of(path: Path) -> Key:
    """Return model and language of an official file name, `<model>_<language>.json`.

    Raises:
        ValueError: The name does not end with a language.
    """
    model, _, language = path.stem.rpartition("_")
    for known in get_args(Language):
        if language == known and model:
            return model, known
    raise ValueError(f"{path}: expected a name like llama3_en.json or llama3_zh.json")


def write_file(path: Path, value: object) -> None:
    """Write a file byte for byte as the official programs do."""
    with replacing(path) as file:
        file.write(json.dumps(value, ensure_ascii=False, indent=4))
