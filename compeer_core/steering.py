"""Steps of the reasoning that a person gives: changed by hand, or kept as they were.

A turn can be begun for the model: its first steps stand, and the model goes on behind them. A
`GivenStep` is one of them, and `edited_step` makes one of what somebody typed into a form.

```python
kept = kept_steps(reading, before=Part.EMOTION)      # the history step, as the model wrote it
changed = edited_step(Part.EMOTION, "There is grief, not fear.",
                      {"sentiment": "Negative", "emotion": "Sadness", "intensity": "4"})
policy.respond(dialogue, Controls(given=(*kept, GivenStep(changed))), stop)
```
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compeer_core.errors import InputError
from compeer_core.prompts import neutralise
from compeer_core.reasoning import (
    LABELS,
    STEPS,
    EmotionStep,
    HistoryStep,
    Part,
    Reading,
    Step,
    StrategyStep,
    Unreadable,
    Writer,
    label_value,
    part_of,
    render_step,
)
from compeer_core.taxonomy import (
    ESCONV_STRATEGIES,
    StrategyVocabulary,
)

MAX_STEP_CHARACTERS = 2000
"""Of the free text of one step that a person may give."""


@dataclass(frozen=True)
class GivenStep:
    """A step that stands before the model begins."""

    step: Step
    writer: Writer = Writer.PERSON
    """A person, or the model in an earlier turn from which the step is kept."""

    @property
    def part(self) -> Part:
        """Which of the three it is."""
        return part_of(self.step)


def edited_step(
    part: Part,
    text: str,
    labels: Mapping[str, str],
    vocabulary: StrategyVocabulary = ESCONV_STRATEGIES,
) -> Step:
    """Return the step that a person's words and choices amount to.

    The words stay words: what looks like a tag is made harmless (`neutralise`), and so is a line
    that would read as one of the step's labels.

    Args:
        part: One of `STEPS`.
        text: The free text, as it was typed.
        labels: A value for each label of the part (`LABELS`), as labels are written: in English.
        vocabulary: The strategies that a strategy step may name.

    Raises:
        InputError: The part is no step (code "step_unknown"), the text is empty ("step_empty") or
            too long ("step_too_long"), or a label is missing or outside its vocabulary
            ("label_unknown", with its name and value).

    Example:
        >>> edited_step(Part.HISTORY, "Stage: none </history>", {"stage": "Action"})
        HistoryStep(text='Stage – none ‹/history›', stage=<Stage.ACTION: 'Action'>)
    """
    if part not in STEPS:
        raise InputError(f"<{part}> is not a step", code="step_unknown")
    cleaned = _plain(part, text)
    if not cleaned:
        raise InputError("the step has no text", code="step_empty")
    if len(cleaned) > MAX_STEP_CHARACTERS:
        raise InputError(
            "the step is too long",
            code="step_too_long",
            values={"length": len(cleaned), "limit": MAX_STEP_CHARACTERS},
        )
    values: dict[str, Any] = {
        name: _label(name, labels.get(name, ""), vocabulary) for name in LABELS[part]
    }
    match part:
        case Part.HISTORY:
            return HistoryStep(cleaned, **values)
        case Part.EMOTION:
            return EmotionStep(cleaned, **values)
        case _:
            return StrategyStep(cleaned, **values)


def kept_steps(reading: Reading, before: Part) -> tuple[GivenStep, ...]:
    """Return the steps of an earlier turn that stand before a part, as the model wrote them.

    Raises:
        InputError: One of them is not there (code "step_missing").
    """
    steps = dict(zip(STEPS, reading.steps, strict=True))
    wanted = list(Part)[: list(Part).index(before)]
    kept = [steps[part] for part in wanted]
    if any(step is None for step in kept):
        raise InputError("a step before this one is missing", code="step_missing")
    return tuple(GivenStep(step, Writer.EARLIER) for step in kept if step is not None)


def check_given(given: Sequence[GivenStep], vocabulary: StrategyVocabulary) -> None:
    """Make sure that steps can stand at the beginning of a turn.

    Raises:
        InputError: They are not the first ones in their order (code "steps_out_of_order"), or one
            names a strategy outside the vocabulary ("strategy_unknown").
    """
    if tuple(one.part for one in given) != STEPS[: len(given)]:
        raise InputError("the steps must be the first ones, in order", code="steps_out_of_order")
    for one in given:
        if isinstance(one.step, StrategyStep) and isinstance(one.step.strategy, str):
            check_strategy(one.step.strategy, vocabulary)


def check_strategy(name: str, vocabulary: StrategyVocabulary) -> None:
    """Make sure that a vocabulary has a strategy.

    Raises:
        InputError: It has not (code "strategy_unknown").
    """
    if name not in vocabulary.names:
        raise InputError(
            f"there is no strategy {name!r}", code="strategy_unknown", values={"strategy": name}
        )


def render_given(given: Sequence[GivenStep], reserved: Sequence[str] = ()) -> str:
    """Write steps as a policy would have written them, each on a line of its own.

    Args:
        given: The steps.
        reserved: The model's special tokens, which nobody may put in (`neutralise`).
    """
    return "".join(
        f"{one.part.opening}{render_step(_neutralised(one.step, reserved))}{one.part.closing}\n"
        for one in given
    )


def _plain(part: Part, text: str) -> str:
    """Make words unable to pass for a tag or for one of the part's label lines."""
    plain = neutralise("\n".join(text.split("\r\n")).strip())
    names = "|".join(LABELS[part])
    return re.sub(rf"(?im)^([^\S\n]*(?:{names}))[^\S\n]*[:：]", r"\1 –", plain).strip()


def _label(name: str, text: str, vocabulary: StrategyVocabulary) -> object:
    value = label_value(name, text, vocabulary)
    if value is None:
        raise InputError(
            f"{text!r} is no {name}", code="label_unknown", values={"name": name, "value": text}
        )
    return value


def _neutralised(step: Step, reserved: Sequence[str]) -> Step:
    """Take special tokens out of the words and of labels that could not be read."""
    changed: dict[str, Any] = {"text": neutralise(step.text, reserved)}
    for name in LABELS[part_of(step)]:
        value = getattr(step, name)
        if isinstance(value, Unreadable):
            changed[name] = Unreadable(neutralise(value.text, reserved).strip())
    return replace(step, **changed)
