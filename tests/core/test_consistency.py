"""The outward signs of strategies: what a reply shows, and what cannot be told."""

import pytest

from compeer_core.consistency import Followed, carries_out
from compeer_core.dialogue import Speaker, Utterance
from compeer_core.reasoning import Unreadable
from compeer_core.taxonomy import Strategy

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
def test_outer_signs_of_the_strategies(strategy, does, does_not):
    assert carries_out(HISTORY, does, strategy, "en") is Followed.YES
    assert carries_out(HISTORY, does_not, strategy, "en") is Followed.NO


def test_a_restatement_takes_up_the_seekers_words_not_the_supporters_or_old_ones():
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
def test_what_cannot_be_told(reply, strategy, language):
    assert carries_out(HISTORY, reply, strategy, language) is Followed.UNKNOWN
