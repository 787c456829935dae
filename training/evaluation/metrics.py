"""Classification measures of judges with confidence intervals, and perplexity.

Every measure takes rows of weights (`compeer_core.stats.bootstrap_weights`), so that all resamples of the
bootstrap are computed at once.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from compeer_core.stats import Estimate, Floats, bootstrap_weights, cohen_kappa, estimate, ratio

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def perplexity(losses: Sequence[float], tokens: Sequence[int]) -> Estimate:
    """Return exp of the mean loss per token, with the interval over documents.

    Args:
        losses: Summed negative log-likelihood of each document, in nats.
        tokens: Tokens of each document.

    Example:
        >>> round(perplexity([2.0, 4.0], [1, 2]).value, 3)  # exp(6 / 3)
        7.389
    """
    weights = bootstrap_weights(range(len(losses)))
    mean = ratio(weights @ np.asarray(losses, float), weights @ np.asarray(tokens, float))
    return estimate(np.exp(mean), len(losses))


def reward_model_report(
    correct: Sequence[bool],
    probability_correct: Sequence[float],
    groups: Sequence[str] | None = None,
) -> dict[str, Estimate]:
    """Return measures of verdicts on one step: those of COMPEER's Table 1, and further ones.

    A judge that always says True reaches a high weighted F1 if few steps are wrong. So the report
    includes that value, and measures on which such a judge fails: balanced accuracy (0.5), Matthews
    correlation (0) and AUROC (0.5).

    Args:
        correct: The labels.
        probability_correct: The judge's probability of True, in [0, 1]; the verdict is True if
            it exceeds 0.5.
        groups: The group of each row, such as its source dialogue. The bootstrap resamples whole
            groups, since rows of a group are correlated. None makes each row its own group.

    Raises:
        ValueError: Lengths differ, or all labels are the same.
    """
    label = _labels(correct)
    weights = bootstrap_weights(groups if groups is not None else range(len(label)))
    truth = label.astype(int)
    always_true = confusion(weights, truth, np.ones_like(truth), 2)
    measures = _of_verdicts(weights, label, probability_correct)
    measures["weighted_f1_always_true"] = weighted_f1(always_true)
    return _defined(measures, len(label))


def reward_model_difference(
    correct: Sequence[bool],
    probability_correct: Sequence[float],
    other: Sequence[float],
    groups: Sequence[str] | None = None,
) -> dict[str, Estimate]:
    """Return the paired differences between two judges' measures on the same steps.

    Args:
        correct: The labels.
        probability_correct: The judge's probability of True, in [0, 1].
        other: The other judge's.
        groups: As in `reward_model_report`; both judges are measured on the same resamples.

    Raises:
        ValueError: Lengths differ, or all labels are the same.
    """
    label = _labels(correct)
    weights = bootstrap_weights(groups if groups is not None else range(len(label)))
    first, second = (_of_verdicts(weights, label, given) for given in (probability_correct, other))
    return _defined({name: first[name] - second[name] for name in first}, len(label))


def _labels(correct: Sequence[bool]) -> Bools:
    label = np.asarray(correct, dtype=bool)
    if label.all() or not label.any():
        raise ValueError("all labels are the same, so the judge cannot be measured")
    return label


def _of_verdicts(
    weights: Floats, label: Bools, probability_correct: Sequence[float]
) -> dict[str, Floats]:
    """Return the measures of a judge under each row of weights."""
    probability = np.asarray(probability_correct, dtype=float)
    if label.shape != probability.shape:
        raise ValueError(f"{len(label)} labels but {len(probability)} probabilities")
    # Class 0 is False, so that its recall is the first.
    table = confusion(weights, label.astype(int), (probability > 0.5).astype(int), 2)
    return {
        "weighted_f1": weighted_f1(table),
        "recall_false": recalls(table)[:, 0],
        "balanced_accuracy": balanced_accuracy(table),
        "mcc": matthews_correlation(table),
        "auroc": auroc(weights, label, probability),
    }


def preference_report(
    labels: Sequence[str],
    verdicts: Sequence[str],
    groups: Sequence[str] | None = None,
) -> dict[str, Estimate]:
    """Return measures of verdicts on the reply, each with the majority class's.

    Args:
        labels: The preferences of people or of a rule.
        verdicts: The judge's.
        groups: As in `reward_model_report`.

    Returns:
        The measures that are defined: kappa is undefined if all labels and verdicts are the same.

    Raises:
        ValueError: Lengths differ, or there are no labels.
    """
    if len(labels) != len(verdicts) or not labels:
        raise ValueError(f"{len(labels)} labels and {len(verdicts)} verdicts")
    names = sorted({*labels, *verdicts})
    number = {name: place for place, name in enumerate(names)}
    truth = np.array([number[label] for label in labels])
    verdict = np.array([number[given] for given in verdicts])
    weights = bootstrap_weights(groups if groups is not None else range(len(labels)))
    table = confusion(weights, truth, verdict, len(names))
    always_majority = np.full_like(truth, np.bincount(truth).argmax())
    majority = confusion(weights, truth, always_majority, len(names))
    measures = {
        "accuracy": accuracy(table),
        "accuracy_majority": accuracy(majority),
        "weighted_f1": weighted_f1(table),
        "weighted_f1_majority": weighted_f1(majority),
        "balanced_accuracy": balanced_accuracy(table),
        "kappa": cohen_kappa(table),
    }
    return _defined(measures, len(labels))


# --- measures under rows of weights --------------------------------------------------------------


def _defined(measures: Mapping[str, Floats], n: int) -> dict[str, Estimate]:
    """Return the estimates of the measures that are defined for the sample."""
    return {
        name: estimate(values, n)
        for name, values in measures.items()
        if not np.isnan(values[0]) and not np.isnan(values[1:]).all()
    }


def confusion(weights: Floats, truth: Ints, verdict: Ints, classes: int) -> Floats:
    """Return weighted counts, shape (rows of weights, true class, given class)."""
    cells = np.zeros((len(truth), classes * classes))
    cells[np.arange(len(truth)), truth * classes + verdict] = 1.0
    result: Floats = (weights @ cells).reshape(-1, classes, classes)
    return result


def accuracy(table: Floats) -> Floats:
    return ratio(np.trace(table, axis1=1, axis2=2), table.sum(axis=(1, 2)))


def recalls(table: Floats) -> Floats:
    """Return the share of each true class that was predicted correctly, NaN for an absent class."""
    return ratio(np.diagonal(table, axis1=1, axis2=2), table.sum(axis=2))


def balanced_accuracy(table: Floats) -> Floats:
    """Return the mean recall over the classes of the whole sample; NaN if a resample lacks a class."""
    is_there = table[0].sum(axis=1) > 0
    result: Floats = recalls(table)[:, is_there].mean(axis=1)
    return result


def weighted_f1(table: Floats) -> Floats:
    """Return F1 of each class, weighted by the frequency of the class."""
    true = table.sum(axis=2)
    return ratio((_f1(table) * true).sum(axis=1), true.sum(axis=1))


def macro_f1(table: Floats) -> Floats:
    """Return the mean F1 of the classes that occur. A class that is only predicted has no F1 of its own."""
    occurs = table.sum(axis=2) > 0
    return ratio((_f1(table) * occurs).sum(axis=1), occurs.sum(axis=1))


def _f1(table: Floats) -> Floats:
    hit = np.diagonal(table, axis1=1, axis2=2)
    return np.nan_to_num(ratio(2 * hit, table.sum(axis=2) + table.sum(axis=1)))


def matthews_correlation(table: Floats) -> Floats:
    """Return the Matthews correlation for two or more classes; 0 for a constant judge.

    Gorodkin, 2004, https://doi.org/10.1016/j.compbiolchem.2004.09.006
    """
    true, given, total = table.sum(axis=2), table.sum(axis=1), table.sum(axis=(1, 2))
    hits = np.trace(table, axis1=1, axis2=2)
    covariance = hits * total - (true * given).sum(axis=1)
    spread = (total**2 - (given**2).sum(axis=1)) * (total**2 - (true**2).sum(axis=1))
    return np.nan_to_num(ratio(covariance, np.sqrt(np.maximum(spread, 0.0))))


def auroc(weights: Floats, label: Bools, score: Floats) -> Floats:
    """Return how often a true example scores higher than a false one; ties count half."""
    order = np.argsort(score, kind="stable")
    starts = np.unique(score[order], return_index=True)[1]
    ordered = weights[:, order]
    positive = np.add.reduceat(ordered * label[order], starts, axis=1)
    negative = np.add.reduceat(ordered * ~label[order], starts, axis=1)
    below = np.cumsum(negative, axis=1) - negative
    won = (positive * (below + negative / 2)).sum(axis=1)
    return ratio(won, positive.sum(axis=1) * negative.sum(axis=1))
