"""How different texts are: by hand, then what must hold whatever they are."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compeer_core.ngrams import words_of
from training.common.diversity import distinct, distinct_without, fewest_runs, vendi_score


def test_distinct_by_hand():
    # words: that is hard / that is sad -> 4 different of 6; pairs: 3 of 4
    texts = ["That is hard.", "that is SAD!"]

    assert distinct(texts, 1) == pytest.approx(4 / 6)
    assert distinct(texts, 2) == pytest.approx(3 / 4)
    assert distinct(texts, 4) is None
    assert distinct([], 1) is None


def test_chinese_is_counted_by_letters():
    assert words_of("我在这里, ok?") == ["我", "在", "这", "里", "ok"]
    assert distinct(["我在", "我在"], 2) == 0.5


def test_the_vendi_score_by_hand():
    # cosine 0.6: eigenvalues of [[1, .6], [.6, 1]] / 2 are 0.8 and 0.2;
    # entropy -(0.8 ln 0.8 + 0.2 ln 0.2) = 0.500402; exp of it 1.649384
    assert vendi_score([[1.0, 0.0], [0.6, 0.8]]) == pytest.approx(1.649384, abs=1e-6)


def test_an_empty_text_is_like_no_other():
    assert vendi_score([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]) == pytest.approx(
        # eigenvalues 2/3 and 1/3
        np.exp(-(2 / 3) * np.log(2 / 3) - (1 / 3) * np.log(1 / 3))
    )
    with pytest.raises(ValueError, match="no embeddings"):
        vendi_score(np.zeros((0, 3)))


@given(st.integers(1, 8), st.integers(0, 2**31))
def test_the_vendi_score_lies_between_one_and_the_number_of_texts(count, seed):
    vectors = np.random.default_rng(seed).normal(size=(count, 5))

    assert 1 - 1e-9 <= vendi_score(vectors) <= count + 1e-9
    assert vendi_score(np.tile(vectors[:1], (count, 1))) == pytest.approx(1.0)
    assert vendi_score(np.eye(count)) == pytest.approx(count)


@given(st.lists(st.text(max_size=30), max_size=6), st.integers(1, 3))
def test_distinct_is_a_share(texts, length):
    found = distinct(texts, length)

    assert found is None or 0 < found <= 1
    repeated = distinct([*texts, *texts], length)
    assert (repeated is None) == (found is None)
    if found is not None and repeated is not None:
        assert repeated == pytest.approx(found / 2)


def test_distinct_without_each_group_by_hand():
    texts, groups = ["so sad", "so sad", "so glad"], ["a", "b", "a"]

    # all: so sad so sad so glad -> 3 of 6 words; without a: so sad; without b: so sad so glad
    assert distinct_without(texts, groups, 1) == pytest.approx([3 / 6, 2 / 2, 3 / 4])
    assert distinct_without(["so sad", "I"], ["a", "b"], 2) == [1.0, 0.0, 1.0]


@given(
    st.lists(st.tuples(st.text("ab ", max_size=9), st.sampled_from("xyz")), max_size=8),
    st.integers(1, 3),
)
def test_leaving_a_group_out_is_counting_without_its_texts(pairs, length):
    texts, groups = [text for text, _ in pairs], [group for _, group in pairs]

    assert distinct_without(texts, groups, length) == pytest.approx(
        [
            distinct([text for text, group in pairs if group != left_out], length) or 0.0
            for left_out in (None, *dict.fromkeys(groups))
        ]
    )


def test_distinct_of_an_equal_amount_by_hand():
    texts, groups = ["so so", "sad", "i", "so"], ["a", "a", "b", "b"]

    # so 3, sad, i; of 2 of 5: P(no so) = 1/10, P(no sad) = P(no i) = 6/10
    # without a: i, so: both of 2. Without b: so 2, sad; of 2 of 3: (1 - 0) + (1 - 1/3)
    assert distinct_without(texts, groups, 1, 2) == pytest.approx(
        [(0.9 + 0.4 + 0.4) / 2, 1.0, (1 + 2 / 3) / 2]
    )
    assert fewest_runs(texts, groups, 1) == 2
    with pytest.raises(ValueError, match="3 n-grams cannot be drawn from 2"):
        distinct_without(texts, groups, 1, 3)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=10))
def test_distinct_of_an_equal_amount_is_the_average_of_all_draws(words):
    amount = max(1, len(words) // 2)
    draws = [len({*draw}) / amount for draw in combinations(words, amount)]

    expected = distinct_without([*words, "d"], [*("a" for _ in words), "b"], 1, 1)
    assert expected == pytest.approx([1.0, 1.0, 1.0])
    of_half = distinct_without([" ".join(words)] * 2, ["a", "b"], 1, amount)[1]
    assert of_half == pytest.approx(np.mean(draws))
    every = distinct_without([" ".join(words)] * 2, ["a", "b"], 1, len(words))[1]
    assert every == pytest.approx(distinct([" ".join(words)], 1))
