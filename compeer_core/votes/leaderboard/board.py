"""The board: which model people prefer, with what confidence, and whether the judge agrees.

    board = bradley_terry(store.votes(as_of=now), as_of=now)

Scores are Bradley-Terry strengths with a ridge, ties as half votes and a position term (see
`compeer_core.votes.leaderboard.rating`), in points of the Elo scale around 1000. Every interval resamples
raters, not votes. Where there are too few votes or raters to rank, the board says what is missing
(`Status`) and has no scores.

A board does not depend on the order of the votes. It carries the hash of the votes that it counted, the
seed and the version of the code, and the same three reproduce it byte for byte.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from importlib import metadata, resources
from itertools import combinations
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compeer_core.config import FrozenModel
from compeer_core.row_files import UtcDatetime
from compeer_core.stats import (
    FEW_CLUSTERS,
    Estimate,
    Floats,
    clustered_share,
    cohen_kappa,
    expanded_interval,
    gwet_ac1,
)
from compeer_core.taxonomy import Preference
from compeer_core.votes.leaderboard.rating import (
    POINTS_PER_LOGIT,
    Fit,
    Integers,
    Matches,
    Resamples,
    components,
    fit,
    rank_intervals,
    ranks,
    resample,
)
from compeer_core.votes.rows import VoteRow

Booleans = NDArray[np.bool_]

ALL_FLAGS = "*"
"""In `Filters.admit`: count votes regardless of their flags."""

_MEAN_SCORE = 1000
_MOST_LEFT_OUT = 2000
_PREFERENCES = tuple(Preference)
_FIRST, _SECOND, _BOTH, _NEITHER = range(4)
_SOURCES = (
    "row_files.py",
    "stats.py",
    "votes/rows.py",
    "votes/leaderboard/board.py",
    "votes/leaderboard/plot.py",
    "votes/leaderboard/rating.py",
    "votes/leaderboard/text.py",
)
"""Modules that decide the bytes of a board, below the package."""


# --- Options -------------------------------------------------------------------------------------


class Filters(FrozenModel):
    """Which votes are counted. An empty tuple and None mean no restriction."""

    kind: Literal["blind", "named", "any"] = "blind"
    """People who see model names vote for names, so only blind votes count by default."""
    languages: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    has_image: bool | None = None
    with_reasoning: bool | None = None
    admit: tuple[str, ...] = ()
    """Flags that do not exclude a vote; `ALL_FLAGS` for all of them."""

    def refusal(self, vote: VoteRow) -> str | None:
        """Return why a vote is left out, as a field of `LeftOut`; None if it is counted."""
        if vote.left == vote.right:
            return "same_model"
        if self.kind != "any" and vote.blind != (self.kind == "blind"):
            return "other_kind"
        names = ((self.languages, vote.language), (self.topics, vote.topic))
        if any(allowed and name not in allowed for allowed, name in names):
            return "filtered"
        flags = ((self.has_image, vote.has_image), (self.with_reasoning, vote.with_reasoning))
        if any(required is not None and required != flag for required, flag in flags):
            return "filtered"
        if ALL_FLAGS not in self.admit and not set(vote.flags) <= set(self.admit):
            return "flagged"
        return None


class Settings(FrozenModel):
    """How a board is computed."""

    seed: int = Field(default=0, ge=0)
    """Of the resamples."""
    fits: int = Field(default=300, ge=50, le=20_000)
    """Number of resamples."""
    ridge: float = Field(default=0.25, gt=0, allow_inf_nan=False)
    """One over the prior variance of a strength, in logits: 0.25 is a standard deviation of 2. It
    shrinks the difference of two models that met 20 times by about 2 %."""
    min_votes: int = Field(default=20, ge=1)
    """Fewest comparing votes, ties included, for a ranking."""
    min_raters: int = Field(default=FEW_CLUSTERS, ge=1)
    """Fewest people with such a vote for a ranking: intervals come from how people differ, so with one
    person scores have none."""


# --- Records -------------------------------------------------------------------------------------


class Status(StrEnum):
    """Whether models are ranked, or why not."""

    RANKED = "ranked"
    NOT_ENOUGH_VOTES = "not_enough_votes"
    NOT_ENOUGH_RATERS = "not_enough_raters"
    DISCONNECTED = "disconnected"
    """Some models were never compared with some others, not even through third ones."""


class LeftOut(FrozenModel):
    """How many votes are not counted, each under the first reason that applies."""

    superseded: int = 0
    """The same person voted again on the same battle; only the later vote counts."""
    same_model: int = 0
    """Both replies were written by the same model."""
    other_kind: int = 0
    """Not of the requested `Filters.kind`."""
    filtered: int = 0
    """Excluded by another field of `Filters`."""
    flagged: int = 0
    """Doubtful; see `Board.flags`."""


class ModelRow(FrozenModel):
    """The votes on one model."""

    model: str
    rank: int | None = None
    """Equally strong models share one. None if nothing is ranked, or if every vote on this model was
    that neither reply is acceptable, so that it was compared with no other."""
    rank_low: int | None = None
    """The best rank within the 95 % CI."""
    rank_high: int | None = None
    """The worst rank within the 95 % CI."""
    score: Estimate | None = None
    """In points around 1000, the mean of the ranked models. A model with 100 points more is preferred
    in 64 % of votes, with 200 in 76 %, with 400 in 91 %. Without an interval, both ends are the value."""
    votes: int
    raters: int
    wins: int
    losses: int
    ties: int
    neither: int
    win_share: Estimate | None
    """Share of wins among wins and losses; unlike the score, it depends on the opponents."""
    unacceptable_share: Estimate | None
    """Share of all votes which say that neither reply is acceptable."""


class Pair(FrozenModel):
    """The votes on two models: a cell of the pair matrix and its mirror image."""

    first: str
    second: str
    votes: int
    raters: int
    wins: int
    """Of the first model."""
    losses: int
    ties: int
    neither: int
    win_share: Estimate | None
    """Of the first model, among decided votes."""


class Headline(FrozenModel):
    """The best model against its most frequent opponent."""

    model: str
    against: str
    win_share: Estimate
    votes: int
    """Decided votes, without ties and votes for neither."""
    raters: int
    """People with a decided vote on these two models."""


class Effects(FrozenModel):
    """Influences on votes other than the model."""

    left_share: Estimate | None
    """How often the left of two equal replies is preferred, by the position term; 0.5 means no
    effect. None with too few votes or raters for a ranking."""
    longer_share: Estimate | None
    """Share of decided votes that the longer reply won."""
    longer_votes: int
    """Decided votes on replies of known and different length."""


class JudgeAgreement(FrozenModel):
    """People's votes and the judge's verdicts on the same two replies."""

    votes: int
    """Votes on replies that the judge compared."""
    raters: int
    table: Mapping[Preference, Mapping[Preference, int]]
    """Counts by the person's answer (outer key) and the judge's (inner key); left is first."""
    raw: Estimate | None
    """Share of votes with the judge's answer, of four possible; None without votes."""
    kappa: Estimate | None
    """Cohen's kappa. None if person and judge always give the same single answer, or fewer than five
    people voted."""
    ac1: Estimate | None
    """Gwet's AC1, for votes that are nearly all alike: kappa is then low although people and judge
    rarely differ. None with fewer than five people."""
    reward_share: Estimate | None
    """Share of decided votes won by the reply with the higher reward; equal rewards count half."""
    reward_votes: int
    """Decided votes with both rewards known."""


