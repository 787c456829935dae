"""Reasoning steps that are given to the model: edited by a person, or reused unchanged.

A turn can begin with given steps; the model continues after them. `edited_step` makes a step from
the fields of a form.

```python
history = kept_steps(reading, before=Part.EMOTION)   # the history step, as the model wrote it
changed = edited_step(Part.EMOTION, "There is grief, not fear.",
                      {"sentiment": "Negative", "emotion": "Sadness", "intensity": "4"})
policy.respond(dialogue, Controls(given=(*history, GivenStep(changed))), stop)
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
"""Limit of a given step's free text."""


@dataclass(frozen=True)
class GivenStep:
    """A step that precedes the model's own."""

    step: Step
    writer: Writer = Writer.PERSON
    """A person, or the model in an earlier turn whose step is reused."""

    @property
    def part(self) -> Part:
        """Its part."""
        return part_of(self.step)


def edited_step(
    part: Part,
    text: str,
    labels: Mapping[str, str],
    vocabulary: StrategyVocabulary = ESCONV_STRATEGIES,
) -> Step:
    """Return the step from a person's text and choices.

    Tags in the text are neutralised (`neutralise`), and so are lines that would read as labels.

    Args:
        part: One of `STEPS`.
        text: The free text, as typed.
        labels: A value for each label of the part (`LABELS`), in English.
        vocabulary: The strategies that a strategy step may name.

    Raises:
        InputError: The part is not a step (code "step_unknown"), the text is empty ("step_empty") or
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
    """Return the steps of an earlier turn before a part, unchanged.

    Raises:
        InputError: One of them is missing (code "step_missing").
    """
    steps = dict(zip(STEPS, reading.steps, strict=True))
    wanted = list(Part)[: list(Part).index(before)]
    earlier = [steps[part] for part in wanted]
    if any(step is None for step in earlier):
        raise InputError("a step before this one is missing", code="step_missing")
    return tuple(GivenStep(step, Writer.EARLIER) for step in earlier if step is not None)


def check_given(given: Sequence[GivenStep], vocabulary: StrategyVocabulary) -> None:
    """Check that steps can begin a turn.

    Raises:
        InputError: They are not the first steps in order (code "steps_out_of_order"), or one names
            a strategy outside the vocabulary ("strategy_unknown").
    """
    if tuple(each.part for each in given) != STEPS[: len(given)]:
        raise InputError("the steps must be the first ones, in order", code="steps_out_of_order")
    for each in given:
        if isinstance(each.step, StrategyStep) and isinstance(each.step.strategy, str):
            check_strategy(each.step.strategy, vocabulary)


def check_strategy(name: str, vocabulary: StrategyVocabulary) -> None:
    """Check that a vocabulary contains a strategy.

    Raises:
        InputError: It does not (code "strategy_unknown").
    """
    if name not in vocabulary.names:
        raise InputError(
            f"there is no strategy {name!r}", code="strategy_unknown", values={"strategy": name}
        )


def render_given(given: Sequence[GivenStep], reserved: Sequence[str] = ()) -> str:
    """Return steps in the grammar of a policy, each on its own line.

    Args:
        given: The steps.
        reserved: The model's special tokens, which are neutralised (`neutralise`).
    """
    return "".join(
        f"{each.part.opening}{render_step(_neutralised(each.step, reserved))}{each.part.closing}\n"
        for each in given
    )


def _plain(part: Part, text: str) -> str:
    """Neutralise tags and label lines of the part in a text."""
    plain = neutralise("\n".join(text.split("\r\n")).strip())
    names = "|".join(LABELS[part])
    return re.sub(rf"(?im)^([^\S\n]*(?:{names}))[^\S\n]*[:：]", r"\1 –", plain).strip()


def _label(name: str, text: str, vocabulary: StrategyVocabulary) -> object:
    value = label_value(name, text, vocabulary)
    if value is None:
        raise InputError(
            f"{text!r} is not a valid {name}",
            code="label_unknown",
            values={"name": name, "value": text},
        )
    return value


def _neutralised(step: Step, reserved: Sequence[str]) -> Step:
    """Neutralise special tokens in the text and in unreadable labels."""
    changed: dict[str, Any] = {"text": neutralise(step.text, reserved)}
    for name in LABELS[part_of(step)]:
        value = getattr(step, name)
        if isinstance(value, Unreadable):
            changed[name] = Unreadable(neutralise(value.text, reserved).strip())
    return replace(step, **changed)
