"""Measures of a preference study: wins, ties and losses, their difference, strengths, and agreement.

All intervals resample cases, since the answers about one case are alike. Wins and losses come from the same cases,
so their difference is paired. It is computed as the points of a model (a tie is half a point) on the scale from -1 to 1,
which keeps an interval where every resample is alike. Strengths are the leaderboard's
(`compeer_core.votes.leaderboard`), with the order shown as its position term.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

import numpy as np

from compeer_core.annotation.agreement import measure_agreement
from compeer_core.stats import Estimate, Floats, bootstrap_weights, clustered_share
from compeer_core.taxonomy import Preference
from compeer_core.votes.leaderboard.board import Settings, Status, bradley_terry
from compeer_core.votes.rows import VoteRow
from training.common import results
from training.evaluation.ratings import Rating

WINS, TIES, NEITHER, LOSSES = "wins", "ties", "neither acceptable", "losses"
OUTCOMES = (WINS, TIES, NEITHER, LOSSES)
"""The four answers from the side of one model, in the order of a plot."""
STRENGTH = "Bradley-Terry strength"
_NO_TIME = datetime.fromtimestamp(0, UTC)

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
    """Yield the strength of each model, in points around 1000: a leaderboard whose voters are the cases.

    Nothing is yielded, and a warning logged, where too few cases compare, or where some models were never
    compared with others, not even through third ones.
    """
    votes = [
        VoteRow(
            battle_id=f"{each.key.item_id} {each.rater}",
            voter=each.key.case,
            left=each.shown[0],
            right=each.shown[1],
            preference=each.preference,
            blind=True,
            language="und",
            at=_NO_TIME,
        )
        for each in ratings
        if each.preference is not Preference.NEITHER
    ]
    board = bradley_terry(votes, settings=Settings(seed=seed, min_votes=1, min_raters=2))
    if board.status is not Status.RANKED:
        _log.warning("no Bradley-Terry strengths: too few answers compare the models")
        return
    for row in sorted(board.models, key=lambda row: row.model):
        assert row.score is not None
        points = row.score.model_copy(update={"n": board.raters})
        yield results.measured("points", points, of=row.model, about=STRENGTH)


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


def _measured(
    name: str, estimate: Estimate, cases: int, *, of: str, about: str, baseline: str = ""
) -> results.Metric:
    known = estimate.model_copy(update={"n": cases})
    return results.measured(name, known, unit="%", of=of, baseline=baseline, about=about)
