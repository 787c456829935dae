"""Turns put together from steps that a model wrote for other histories, judged by the silver rule.

A judge has to learn which step fits which history, so it needs many histories with right steps and
wrong ones beside them. A small model gives few: it is wrong too often, and its right steps come
together. Here every history of the train split gets steps from anywhere in the model's own turns of
that split, drawn so that all eight patterns of right and wrong come equally often; the same rule says
what they are. So no manner of writing and no step tells what another one is.

Such turns do not hang together, and a wrong step of this kind is further off than a wrong step that
was written for the history itself. They are for training only; what a judge is measured on are turns
as the model wrote them.
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
from training.cer.silver.words import LANGUAGE, Heard, Words, words
from training.cer.steps.generation import GeneratedTurn
from training.common.progress import track
from training.data.samples import read_records, write_records

AUTHOR = "mixed"
"""Ends the author of such a turn, behind the model's name."""
SPLIT = "train"

Step = TypeVar("Step", HistoryStep, EmotionStep, StrategyStep)


class Mixing(FrozenModel):
    """How many turns are put together."""

    rows_per_case: int = Field(default=2, ge=1)
    """So many for each history."""
    tries: int = Field(default=60, ge=1)
    """So many steps are drawn until one is right, or wrong, as was drawn before; then the turn is
    given up."""


@dataclass(frozen=True)
class Steps:
    """All that a model wrote, taken apart."""

    author: str
    histories: tuple[HistoryStep, ...]
    emotions: tuple[EmotionStep, ...]
    endings: tuple[tuple[StrategyStep, str], ...]
    """The strategy and the reply that carries it out, or should."""


def take_apart(turns: Iterable[GeneratedTurn]) -> Steps | None:
    """Return the steps of the complete turns of the train split; None where there are none."""
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
    """Put a turn together whose three steps are right or wrong as wanted.

    Args:
        case: The history, and what people labelled.
        wanted: Which steps shall be right.
        steps: To draw from, each step by itself.
        habits: What people do, for the rule.
        settings: Of the rule.
        tries: See `Mixing.tries`.
        lists: Word lists.
        rng: Draws the steps.

    Returns:
        The turn, or None where no drawn step was as wanted.
    """
    heard = Heard(case, lists)
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
        steps.histories, lambda step: judge_history(step, case, heard, rule, lists), wanted[0]
    )
    if history is None:
        return None
    emotion = drawn(
        steps.emotions,
        lambda step: judge_emotion(step, case, heard, wanted[0], rule, lists),
        wanted[1],
    )
    if emotion is None:
        return None
    for _ in range(tries):
        strategy, reply = steps.endings[rng.integers(len(steps.endings))]
        found = judge_strategy(strategy, case, heard, habits, wanted[:2], rule)
        if found.right is wanted[2]:
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
    """Write mixed turns for the cases of the train split.

    Args:
        cases: `Case` rows.
        turns: `GeneratedTurn` rows, whose steps are drawn from.
        output: Receives `CerRecord` rows, whole or not at all.
        settings: Of the rule.
        mixing: How many.
        seed: Draws patterns and steps.
        engine: Where turns are put together and judged.

    Raises:
        ConfigError: A file is missing or holds something else.
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
                dropped[each]["no step as wanted"] += 1
                continue
            patterns[_name(each)] += 1
            yield each

    written = write_records(output, records())
    return StepReport(
        step="mixed",
        read=read_count,
        written=written,
        dropped={corpus: dict(reasons) for corpus, reasons in sorted(dropped.items())},
        figures={f"pattern.{name}": count for name, count in sorted(patterns.items())},
    )


@dataclass(frozen=True)
class _Mixer:
    """Puts the turns of each case together."""

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
        found = judge(turn, case, self.habits, self.settings, lists)
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
        return to_record(generated, turn, found, self.settings, self.seed)


def _can_be_judged(case: Case) -> bool:
    """Whether people labelled what the rule asks for."""
    labels = case.labels
    return (
        case.split == SPLIT
        and case.language == LANGUAGE
        and labels.emotion is not None
        and bool(labels.strategies)
        and labels.problem is not None
    )


def _name(record: CerRecord) -> str:
    (steps,) = (one.steps for one in record.candidates if one.steps is not None)
    return "".join("T" if right else "F" for right in steps)