class Influence(FrozenModel):
    """What a single person can change: the fit repeated without each in turn."""

    order_holds: bool
    """Whether all ranks stay the same without any one person."""
    largest_shift: float
    """The largest change of any score, in points."""
    tried: int
    """Number of people left out in turn: all, or the 2000 with the most votes."""


class Board(FrozenModel):
    """Everything that the results page shows."""

    status: Status
    needed: int | None
    """The required number of votes or raters, if there are too few."""
    parts: tuple[tuple[str, ...], ...]
    """The models of each part of a disconnected board."""
    never_lost: tuple[str, ...]
    """Ranked models that never lost even half a vote to any other, alone or as a group to those outside
    it. Only the ridge bounds their scores; the votes do not."""
    headline: Headline | None
    models: tuple[ModelRow, ...]
    """Ranked models from the best on, then others by name."""
    pairs: tuple[Pair, ...]
    """Pairs of models that met, in the order of `models`."""
    effects: Effects
    judge: JudgeAgreement
    influence: Influence | None
    """None if nothing is ranked, or from one person's votes only."""
    votes: int
    """Counted votes."""
    raters: int
    comparing: int
    """Counted votes except those for neither."""
    comparing_raters: int
    left_out: LeftOut
    flags: Mapping[str, int]
    """Number of excluded flagged votes with each flag; a vote may have several."""
    filters: Filters
    settings: Settings
    as_of: UtcDatetime | None
    """Later votes are ignored."""
    vote_set: str
    """SHA-256 of the counted votes."""
    code: str
    """See `code_version`."""


