"""Signs of strategies, contradictions between reasoning and reply, and what cannot be determined."""

import pytest

from compeer_core.consistency import Contradiction, Followed, Reason, carries_out, contradictions
from compeer_core.dialogue import Speaker, Utterance
from compeer_core.judgement import (
    NO_REFERENCE,
    Judgement,
    ReplyOutcome,
    ResponseVerdict,
    StepVerdict,
    Unscorable,
)
from compeer_core.reasoning import Reading, Unreadable, read
from compeer_core.taxonomy import Preference, Strategy
from tests.core.example import DIALOGUE, TEXT

HISTORY = (
    Utterance(Speaker.SEEKER, "My boss fired me on Monday and I am worried about my job."),
    Utterance(Speaker.SUPPORTER, "That is a shock."),
    Utterance(Speaker.SEEKER, "Yes."),
)


@pytest.mark.parametrize(
    ("strategy", "does", "does_not"),
    [
        ("Question", "Why is that?", "Tell me why."),
        ("Restatement or Paraphrasing", "So your boss let you go.", "It rains a lot."),
        ("Reflection of Feelings", "That sounds frightening.", "It rains."),
        ("Self-disclosure", "I lost my place once too.", "I understand, I am sorry."),
        ("Affirmation and Reassurance", "You are strong.", "It rains."),
        ("Providing Suggestions", "Maybe write a letter.", "It rains."),
        ("Information", "There are many offices that help for free.", "There are? Who knows?"),
        ("Others", "Hello and welcome.", "It rains."),
    ],
)
def test_signs_of_the_strategies(strategy, does, does_not):
    assert carries_out(HISTORY, does, strategy, "en") is Followed.YES
    assert carries_out(HISTORY, does_not, strategy, "en") is Followed.NO


def test_a_restatement_uses_recent_words_of_the_seeker_only():
    reply = "So your boss let you go."
    later = (*HISTORY, Utterance(Speaker.SUPPORTER, "Hm."), Utterance(Speaker.SEEKER, "It rains."))

    assert carries_out(HISTORY, "A shock for you.", Strategy.RESTATEMENT) is Followed.NO
    assert carries_out(HISTORY, "The boss again.", Strategy.RESTATEMENT) is Followed.NO  # no "you"
    assert carries_out(later, reply, Strategy.RESTATEMENT) is Followed.NO  # the turn before last


@pytest.mark.parametrize(
    ("reply", "strategy", "language"),
    [
        ("Why?", "Hugging", None),
        ("Why?", Unreadable("Questoin"), None),
        ("Why?", "Question", "zh"),
        ("后来怎么样了？", "Question", None),
        ("Pourquoi est-ce que tu es triste ?", "Question", None),
        ("123?", "Question", None),
    ],
)
def test_unknown_languages_and_strategies_give_no_answer(reply, strategy, language):
    assert carries_out(HISTORY, reply, strategy, language) is Followed.UNKNOWN


# --- contradictions ----------------------------------------------------------------------------

RIGHT, WRONG = StepVerdict(True, 0.9), StepVerdict(False, 0.1)


def turn(strategy: str, reply: str) -> Reading:
    return read(
        TEXT.replace("Strategy: Question", f"Strategy: {strategy}").replace(
            "What happened today?", reply
        )
    )


def reasons(reading: Reading, judgement: Judgement | None = None) -> list[Reason]:
    return [one.reason for one in contradictions(DIALOGUE, reading, judgement)]


@pytest.mark.parametrize(
    ("strategy", "reply", "expected"),
    [
        ("Question", "What happened today?", []),
        ("Question", "That sounds very hard for you.", [Reason.NO_SIGN]),
        ("Self-disclosure", "You could talk with your boss.", [Reason.NO_SIGN]),
        ("Self-disclosure", "When my father left, I could not sleep either.", []),
        ("Providing Suggestions", "And what did your boss say?", [Reason.ASKS_INSTEAD]),
        ("Providing Suggestions", "Maybe you could try to talk to your boss?", []),
        ("Providing Suggestions", "That sounds very hard for you.", []),
        # Signs of these are too weak to say anything:
        ("Affirmation and Reassurance", "Maybe you could try to talk to your boss.", []),
        ("Others", "What happened today?", []),
        # and here nothing can be told:
        ("Hug", "What happened today?", []),
        ("Question", "听起来你真的很难过。", []),
    ],
)
def test_a_reply_with_another_strategy_is_reported_for_clear_signs(
    strategy: str, reply: str, expected: list[Reason]
) -> None:
    assert reasons(turn(strategy, reply)) == expected


def test_a_contradiction_names_the_strategy() -> None:
    found = contradictions(DIALOGUE, turn("Question", "That sounds hard for you to bear."))

    assert found == (Contradiction(Reason.NO_SIGN, Strategy.QUESTION),)


@pytest.mark.parametrize("text", ["", TEXT.partition("<reply>")[0], "<reply>I am here.</reply>"])
def test_an_incomplete_turn_has_no_contradictions(text: str) -> None:
    assert reasons(read(text)) == []


def judged(*steps: object, reply: ReplyOutcome) -> Judgement:
    return Judgement(steps, reply, is_complete=True)  # type: ignore[arg-type]


def verdict(preference: Preference) -> ResponseVerdict:
    return ResponseVerdict(preference, dict.fromkeys(Preference, 0.25))


@pytest.mark.parametrize(
    ("judgement", "expected"),
    [
        (judged(RIGHT, RIGHT, RIGHT, reply=verdict(Preference.SECOND)), [Reason.GOOD_STEPS_BAD_REPLY]),
        (judged(RIGHT, RIGHT, RIGHT, reply=verdict(Preference.NEITHER)), [Reason.GOOD_STEPS_BAD_REPLY]),
        (judged(WRONG, WRONG, WRONG, reply=verdict(Preference.FIRST)), [Reason.BAD_STEPS_GOOD_REPLY]),
        (judged(WRONG, WRONG, WRONG, reply=verdict(Preference.BOTH)), [Reason.BAD_STEPS_GOOD_REPLY]),
        (judged(RIGHT, RIGHT, RIGHT, reply=verdict(Preference.BOTH)), []),
        (judged(WRONG, WRONG, RIGHT, reply=verdict(Preference.FIRST)), []),
        (judged(RIGHT, RIGHT, RIGHT, reply=NO_REFERENCE), []),
        (judged(RIGHT, RIGHT, Unscorable("x"), reply=verdict(Preference.SECOND)), []),
        (judged(WRONG, WRONG, Unscorable("x"), reply=verdict(Preference.FIRST)), []),
        (judged(RIGHT, RIGHT, RIGHT, reply=Unscorable("x")), []),
        (Judgement.of_incomplete(has_reference=True), []),
    ],
)  # fmt: skip
def test_the_judges_verdicts_contradict_only_if_all_steps_do(
    judgement: Judgement, expected: list[Reason]
) -> None:
    assert reasons(read(TEXT), judgement) == expected
