"""Where the reasoning of a turn and its reply contradict each other.

Two things can be told, and each says on what it rests.

**By outer signs** (`compeer_core.consistency`): the reply does not do what the turn names. This is said of
three strategies only, those of `CLEAR_SIGNS`: Question without a question mark, Self-disclosure that says
nothing of oneself, and Providing Suggestions that asks instead. Measured on the turns of ESConv's
train split to which people gave one strategy, how often it is said of the strategy that they gave (a
false alarm) and of another one, drawn at random (a contradiction that was made):

| strategy              |    n | false alarms | found  |
|-----------------------|-----:|-------------:|-------:|
| Question              | 1666 |        7.0 % | 76.8 % |
| Self-disclosure       |  749 |       11.2 % | 74.7 % |
| Providing Suggestions | 1399 |        5.6 % | 24.4 % |

For the five others no such rule was found that tells the two apart: advice in a turn that names
Affirmation and Reassurance, for one, is as frequent (9.1 %) where people named it as where not (9.4 %).

**By the judge**, where it compared the reply with another one: all steps are right and the reply is
rejected, or no step is right and the reply is accepted.

Both can be wrong, so a screen that shows them says which of the two it is and why.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from compeer_core.consistency import CLEAR_SIGNS, Followed, Said, carries_out
from compeer_core.judgement import Judgement, ResponseVerdict, StepVerdict
from compeer_core.reasoning import Reading, Unreadable
from compeer_core.taxonomy import Strategy


class Reason(StrEnum):
    """What contradicts what."""

    NO_SIGN = "no_sign"
    """The reply has no sign of the strategy that the turn names."""
    ASKS_INSTEAD = "asks_instead"
    """The turn names Providing Suggestions; the reply suggests and tells nothing, but asks."""
    GOOD_STEPS_BAD_REPLY = "good_steps_bad_reply"
    """The judge found all steps right and the reply worse than the other one."""
    BAD_STEPS_GOOD_REPLY = "bad_steps_good_reply"
    """The judge found all steps wrong and the reply as good as the other one, or better."""


@dataclass(frozen=True)
class Contradiction:
    """One contradiction between reasoning and reply."""

    reason: Reason
    named: Strategy | None = None
    """The strategy that the turn names, where the reason is about it."""


def contradictions(
    history: Iterable[Said],
    reading: Reading,
    judgement: Judgement | None = None,
    language: str | None = None,
) -> tuple[Contradiction, ...]:
    r"""Return what of a turn contradicts itself; nothing where it cannot be told.

    Args:
        history: What was said before, with runs of one speaker joined (`Dialogue.merged`).
        reading: The turn.
        judgement: What the judge says of it, if there is a judge.
        language: Of the reply, ISO 639-1; None guesses it.

    Example:
        >>> from compeer_core.reasoning import read
        >>> turn = read("<strategy>Ask.\nStrategy: Question</strategy><reply>I see.</reply>")
        >>> [str(one.reason) for one in contradictions([], turn, language="en")]
        ['no_sign']
    """
    by_signs = _by_signs(list(history), reading, language)
    by_judge = None if judgement is None else _by_judge(judgement)
    return tuple(one for one in (by_signs, by_judge) if one is not None)


def _by_signs(history: list[Said], reading: Reading, language: str | None) -> Contradiction | None:
    if reading.strategy is None or isinstance(reading.strategy.strategy, Unreadable):
        return None
    reply, name = reading.reply, reading.strategy.strategy
    if not reply or name not in CLEAR_SIGNS:
        return None

    def found(strategy: Strategy) -> Followed:
        return carries_out(history, reply, strategy, language)

    named = Strategy(name)
    if found(named) is not Followed.NO:
        return None
    if named is not Strategy.SUGGESTIONS:
        return Contradiction(Reason.NO_SIGN, named)
    asks = found(Strategy.QUESTION) is Followed.YES
    tells = found(Strategy.INFORMATION) is Followed.YES
    return Contradiction(Reason.ASKS_INSTEAD, named) if asks and not tells else None


def _by_judge(judgement: Judgement) -> Contradiction | None:
    steps, response = judgement.steps, judgement.response
    if not steps or not isinstance(response, ResponseVerdict):
        return None
    right = [isinstance(step, StepVerdict) and step.correct for step in steps]
    wrong = [isinstance(step, StepVerdict) and not step.correct for step in steps]
    if all(right) and not response.at_least_as_good:
        return Contradiction(Reason.GOOD_STEPS_BAD_REPLY)
    if all(wrong) and response.at_least_as_good:
        return Contradiction(Reason.BAD_STEPS_GOOD_REPLY)
    return None
