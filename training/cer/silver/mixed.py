"""Recombine steps that a model wrote for other histories into turns, and label them by the rule.

A judge has to learn which step fits which history, so it needs many histories with right and wrong
steps. A small model provides few: it is wrong too often, and its right steps occur together. Here
every history of the train split gets steps from any of the model's turns of that split, drawn so that
all eight patterns of right and wrong are equally frequent, and labelled by the same rule. So neither
the style nor another step reveals a label.

Such turns are incoherent, and a wrong step of this kind is easier to detect than one written for the
history itself. Use them for training only; evaluate a judge on turns as the model wrote them.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import Field

from compeer_core.cer import Case, CerRecord
from compeer_core.config import FrozenModel
from compeer_core.reasoning import (
    EmotionStep,
    HistoryStep,
    Reasoning,
    StrategyStep,
    SupportTurn,
    read,
    render,
)
from compeer_core.row_files import write_rows
from training.cer.records import StepReport
from training.cer.requests.engines import LOCAL, Engine
from training.cer.requests.seeding import generator_for
from training.cer.silver.dataset import Settings, judge, to_record
from training.cer.silver.steps import (
    Habits,
    Verdict,
    count_habits,
    judge_emotion,
    judge_history,
    judge_strategy,
)
from training.cer.silver.words import LANGUAGE, Context, Words, words
from training.cer.steps.generation import GeneratedTurn
from training.common.progress import track
from training.data.records import read_records

AUTHOR = "mixed"
"""Follows the model's name in the author of such a turn."""
SPLIT = "train"

Step = TypeVar("Step", HistoryStep, EmotionStep, StrategyStep)


class Mixing(FrozenModel):
    """How many turns are recombined."""

    rows_per_case: int = Field(default=2, ge=1)
    """Turns for each history."""
    tries: int = Field(default=60, ge=1)
    """The most steps drawn until one has the target label; then the turn is abandoned."""


@dataclass(frozen=True)
class Steps:
    """The steps of all turns that a model wrote."""

    author: str
    histories: tuple[HistoryStep, ...]
    emotions: tuple[EmotionStep, ...]
    endings: tuple[tuple[StrategyStep, str], ...]
    """Strategies with their replies."""


def take_apart(turns: Iterable[GeneratedTurn]) -> Steps | None:
    """Return the steps of the complete turns of the train split; None if there are none."""
    histories, emotions, endings = [], [], []
    authors: set[str] = set()
    for generated in turns:
        if generated.case.split != SPLIT or generated.case.language != LANGUAGE:
            continue
        reading = read(generated.text)
        if not reading.is_complete:
            continue
        turn = reading.turn
        authors.add(generated.author)
        histories.append(turn.reasoning.history)
        emotions.append(turn.reasoning.emotion)
        endings.append((turn.reasoning.strategy, turn.reply))
    if not histories:
        return None
    author = " and ".join(sorted(authors))
    return Steps(author, tuple(histories), tuple(emotions), tuple(endings))


def mixed_turn(
    case: Case,
    wanted: tuple[bool, bool, bool],
    steps: Steps,
    habits: Habits,
    settings: Settings,
    tries: int,
    lists: Words,
    rng: np.random.Generator,
) -> SupportTurn | None:
    """Recombine a turn whose three steps have the target labels.

    Args:
        case: The history and its human labels.
        wanted: Which steps are to be right.
        steps: The steps to draw from, independently.
        habits: Habit counts for the rule.
        settings: Settings of the rule.
        tries: See `Mixing.tries`.
        lists: Word lists.
        rng: Draws the steps.

    Returns:
        The turn, or None if no drawn step had the target label.
    """
    context = Context(case, lists)
    rule = settings.steps

    def drawn(
        bank: tuple[Step, ...], verdict: Callable[[Step], Verdict], right: bool
    ) -> Step | None:
        for _ in range(tries):
            step = bank[rng.integers(len(bank))]
            if verdict(step).right is right:
                return step
        return None

    history = drawn(
        steps.histories, lambda step: judge_history(step, case, context, rule, lists), wanted[0]
    )
    if history is None:
        return None
    emotion = drawn(
        steps.emotions,
        lambda step: judge_emotion(step, case, context, wanted[0], rule, lists),
        wanted[1],
    )
    if emotion is None:
        return None
    for _ in range(tries):
        strategy, reply = steps.endings[rng.integers(len(steps.endings))]
        verdict = judge_strategy(strategy, case, context, habits, wanted[:2], rule)
        if verdict.right is wanted[2]:
            return SupportTurn(Reasoning(history, emotion, strategy), reply)
    return None


