"""Measures of a preference study: wins, ties and losses, their difference, strengths, and agreement.

All intervals resample cases, since the answers about one case are alike. Wins and losses come from the same cases,
so their difference is paired. It is computed as the points of a model (a tie is half a point) on the scale from -1 to 1,
which keeps an interval where every resample is alike. Strengths are the leaderboard's
(`compeer_core.votes.leaderboard.rating`), with the order shown as its position term.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from compeer_core.annotation.agreement import measure_agreement
from compeer_core.stats import (
    Estimate,
    Floats,
    bootstrap_weights,
    clustered_share,
    expanded_interval,
)
from compeer_core.taxonomy import Preference
from compeer_core.votes.leaderboard.board import Settings
from compeer_core.votes.leaderboard.rating import (
    POINTS_PER_LOGIT,
    Matches,
    components,
    fit,
    resample,
)
from training.common import results
from training.evaluation.ratings import Rating

WINS, TIES, NEITHER, LOSSES = "wins", "ties", "neither acceptable", "losses"
OUTCOMES = (WINS, TIES, NEITHER, LOSSES)
"""The four answers from the side of one model, in the order of a plot."""
STRENGTH = "Bradley-Terry strength"
MEAN_STRENGTH = 1000.0

_log = logging.getLogger(__name__)


def pair_metrics(
    ratings: Sequence[Rating], pairs: Sequence[tuple[str, str]]
) -> Iterator[results.Metric]:
    """Yield the outcomes of each pair from the side of its first model, and the difference of the win rates.

    Args:
        ratings: The answers that count.
        pairs: The models; pairs without an answer are left out.
    """
    for first, second in pairs:
        of_pair = [each for each in ratings if {*each.shown} == {first, second}]
        if not of_pair:
            continue
        about = f"{first} against {second}"
        counts = outcome_counts(of_pair, first)
        cases = len(counts)
        trials = counts.sum(axis=1)
        weights = bootstrap_weights(range(cases))[1:]
        for column, name in enumerate(OUTCOMES):
            share = clustered_share(counts[:, column], trials, weights)
            assert share is not None
            yield _measured(name, share, cases, of=first, about=about)
        points = clustered_share(counts @ np.array([1.0, 0.5, 0.5, 0.0]), trials, weights)
        assert points is not None
        difference = points.mapped(lambda share: 2 * share - 1)
        yield _measured(WINS, difference, cases, of=first, baseline=second, about=about)


def outcome_counts(ratings: Sequence[Rating], model: str) -> Floats:
    """Return how many raters gave each of `OUTCOMES` to a model, shape (cases, 4)."""
    place = {
        case: number for number, case in enumerate(sorted({each.key.case for each in ratings}))
    }
    counts = np.zeros((len(place), len(OUTCOMES)))
    for each in ratings:
        if each.winner is None:
            outcome = TIES if each.preference is Preference.BOTH else NEITHER
        else:
            outcome = WINS if each.winner == model else LOSSES
        counts[place[each.key.case], OUTCOMES.index(outcome)] += 1
    return counts


def order_metrics(ratings: Sequence[Rating]) -> Iterator[results.Metric]:
    """Yield how often raters preferred the reply they saw first, among decided answers; 50 % is no effect."""
    decided = [each for each in ratings if each.winner is not None]
    if not decided:
        return
    cases, case = np.unique([each.key.case for each in decided], return_inverse=True)
    is_first = [float(each.winner == each.shown[0]) for each in decided]
    first = np.bincount(case, weights=is_first, minlength=len(cases)).astype(np.float64)
    trials = np.bincount(case, minlength=len(cases)).astype(np.float64)
    share = clustered_share(first, trials, bootstrap_weights(range(len(cases)))[1:])
    assert share is not None
    yield _measured(
        "preferred", share, len(cases), of="the reply shown first", about="order of the replies"
    )


def strength_metrics(ratings: Sequence[Rating], seed: int = 0) -> Iterator[results.Metric]:
    """Yield the strength of each model, in points around 1000 as on the leaderboard.

    Nothing is yielded, and a warning logged, where too few cases compare, or where some models were never
    compared with others, not even through third ones.
    """
    compared = [each for each in ratings if each.preference is not Preference.NEITHER]
    cases = sorted({each.key.case for each in compared})
    estimates = strengths(compared, cases, seed)
    if not estimates:
        _log.warning("no Bradley-Terry strengths: too few answers compare the models")
    for model, estimate in estimates.items():
        yield results.measured(
            "points",
            estimate.model_copy(update={"n": len(cases)}),
            of=model,
            about=STRENGTH,
        )


def strengths(
    compared: Sequence[Rating], cases: Sequence[str], seed: int = 0
) -> Mapping[str, Estimate]:
    """Return the strength of each model in points; empty where they cannot be estimated.

    Args:
        compared: The answers, without those that accept neither reply.
        cases: The cases of these answers, the unit of resampling.
        seed: Of the resamples.
    """
    models = sorted({model for each in compared for model in each.shown})
    index = {model: number for number, model in enumerate(models)}
    sides = sorted({each.shown for each in compared})
    left = np.array([index[side[0]] for side in sides], dtype=np.int64)
    right = np.array([index[side[1]] for side in sides], dtype=np.int64)
    edges = [(index[a], index[b]) for side in sides for a, b in (side, side[::-1])]
    if len(cases) < 2 or len({*components(len(models), edges).tolist()}) > 1:
        return {}
    votes = np.zeros((len(cases), len(sides)))
    points = np.zeros_like(votes)
    row = {case: number for number, case in enumerate(cases)}
    for each in compared:
        place = row[each.key.case], sides.index(each.shown)
        votes[place] += 1
        points[place] += 0.5 if each.winner is None else float(each.winner == each.shown[0])
    settings = Settings()
    drawn = resample(len(cases), len(models), settings.fits, seed)
    whole = Matches(len(models), left, right, votes.sum(axis=0)[None], points.sum(axis=0)[None])
    again = Matches(len(models), left, right, drawn.times @ votes, drawn.times @ points)
    sample = fit(whole, settings.ridge).strengths[0]
    prior = drawn.prior / np.sqrt(settings.ridge)
    draws = fit(again, settings.ridge, prior=prior).strengths
    return {
        model: expanded_interval(float(sample[number]), draws[:, number], len(cases)).mapped(
            _points
        )
        for number, model in enumerate(models)
    }


def agreement_metrics(
    answers: Sequence[Mapping[str, Preference]], pair: tuple[str, str], seed: int = 0
) -> Iterator[results.Metric]:
    """Yield how far two raters agree about the items of a pair, by three coefficients.

    Args:
        answers: For each item, that is for each case, the independent answers by rater.
        pair: The models.
        seed: Of the bootstrap.
    """
    measured = measure_agreement(answers, tuple(Preference), seed=seed)
    about, of = "agreement of two raters", f"{pair[0]} against {pair[1]}"
    coefficients = {"raw": measured.raw, "AC1": measured.ac1, "alpha": measured.alpha}
    for name, value in coefficients.items():
        if value is not None:
            estimate = value.model_copy(update={"n": measured.n_items})
            unit = "%" if name == "raw" else ""
            yield results.measured(name, estimate, unit=unit, of=of, about=about)


def _points(logits: float) -> float:
    return MEAN_STRENGTH + float(POINTS_PER_LOGIT) * logits


def _measured(
    name: str, estimate: Estimate, cases: int, *, of: str, about: str, baseline: str = ""
) -> results.Metric:
    known = estimate.model_copy(update={"n": cases})
    return results.measured(name, known, unit="%", of=of, baseline=baseline, about=about)
