"""Judged turns for the first UnifiReward: right by the corpus, wrong by a rule.

No person judged these turns. A turn as the SFT set has it counts as right. Mistakes are put in by
three rules, each with its own draw, so that their labels are known:

- *history*: the step of a turn from a dialogue about another problem, or another stage (two
  turns after mere greetings have the same step whatever the problem, so they do not lend theirs
  to each other);
- *emotion*: the step of a turn with another emotion;
- *strategy*: the step of a turn with another strategy.

The reply is compared with a reference: the corpus's reply against one from another dialogue (the
corpus's is better), two from other dialogues (neither), or the corpus's reply against its own first
sentence (both). The two always differ; which of them comes first is drawn. `rule` in each record
tells what was done.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from compeer_core.errors import ConfigError
from compeer_core.reasoning import STEPS, HistoryStep, Part, SupportTurn, parse, render
from compeer_core.taxonomy import Emotion, Preference, Stage
from training.samples import JudgedTurn, Sample

PREFERENCE_SHARES = {
    Preference.FIRST: 0.35,
    Preference.SECOND: 0.35,
    Preference.BOTH: 0.1,
    Preference.NEITHER: 0.2,
}
"""How often each of the four answers is asked for; `both` only where a reply has two sentences."""

MAX_DRAWS = 10_000
"""Tries to find a sample that fits; nearly every corpus needs only a few."""


def judged_turns(
    samples: Sequence[Sample], *, false_share: float, seed: int
) -> Iterator[JudgedTurn]:
    """Yield one judged turn per sample.

    Args:
        samples: Turns of the SFT set.
        false_share: Probability, for each step, that a mistake is put in.
        seed: Draws mistakes, donors and pairs.

    Raises:
        ConfigError: The samples are too much alike to lend each other mistakes or replies.
    """
    rng = np.random.default_rng(seed)
    turns = [parse(sample.completion) for sample in samples]
    for index, sample in enumerate(samples):
        mistakes = [part for part in STEPS if rng.random() < false_share]
        turn = turns[index]
        for part in mistakes:
            turn = _with_mistake(part, turn, index, samples, turns, rng)
        first, second, preference = _pair(index, samples, turns, rng)
        yield JudgedTurn(
            sample=sample.model_copy(update={"completion": render(turn)}),
            step_labels=(
                Part.HISTORY not in mistakes,
                Part.EMOTION not in mistakes,
                Part.STRATEGY not in mistakes,
            ),
            first=first,
            second=second,
            preference=preference,
            rule="; ".join([*(part.value for part in mistakes), preference.value]),
        )


def _with_mistake(
    part: Part,
    turn: SupportTurn,
    index: int,
    samples: Sequence[Sample],
    turns: Sequence[SupportTurn],
    rng: np.random.Generator,
) -> SupportTurn:
    reasoning = turn.reasoning
    if part is Part.HISTORY and rng.random() < 0.5:
        stages = [stage for stage in Stage if stage != reasoning.history.stage]
        step = HistoryStep(reasoning.history.text, stages[int(rng.integers(len(stages)))])
        return replace(turn, reasoning=replace(reasoning, history=step))

    def is_wrong_here(donor: int) -> bool:
        other = turns[donor].reasoning
        match part:
            case Part.HISTORY:
                greetings = {other.emotion.emotion, reasoning.emotion.emotion} == {Emotion.NEUTRAL}
                return samples[donor].problem != samples[index].problem and not greetings
            case Part.EMOTION:
                return other.emotion.emotion != reasoning.emotion.emotion
            case _:
                return samples[donor].strategy != samples[index].strategy

    other = turns[_drawn(is_wrong_here, len(samples), rng)].reasoning
    match part:
        case Part.HISTORY:
            wrong = replace(reasoning, history=other.history)
        case Part.EMOTION:
            wrong = replace(reasoning, emotion=other.emotion)
        case _:
            wrong = replace(reasoning, strategy=other.strategy)
    return replace(turn, reasoning=wrong)


def _drawn(fits: Callable[[int], bool], count: int, rng: np.random.Generator) -> int:
    """Return a number below `count` that fits."""
    for _ in range(MAX_DRAWS):
        number = int(rng.integers(count))
        if fits(number):
            return number
    raise ConfigError(
        f"{count} samples are too much alike for a judge to learn from: in {MAX_DRAWS} draws none "
        "had another problem, emotion or strategy, or a reply of another dialogue"
    )


def _pair(
    index: int, samples: Sequence[Sample], turns: Sequence[SupportTurn], rng: np.random.Generator
) -> tuple[str, str, Preference]:
    own = turns[index].reply
    names = list(PREFERENCE_SHARES)
    wanted = names[int(rng.choice(len(names), p=list(PREFERENCE_SHARES.values())))]
    opening = own.split(". ")[0].strip()
    if wanted is Preference.BOTH and (opening == own or len(opening.split()) < 5):
        wanted = Preference.FIRST if rng.random() < 0.5 else Preference.SECOND

    def foreign(*unlike: str) -> str:
        def fits(donor: int) -> bool:
            is_foreign = samples[donor].dialogue_id != samples[index].dialogue_id
            return is_foreign and turns[donor].reply not in unlike

        return turns[_drawn(fits, len(samples), rng)].reply

    if wanted is Preference.FIRST:
        return own, foreign(own), wanted
    if wanted is Preference.SECOND:
        return foreign(own), own, wanted
    if wanted is Preference.NEITHER:
        first = foreign(own)
        return first, foreign(own, first), wanted
    shorter = opening + "."
    return (own, shorter, wanted) if rng.random() < 0.5 else (shorter, own, wanted)