def mix(
    cases: Path,
    turns: Path,
    output: Path,
    settings: Settings,
    mixing: Mixing,
    seed: int = 0,
    *,
    engine: Engine = LOCAL,
) -> StepReport:
    """Write recombined turns for the cases of the train split.

    Args:
        cases: `Case` rows.
        turns: `GeneratedTurn` rows that provide the steps.
        output: Receives `CerRecord` rows, atomically.
        settings: Settings of the rule.
        mixing: The number of turns.
        seed: Draws patterns and steps.
        engine: Recombines and judges the turns.

    Raises:
        ConfigError: A file is missing or has another format.
    """
    dropped: defaultdict[str, Counter[str]] = defaultdict(Counter)
    patterns: Counter[str] = Counter()
    read_count = 0
    steps = take_apart(read_records(turns, GeneratedTurn))
    habits = count_habits(read_records(cases, Case), words())

    def records() -> Iterator[CerRecord]:
        nonlocal read_count
        if steps is None:
            return
        work = _Mixer(steps, habits, settings, mixing, seed)
        own = (case for case in read_records(cases, Case) if _can_be_judged(case))
        for each in track(engine.map(work, own), "mixed", unit="turns"):
            read_count += 1
            if isinstance(each, str):
                dropped[each]["no step with the target label"] += 1
                continue
            patterns[_name(each)] += 1
            yield each

    written = write_rows(output, records())
    return StepReport(
        step="mixed",
        read=read_count,
        written=written,
        dropped={corpus: dict(reasons) for corpus, reasons in sorted(dropped.items())},
        figures={f"pattern.{name}": count for name, count in sorted(patterns.items())},
    )


@dataclass(frozen=True)
class _Mixer:
    """Recombines the turns of each case."""

    steps: Steps
    habits: Habits
    settings: Settings
    mixing: Mixing
    seed: int

    def __call__(self, cases: Iterator[Case]) -> Iterator[CerRecord | str]:
        lists = words()
        for case in cases:
            for number in range(self.mixing.rows_per_case):
                yield self._row(case, number, lists) or case.corpus

    def _row(self, case: Case, number: int, lists: Words) -> CerRecord | None:
        rng = generator_for(self.seed, "mixed", f"{case.id}/{number}")
        first, second, third = (bool(side) for side in rng.integers(2, size=3))
        wanted = (first, second, third)
        turn = mixed_turn(
            case, wanted, self.steps, self.habits, self.settings, self.mixing.tries, lists, rng
        )
        if turn is None:
            return None
        verdict = judge(turn, case, self.habits, self.settings, lists)
        author = f"{self.steps.author}, {AUTHOR}"
        generated = GeneratedTurn(
            id=f"{case.id}/{AUTHOR}/{number}",
            case=case,
            author=author,
            sample=number,
            seed=self.seed,
            text=render(turn),
            reply=turn.reply,
        )
        return to_record(generated, turn, verdict, self.settings, self.seed)


def _can_be_judged(case: Case) -> bool:
    """Whether the case has the human labels that the rule needs."""
    labels = case.labels
    return (
        case.split == SPLIT
        and case.language == LANGUAGE
        and labels.emotion is not None
        and bool(labels.strategies)
        and labels.problem is not None
    )


def _name(record: CerRecord) -> str:
    (steps,) = (each.steps for each in record.candidates if each.steps is not None)
    return "".join("T" if right else "F" for right in steps)