# --- Computation ---------------------------------------------------------------------------------


def bradley_terry(
    votes: Iterable[VoteRow],
    *,
    filters: Filters | None = None,
    settings: Settings | None = None,
    as_of: datetime | None = None,
) -> Board:
    """Compute the board of some votes.

    Args:
        votes: In any order. Of two votes of one person on one battle the later one counts.
        filters: Which votes are counted; by default blind votes without flags.
        settings: Seed, number of resamples, ridge, and how many votes a ranking needs.
        as_of: Ignore later votes. Pass the same time to the store, since a vote that was revised
            afterwards only has its new time.

    Raises:
        ValueError: `as_of` has no time zone.
    """
    filters, settings = filters or Filters(), settings or Settings()
    if as_of is not None and as_of.tzinfo is None:
        raise ValueError(f"as_of needs a time zone, got {as_of.isoformat()}")
    selected = _select(votes, filters, as_of)
    counted = _Counted(selected.votes)
    resamples = resample(
        max(len(counted.raters), 1), len(counted.models), settings.fits, settings.seed
    )
    rated = _rate(counted, resamples, settings)
    rows = _model_rows(counted, resamples, rated)
    pairs = _pairs(counted, resamples, [row.model for row in rows])
    return Board(
        status=rated.status,
        needed=_needed(rated.status, settings),
        parts=rated.parts,
        never_lost=rated.never_lost,
        headline=_headline(counted, rows, pairs) if rated.status is Status.RANKED else None,
        models=rows,
        pairs=pairs,
        effects=_effects(counted, resamples, rated),
        judge=_judge(counted, resamples),
        influence=_influence(rated, settings),
        votes=len(counted.votes),
        raters=len(counted.raters),
        comparing=int(counted.compares.sum()),
        comparing_raters=counted.people(counted.compares),
        left_out=selected.left_out,
        flags=selected.flags,
        filters=filters,
        settings=settings,
        as_of=as_of,
        vote_set=_hash(counted.votes),
        code=code_version(),
    )


def code_version() -> str:
    """Return the version of the package, with a hash of the modules that compute boards."""
    try:
        version = metadata.version("compeer")
    except metadata.PackageNotFoundError:
        version = "dev"
    digest = hashlib.sha256()
    for name in _SOURCES:
        source = resources.files("compeer_core").joinpath(name).read_text(encoding="utf-8")
        digest.update(source.encode())  # read as text, so that line ends do not matter
    return f"{version}+{digest.hexdigest()[:12]}"


