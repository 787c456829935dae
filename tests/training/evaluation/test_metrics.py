"""Numbers and their intervals: by hand, against scikit-learn, and what must always hold."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics

from compeer_core.stats import cohen_kappa
from training.evaluation.metrics import (
    auroc,
    balanced_accuracy,
    confusion,
    macro_f1,
    matthews_correlation,
    perplexity,
    preference_report,
    recalls,
    reward_model_difference,
    reward_model_report,
    weighted_f1,
)


def test_a_step_report_by_hand():
    # Labels T T T F F, verdicts T T F F T (probabilities 0.9 0.8 0.3 0.2 0.7).
    # True: precision 2/3, recall 2/3, F1 2/3. False: precision 1/2, recall 1/2, F1 1/2.
    # Weighted F1 = (3 * 2/3 + 2 * 1/2) / 5 = 0.6. Always True: F1 of True 2*3/(5+3) = 0.75, so 0.45.
    # MCC = (2*1 - 1*1) / sqrt(3 * 3 * 2 * 2) = 1/6. Balanced accuracy (2/3 + 1/2) / 2 = 7/12.
    # AUROC: pairs (0.9, 0.8, 0.3) x (0.2, 0.7): 0.9 wins 2, 0.8 wins 2, 0.3 wins 1: 5/6.
    report = reward_model_report([True, True, True, False, False], [0.9, 0.8, 0.3, 0.2, 0.7])

    assert report["weighted_f1"].value == pytest.approx(0.6)
    assert report["weighted_f1_always_true"].value == pytest.approx(0.45)
    assert report["recall_false"].value == pytest.approx(0.5)
    assert report["balanced_accuracy"].value == pytest.approx(7 / 12)
    assert report["mcc"].value == pytest.approx(1 / 6)
    assert report["auroc"].value == pytest.approx(5 / 6)
    assert {estimate.n for estimate in report.values()} == {5}


def test_a_difference_of_two_judges_by_hand_and_in_pairs():
    label = [True, True, True, False, False] * 8
    one, other = [0.9, 0.8, 0.3, 0.2, 0.7] * 8, [0.9, 0.3, 0.2, 0.4, 0.7] * 8

    found = reward_model_difference(label, one, other)

    # 7/12 against (1/3 + 1/2) / 2; AUROC 5/6 against: 0.9 wins 2, 0.3 none, 0.2 none: 2/6
    assert found["balanced_accuracy"].value == pytest.approx(7 / 12 - 5 / 12)
    assert found["auroc"].value == pytest.approx(5 / 6 - 2 / 6)
    assert found["recall_false"].value == found["recall_false"].high == 0  # the same verdicts there
    apart = reward_model_report(label, one)["balanced_accuracy"]
    width = found["balanced_accuracy"].high - found["balanced_accuracy"].low
    assert 0 < width < apart.high - apart.low  # what both get wrong does not count
    same = reward_model_difference(label, one, one)
    assert all(each.value == each.low == each.high == 0 for each in same.values())
    with pytest.raises(ValueError, match="40 labels but 39"):
        reward_model_difference(label, one, other[:-1])


def test_always_true_at_the_papers_share_has_the_papers_weighted_f1():
    # 17.8 % False: F1 of True = 2 * 0.822 / 1.822 = 0.9023, times 0.822 = 0.7417 (its Table 1: 74.18)
    label = [True] * 822 + [False] * 178
    report = reward_model_report(label, [0.9] * 1000)

    assert report["weighted_f1"].value == pytest.approx(0.7417, abs=1e-4)
    assert report["weighted_f1"] == report["weighted_f1_always_true"]
    assert report["recall_false"].value == 0
    assert report["balanced_accuracy"].value == 0.5
    assert report["mcc"].value == 0
    assert report["auroc"].value == 0.5


def test_a_preference_report_by_hand():
    # first first second both; verdicts first second second first.
    # accuracy 2/4; majority class (first) 2/4. F1: first 2*1/(2+2) = 0.5, second 2*1/(1+2) = 2/3, both 0.
    # Weighted (2 * 0.5 + 2/3 + 0) / 4 = 5/12; of always first: 2*2/(2+4) * 2 / 4 = 1/3.
    # kappa: chance (2*2 + 1*2 + 1*0) / 16 = 3/8; (1/2 - 3/8) / (5/8) = 0.2
    report = preference_report(
        ["first", "first", "second", "both"], ["first", "second", "second", "first"]
    )

    assert report["accuracy"].value == report["accuracy_majority"].value == 0.5
    assert report["weighted_f1"].value == pytest.approx(5 / 12)
    assert report["weighted_f1_majority"].value == pytest.approx(1 / 3)
    assert report["kappa"].value == pytest.approx(0.2)
    assert report["balanced_accuracy"].value == pytest.approx((1 / 2 + 1 + 0) / 3)


rows = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 5)),
    min_size=2,
    max_size=30,
)


# scikit-learn warns of a single class, which is a case to be tested here
@pytest.mark.filterwarnings("ignore::UserWarning:sklearn")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
@given(rows)
@settings(max_examples=60)
def test_every_measure_is_that_of_scikit_learn_on_each_resample(rows):
    truth, verdict, times = (np.array(column) for column in zip(*rows, strict=True))
    weights = np.vstack([np.ones(len(rows)), times]).astype(float)
    table = confusion(weights, truth, verdict, 3)
    for row, weight in enumerate(weights):
        if not weight.sum():
            continue
        t, v = np.repeat(truth, weight.astype(int)), np.repeat(verdict, weight.astype(int))
        expected = sklearn_metrics.f1_score(t, v, average="weighted", zero_division=0)
        assert weighted_f1(table)[row] == pytest.approx(expected)
        expected = sklearn_metrics.f1_score(
            t, v, average="macro", labels=np.unique(t), zero_division=0
        )
        assert macro_f1(table)[row] == pytest.approx(expected)
        assert matthews_correlation(table)[row] == pytest.approx(
            sklearn_metrics.matthews_corrcoef(t, v)
        )
        if len(set(t) | set(v)) > 1:
            assert cohen_kappa(table)[row] == pytest.approx(sklearn_metrics.cohen_kappa_score(t, v))
        for name in set(t.tolist()):
            found = sklearn_metrics.recall_score(t, v, labels=[name], average=None)[0]
            assert recalls(table)[row, name] == pytest.approx(found)
        if row == 0:
            found = np.mean(sklearn_metrics.recall_score(t, v, labels=sorted(set(t)), average=None))
            assert balanced_accuracy(table)[0] == pytest.approx(found)


@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from([0.1, 0.2, 0.5, 0.7, 0.9]), st.integers(0, 3)),
        min_size=2,
        max_size=40,
    )
)
def test_auroc_counts_ties_half_on_each_resample(rows):
    label, score, times = (np.array(column) for column in zip(*rows, strict=True))
    weights = np.vstack([np.ones(len(rows)), times]).astype(float)
    found = auroc(weights, label, score)
    for row, weight in enumerate(weights):
        drawn = np.repeat(np.arange(len(rows)), weight.astype(int))
        if len(set(label[drawn].tolist())) == 2:
            expected = sklearn_metrics.roc_auc_score(label[drawn], score[drawn])
            assert found[row] == pytest.approx(expected)
        else:
            assert math.isnan(found[row])


def test_rows_of_one_dialogue_widen_the_interval():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(30), 20)
    # A judge that is right in whole dialogues or not at all.
    label = rng.random(600) < 0.7
    right = np.repeat(rng.random(30) < 0.6, 20)
    probability = np.where(right == label, 0.9, 0.1)

    alone = reward_model_report(label.tolist(), probability.tolist())["balanced_accuracy"]
    grouped = reward_model_report(
        label.tolist(), probability.tolist(), [str(group) for group in groups]
    )["balanced_accuracy"]

    assert grouped.value == alone.value
    assert grouped.high - grouped.low > 2 * (alone.high - alone.low)


@pytest.mark.parametrize(
    ("labels", "probabilities"), [([True, True], [0.5, 0.5]), ([True, False], [0.5])]
)
def test_labels_of_a_single_class_are_rejected(labels, probabilities):
    with pytest.raises(ValueError, match=r"the same|labels but"):
        reward_model_report(labels, probabilities)


def test_a_perplexity_by_hand():
    assert perplexity([2.0, 4.0], [1, 2]).value == pytest.approx(math.exp(2))


def test_a_measure_that_is_not_defined_is_left_out():
    # All labels and all verdicts are alike: kappa would be 0 / 0.
    report = preference_report(["first"] * 3, ["first"] * 3)

    assert "kappa" not in report
    assert report["accuracy"].value == 1
