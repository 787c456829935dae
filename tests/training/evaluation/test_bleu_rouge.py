"""BLEU and ROUGE-L: by hand, and properties that hold for any texts."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compeer_core.stats import weighted_mean
from training.evaluation.bleu_rouge import overlap, rouge_l


def test_bleu_of_two_replies_by_hand():
    result = overlap(["I am so sorry.", "hello you"], ["I am sorry.", "Hello to you"])

    once = np.ones((1, 2))
    # unigrams: 4 of 5 and 2 of 2; bigrams: 2 of 4 ("i am", "sorry .") and 0 of 1; lengths 7 and 7
    assert result.bleu(once, 2) == pytest.approx([math.sqrt(6 / 7 * 2 / 5)])
    # the first only: longer than its reference, so no brevity penalty
    assert result.bleu(np.array([[1.0, 0.0]]), 2) == pytest.approx([math.sqrt(4 / 5 * 2 / 4)])
    # weights 2 and 1: sums of matches and n-grams; lengths 12 and 11
    assert result.bleu(np.array([[2.0, 1.0]]), 2) == pytest.approx([math.sqrt(10 / 12 * 4 / 9)])


def test_short_reply_has_a_brevity_penalty():
    result = overlap(["I hear you"], ["I hear you and I am here"])

    # all n-grams match, 3 words against 7: exp(1 - 7/3)
    assert result.bleu(np.ones((1, 1)), 2) == pytest.approx([math.exp(1 - 7 / 3)])


def test_rouge_l_by_hand():
    # the longest common subsequence of "so are you ok" and "are you really ok" is "are you ok"
    precision, recall = 3 / 4, 3 / 4
    assert rouge_l("So are you ok", "are you really ok") == pytest.approx(0.75)
    # P = 2/4, R = 2/2, beta = 1.2: 2.44 * 0.5 / (1 + 1.44 * 0.5)
    assert rouge_l("I am so sad", "I sad") == pytest.approx(2.44 * 0.5 / (1 + 1.44 * 0.5))
    assert rouge_l("", "I am sad") == rouge_l("sad", "happy") == 0.0
    assert precision == recall


def test_rejects_unequal_numbers_of_texts():
    with pytest.raises(ValueError, match="1 replies and 2 references"):
        overlap(["a"], ["a", "b"])
    with pytest.raises(ValueError, match="0 replies"):
        overlap([], [])


TEXTS = st.lists(
    st.tuples(
        st.text(alphabet="ab .,!", max_size=20), st.text(alphabet="ab .,!", min_size=1, max_size=20)
    ),
    min_size=1,
    max_size=5,
)


@given(TEXTS)
def test_scores_are_in_0_to_1_and_1_for_equal_texts(pairs):
    replies, references = zip(*pairs, strict=True)
    weights = np.ones((1, len(pairs)))

    result = overlap(replies, references)
    assert -1e-9 <= result.bleu(weights, 4)[0] <= 1 + 1e-9
    assert -1e-9 <= weighted_mean(weights, result.rouge_l)[0] <= 1 + 1e-9

    same = overlap(references, references)
    has_words = [bool(text.strip()) for text in references]
    assert weighted_mean(weights, same.rouge_l)[0] == pytest.approx(np.mean(has_words))