@dataclass(frozen=True)
class _Selection:
    votes: list[VoteRow]
    left_out: LeftOut
    flags: Mapping[str, int]


def _select(votes: Iterable[VoteRow], filters: Filters, as_of: datetime | None) -> _Selection:
    latest: dict[tuple[str, str], VoteRow] = {}
    left_out: Counter[str] = Counter()
    flags: Counter[str] = Counter()
    for vote in votes:
        if as_of is not None and vote.at > as_of:
            continue
        key = (vote.battle_id, vote.voter)
        if key in latest:
            left_out["superseded"] += 1
            vote = max(latest[key], vote, key=lambda row: (row.at, row.model_dump_json()))
        latest[key] = vote
    counted = []
    for key in sorted(latest):
        vote = latest[key]
        refusal = filters.refusal(vote)
        if refusal is None:
            counted.append(vote)
            continue
        left_out[refusal] += 1
        if refusal == "flagged":
            flags.update(vote.flags)
    return _Selection(counted, LeftOut(**left_out), dict(sorted(flags.items())))


def _hash(votes: Iterable[VoteRow]) -> str:
    digest = hashlib.sha256()
    for vote in votes:
        digest.update(vote.model_dump_json().encode() + b"\n")
    return digest.hexdigest()


class _Counted:
    """The counted votes as arrays: for each its rater, its two models and the answers."""

    def __init__(self, votes: Sequence[VoteRow]) -> None:
        self.votes = votes
        self.raters = sorted({vote.voter for vote in votes})
        self.models = sorted({name for vote in votes for name in (vote.left, vote.right)})
        raters = {name: number for number, name in enumerate(self.raters)}
        models = {name: number for number, name in enumerate(self.models)}
        answers = {preference: number for number, preference in enumerate(_PREFERENCES)}

        def column(read: Callable[[VoteRow], int]) -> Integers:
            return np.fromiter(map(read, votes), dtype=np.int64, count=len(votes))

        self.rater = column(lambda vote: raters[vote.voter])
        self.left = column(lambda vote: models[vote.left])
        self.right = column(lambda vote: models[vote.right])
        self.answer = column(lambda vote: answers[vote.preference])
        self.verdict = column(lambda vote: -1 if vote.verdict is None else answers[vote.verdict])
        self.longer = column(lambda vote: _side(vote.lengths))
        self.rewarded = column(lambda vote: _side(vote.rewards))

    @cached_property
    def compares(self) -> Booleans:
        mask: Booleans = self.answer != _NEITHER
        return mask

    @cached_property
    def decided(self) -> Booleans:
        mask: Booleans = self.answer < _BOTH
        return mask

    def of(self, model: int) -> Booleans:
        """Return the mask of the votes on a model."""
        mask: Booleans = (self.left == model) | (self.right == model)
        return mask

    def won(self, model: int) -> Booleans:
        """Return the mask of the votes that a model won."""
        side: Integers = np.where(self.left == model, _FIRST, _SECOND)
        mask: Booleans = self.of(model) & (self.answer == side)
        return mask

    def by_rater(self, values: Booleans | Floats) -> Floats:
        """Return the sum of a value per vote over the votes of each rater."""
        size = max(len(self.raters), 1)
        sums = np.bincount(self.rater, weights=values.astype(np.float64), minlength=size)
        return sums.astype(np.float64)

    def people(self, mask: Booleans) -> int:
        """Return the number of raters of some votes."""
        return len(np.unique(self.rater[mask]))


def _side(values: tuple[float | None, float | None] | None) -> int:
    """Return the index of the larger of two numbers; 2 if they are equal, -1 if one is unknown."""
    if values is None or values[0] is None or values[1] is None:
        return -1
    return 2 if values[0] == values[1] else int(values[1] > values[0])


