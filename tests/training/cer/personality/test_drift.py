import numpy as np
import pytest

from compeer_core.taxonomy import Strategy
from training.cer.personality.drift import (
    Reason,
    Rewriting,
    TfidfSimilarity,
    drifted,
    keeps_strategy,
    llm_artifact,
)


class Alike:
    def between(self, before, after):
        return np.ones(len(before))


def why(before, after, *strategies, language="en", exact=True, similarity=None):
    pair = Rewriting(before, after, strategies, language)
    return drifted([pair], similarity or Alike(), is_exact=exact)


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("I slept 3 hours.", "I slept three hours.", None),
        ("I slept 3 hours.", "I slept 4 hours.", Reason.NUMBERS),
        ("I don't sleep.", "I do not sleep.", None),
        ("I don't sleep.", "I sleep.", Reason.NEGATION),
        ("Do you sleep?", "You sleep.", Reason.QUESTION),
        ("I am sad.", " ", Reason.NOT_REWRITTEN),
        ("I am sad.", "I am sad, " + "so very much " * 5 + "sad.", Reason.LENGTH),
        ("I am sad.", "As an AI model, I am sad.", Reason.ARTIFACT),
        ("I am sad.", "I am sad.", None),
    ],
)
def test_each_rule_has_its_reason(before, after, reason):
    assert why(before, after) is reason


def test_a_generator_may_negate_twice_instead_of_once():
    before, after = "I don't sleep.", "I don't sleep, no."
    assert why(before, after) is Reason.NEGATION
    assert why(before, after, exact=False) is None
    assert why("I don't sleep.", "I lie awake.", exact=False) is Reason.NEGATION


def test_meaning_is_compared_in_long_utterances():
    texts = ["My boss shouted at me again this morning in the office", "I walk the dog every day"]
    unlike = "The weather may turn out nice for our little picnic"
    similarity = TfidfSimilarity([*texts, unlike])
    same = "This morning in the office my boss shouted at me once again"
    assert why(texts[0], same, similarity=similarity) is None
    assert why(texts[0], unlike, similarity=similarity) is Reason.MEANING
    assert why("My boss shouted", "Weather is nice", similarity=similarity) is None
    assert similarity.between([texts[0]], [texts[0]]) == pytest.approx([1.0])


def test_a_strategy_is_preserved_if_its_words_are():
    suggestion = Strategy.SUGGESTIONS
    assert keeps_strategy("You should rest.", "Maybe you could rest.", [suggestion])
    assert not keeps_strategy("You should rest.", "Rest is good.", [suggestion])
    assert keeps_strategy("Rest is good.", "Sleep is good.", [suggestion])  # none before either
    assert not keeps_strategy("I was sad too.", "Many were sad too.", [Strategy.SELF_DISCLOSURE])
    assert not keeps_strategy("你可以休息。", "休息很好。", [suggestion], "zh")
    assert why("I was sad too.", "Many were sad too.", Strategy.SELF_DISCLOSURE) is Reason.STRATEGY


@pytest.mark.parametrize(
    ("before", "after", "language", "result"),
    [
        ("a", "Sure, here is it: a", "en", True),
        ("Sure, I can.", "Sure, I can do that.", "en", False),
        ("a", "- a\n- b", "en", True),
        ("- a", "- b", "en", False),
        ("a", '"a"', "en", True),
        ('"a"', '"b"', "en", False),
        ("a", "**a**", "en", True),
        ("It's important to remember that.", "It is important to remember that.", "en", False),
        ("我很累", "以下是改写：我很疲惫", "zh", True),
        ("我很累", "我好累", "zh", False),
    ],
)
def test_llm_artifacts_count_if_they_are_new(before, after, language, result):
    assert (llm_artifact(before, after, language) is not None) == result