# --- Scores --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rated:
    """The fit of the models that were compared with others."""

    status: Status
    models: Integers
    """Their indices in `_Counted.models`."""
    raters: int
    """People who compared them."""
    parts: tuple[tuple[str, ...], ...]
    never_lost: tuple[str, ...]
    votes: Floats
    """Shape (raters, matches)."""
    points: Floats
    """Shape (raters, matches)."""
    left: Integers
    right: Integers
    sample: Fit
    """Of all votes: one row."""
    resampled: Fit
    """Of the resamples."""


def _rate(counted: _Counted, resamples: Resamples, settings: Settings) -> _Rated:
    compares = counted.compares
    compared = np.unique(np.concatenate([counted.left[compares], counted.right[compares]]))
    left = np.searchsorted(compared, counted.left[compares])
    right = np.searchsorted(compared, counted.right[compares])
    size = len(compared)
    ordered, match = np.unique(left * size + right, return_inverse=True)
    raters = len(resamples.times[0])
    cell = counted.rater[compares] * len(ordered) + match
    points = np.array([1.0, 0.0, 0.5])[counted.answer[compares]]

    def table(weights: Floats | None) -> Floats:
        counts = np.bincount(cell, weights=weights, minlength=raters * len(ordered))
        return counts.astype(np.float64).reshape(raters, len(ordered))

    votes_of, points_of = table(None), table(points)
    left, right = (ordered // max(size, 1)), (ordered % max(size, 1))
    matches = Matches(size, left, right, votes_of.sum(axis=0)[None], points_of.sum(axis=0)[None])
    sample = fit(matches, settings.ridge)
    resampled = fit(
        Matches(size, left, right, resamples.times @ votes_of, resamples.times @ points_of),
        settings.ridge,
        prior=_prior(resamples, compared) / np.sqrt(settings.ridge),
    )
    parts = _groups(counted, compared, _both_ways(left, right), size)
    status = _status(counted, len(parts), settings)
    return _Rated(
        status=status,
        models=compared,
        raters=counted.people(compares),
        parts=parts if status is Status.DISCONNECTED else (),
        never_lost=_never_lost(counted, compared, matches) if status is Status.RANKED else (),
        votes=votes_of,
        points=points_of,
        left=left,
        right=right,
        sample=sample,
        resampled=resampled,
    )


def _prior(resamples: Resamples, compared: Integers) -> Floats:
    """Return the drawn prior centres of the compared models and of the position."""
    prior: Floats = resamples.prior[:, [*compared.tolist(), -1]]
    return prior


def _both_ways(left: Integers, right: Integers) -> list[tuple[int, int]]:
    pairs = list(zip(left.tolist(), right.tolist(), strict=True))
    return pairs + [(end, begin) for begin, end in pairs]


def _groups(
    counted: _Counted, compared: Integers, edges: list[tuple[int, int]], size: int
) -> tuple[tuple[str, ...], ...]:
    part = components(size, edges)
    return tuple(
        tuple(counted.models[compared[model]] for model in np.flatnonzero(part == number))
        for number in np.unique(part)
    )


def _never_lost(counted: _Counted, compared: Integers, matches: Matches) -> tuple[str, ...]:
    """Return the models of all groups that never lost half a vote to a model outside the group."""
    votes, points = matches.votes[0], matches.points[0]
    met = list(zip(matches.left.tolist(), matches.right.tolist(), strict=True))
    beaten = [pair for pair, lost in zip(met, votes - points, strict=True) if lost > 0]
    beaten += [(pair[1], pair[0]) for pair, won in zip(met, points, strict=True) if won > 0]
    part = components(matches.models, beaten)
    lost_outside = {int(part[loser]) for loser, winner in beaten if part[loser] != part[winner]}
    won_outside = {int(part[winner]) for loser, winner in beaten if part[loser] != part[winner]}
    return tuple(
        counted.models[compared[model]]
        for model in range(matches.models)
        if part[model] in won_outside - lost_outside
    )


def _status(counted: _Counted, parts: int, settings: Settings) -> Status:
    if counted.compares.sum() < settings.min_votes:
        return Status.NOT_ENOUGH_VOTES
    if counted.people(counted.compares) < settings.min_raters:
        return Status.NOT_ENOUGH_RATERS
    return Status.DISCONNECTED if parts > 1 else Status.RANKED


def _needed(status: Status, settings: Settings) -> int | None:
    return {
        Status.NOT_ENOUGH_VOTES: settings.min_votes,
        Status.NOT_ENOUGH_RATERS: settings.min_raters,
    }.get(status)


def _influence(rated: _Rated, settings: Settings) -> Influence | None:
    if rated.status is not Status.RANKED or rated.raters < 2:
        return None
    most = np.argsort(-rated.votes.sum(axis=1), kind="stable")[:_MOST_LEFT_OUT]
    without = fit(
        Matches(
            len(rated.models),
            rated.left,
            rated.right,
            rated.votes.sum(axis=0) - rated.votes[most],
            rated.points.sum(axis=0) - rated.points[most],
        ),
        settings.ridge,
    )
    shift = np.abs(without.strengths - rated.sample.strengths).max()
    return Influence(
        order_holds=bool((ranks(without.strengths) == ranks(rated.sample.strengths)).all()),
        largest_shift=round(float(shift) * POINTS_PER_LOGIT, 1),
        tried=len(most),
    )


# --- Rows ----------------------------------------------------------------------------------------


def _model_rows(counted: _Counted, resamples: Resamples, rated: _Rated) -> tuple[ModelRow, ...]:
    standing: dict[int, dict[str, Any]] = {}
    if rated.status is Status.RANKED:
        strengths, draws = rated.sample.strengths[0], rated.resampled.strengths
        limits = (
            rank_intervals(strengths, draws, rated.raters)
            if rated.raters > 1
            else [(1, len(strengths))] * len(strengths)
        )
        for place, (model, rank) in enumerate(zip(rated.models, ranks(strengths), strict=True)):
            value = float(strengths[place])
            score = (
                expanded_interval(value, draws[:, place], rated.raters)
                if rated.raters > 1
                else Estimate(value=value, low=value, high=value)
            )
            standing[int(model)] = {
                "rank": int(rank),
                "rank_low": limits[place][0],
                "rank_high": limits[place][1],
                "score": score.mapped(_points),
            }
    rows = []
    for model, name in enumerate(counted.models):
        of, won = counted.of(model), counted.won(model)
        neither = of & (counted.answer == _NEITHER)
        rows.append(
            ModelRow(
                model=name,
                **standing.get(model, {}),
                **_counts(counted, resamples, of, won),
                unacceptable_share=_share(counted, resamples, neither, of),
            )
        )
    return tuple(sorted(rows, key=lambda row: (row.rank is None, row.rank or 0, row.model)))


def _pairs(counted: _Counted, resamples: Resamples, order: Sequence[str]) -> tuple[Pair, ...]:
    number = {name: model for model, name in enumerate(counted.models)}
    pairs = []
    for first, second in combinations(order, 2):
        of = counted.of(number[first]) & counted.of(number[second])
        if not of.any():
            continue
        won = of & counted.won(number[first])
        pairs.append(Pair(first=first, second=second, **_counts(counted, resamples, of, won)))
    return tuple(pairs)


def _counts(counted: _Counted, resamples: Resamples, of: Booleans, won: Booleans) -> dict[str, Any]:
    """Return what a model's row and a pair share: the counts of some votes, and the share won."""
    decided = of & counted.decided
    return {
        "votes": int(of.sum()),
        "raters": counted.people(of),
        "wins": int(won.sum()),
        "losses": int((decided & ~won).sum()),
        "ties": int((of & (counted.answer == _BOTH)).sum()),
        "neither": int((of & (counted.answer == _NEITHER)).sum()),
        "win_share": _share(counted, resamples, won, decided),
    }


def _headline(
    counted: _Counted, rows: Sequence[ModelRow], pairs: Sequence[Pair]
) -> Headline | None:
    best = rows[0].model
    met = [pair for pair in pairs if pair.first == best and pair.win_share is not None]
    if not met:
        return None
    most = max(met, key=lambda pair: pair.wins + pair.losses)  # of equals, the better ranked
    assert most.win_share is not None
    first, second = counted.models.index(best), counted.models.index(most.second)
    return Headline(
        model=best,
        against=most.second,
        win_share=most.win_share,
        votes=most.wins + most.losses,
        raters=counted.people(counted.of(first) & counted.of(second) & counted.decided),
    )


def _effects(counted: _Counted, resamples: Resamples, rated: _Rated) -> Effects:
    left = None
    if rated.status in {Status.RANKED, Status.DISCONNECTED} and rated.raters > 1:
        position = float(rated.sample.position[0])
        left = expanded_interval(position, rated.resampled.position, rated.raters).mapped(_chance)
    differing = counted.decided & (counted.longer >= 0) & (counted.longer < 2)
    won = differing & (counted.longer == counted.answer)
    return Effects(
        left_share=left,
        longer_share=_share(counted, resamples, won, differing),
        longer_votes=int(differing.sum()),
    )


# --- People and the judge ------------------------------------------------------------------------


def _judge(counted: _Counted, resamples: Resamples) -> JudgeAgreement:
    both = counted.verdict >= 0
    size = len(_PREFERENCES)
    raters = len(resamples.times[0])
    cell = counted.rater[both] * size**2 + counted.answer[both] * size + counted.verdict[both]
    by_rater = np.bincount(cell, minlength=raters * size**2).reshape(raters, size**2)
    cells = np.vstack([by_rater.sum(axis=0), resamples.times @ by_rater])  # the sample in row 0
    table = cells[0].reshape(size, size)
    people = counted.people(both)

    def measured(values: Floats) -> Estimate | None:
        draws = values[1:][~np.isnan(values[1:])]
        if people < FEW_CLUSTERS or np.isnan(values[0]) or not draws.size:
            return None
        return expanded_interval(float(values[0]), draws, people).mapped(_four_digits)

    # A cell of the table is an item that one person and the judge have rated.
    ratings = np.repeat(np.eye(size), size, axis=0) + np.tile(np.eye(size), (size, 1))

    rewarded = counted.decided & (counted.rewarded >= 0)
    higher = np.where(counted.rewarded == 2, 0.5, counted.rewarded == counted.answer) * rewarded
    return JudgeAgreement(
        votes=int(both.sum()),
        raters=people,
        table={
            person: {judge: int(table[row, column]) for column, judge in enumerate(_PREFERENCES)}
            for row, person in enumerate(_PREFERENCES)
        },
        raw=_share(counted, resamples, both & (counted.answer == counted.verdict), both),
        kappa=measured(cohen_kappa(cells.reshape(-1, size, size))),
        ac1=measured(gwet_ac1(ratings, cells)),
        reward_share=_share(counted, resamples, higher, rewarded),
        reward_votes=int(rewarded.sum()),
    )


# --- Numbers -------------------------------------------------------------------------------------


def _share(
    counted: _Counted,
    resamples: Resamples,
    part: Booleans | Floats,
    whole: Booleans,
) -> Estimate | None:
    share = clustered_share(counted.by_rater(part), counted.by_rater(whole), resamples.times)
    return None if share is None else share.mapped(_four_digits)


# Digits that differ between machines must not reach a file; + 0.0 makes -0.0 plain.


def _four_digits(number: float) -> float:
    return round(number, 4) + 0.0


def _points(strength: float) -> float:
    return round(_MEAN_SCORE + strength * float(POINTS_PER_LOGIT), 1) + 0.0


def _chance(logit: float) -> float:
    return _four_digits(float((1 + np.tanh(logit / 2)) / 2))
