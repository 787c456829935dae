"""The board: which model people prefer, how sure that is, and whether the judge would agree.

    board = bradley_terry(store.votes(as_of=now), as_of=now)

Scores are those of Bradley and Terry with a ridge, ties as halves and a position term (see
`compeer_core.votes.rating`), in points of the Elo scale around 1000. Every interval is made by drawing
raters anew, not votes. Where there is too little to rank, the board says what is missing
(`Status`) and has no scores.

A board depends on the votes and not on the order in which they come. It carries the hash of the votes
that it counted, the seed and the version of the code that made it, and comes out the same, to the
byte, from the same three.
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

from compeer_core.annotation.annotations import Date
from compeer_core.config import FrozenModel
from compeer_core.taxonomy import Preference
from compeer_core.votes.rating import (
    FEW_RATERS,
    POINTS_PER_LOGIT,
    Estimate,
    Fit,
    Floats,
    Integers,
    Matches,
    Resamples,
    components,
    fit,
    interval,
    rank_intervals,
    ranks,
    resample,
    share,
)
from compeer_core.votes.rows import VoteRow

Booleans = NDArray[np.bool_]

ALL_FLAGS = "*"
"""In `Filters.admit`: count votes whatever their flags."""

_MEAN_SCORE = 1000
_MOST_LEFT_OUT_IN_TURN = 2000
_PREFERENCES = tuple(Preference)
_FIRST, _SECOND, _BOTH, _NEITHER = range(4)
_SOURCES = ("rows.py", "rating.py", "board.py", "board_text.py", "board_plot.py")


# --- What is asked for ---------------------------------------------------------------------------


class Filters(FrozenModel):
    """Which votes are counted. An empty tuple and None leave a question open."""

    kind: Literal["blind", "named", "any"] = "blind"
    """Who sees names votes for names, so that only blind votes count unless one asks."""
    languages: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    rater_groups: tuple[str, ...] = ()
    """Of the voters; the empty text is that of visitors."""
    has_image: bool | None = None
    with_reasoning: bool | None = None
    admit: tuple[str, ...] = ()
    """Flags that do not keep a vote out; `ALL_FLAGS` for any."""

    def refusal(self, vote: VoteRow) -> str | None:
        """Return why a vote is left out, as a field of `LeftOut`; None where it is counted."""
        if vote.left == vote.right:
            return "same_model"
        if self.kind != "any" and vote.blind != (self.kind == "blind"):
            return "other_kind"
        wanted = (
            (self.languages, vote.language),
            (self.topics, vote.topic),
            (self.rater_groups, vote.rater_group),
        )
        if any(allowed and found not in allowed for allowed, found in wanted):
            return "filtered"
        exact = ((self.has_image, vote.has_image), (self.with_reasoning, vote.with_reasoning))
        if any(asked is not None and asked != found for asked, found in exact):
            return "filtered"
        if ALL_FLAGS not in self.admit and not set(vote.flags) <= set(self.admit):
            return "flagged"
        return None


class Settings(FrozenModel):
    """How a board is made."""

    seed: int = Field(default=0, ge=0)
    """Of the resamples."""
    fits: int = Field(default=300, ge=50, le=20_000)
    """Number of resamples."""
    ridge: float = Field(default=0.25, gt=0, allow_inf_nan=False)
    """One over the variance of a strength before any vote, in logits: 0.25 is a standard deviation
    of 2. Of two models that met 20 times it takes some 2 % of the difference away."""
    min_votes: int = Field(default=20, ge=1)
    """Votes that compare, ties included, below which nothing is ranked."""
    min_raters: int = Field(default=FEW_RATERS, ge=2)
    """People with such a vote below which nothing is ranked: intervals come from how people differ."""


# --- What comes out ------------------------------------------------------------------------------


class Status(StrEnum):
    """Whether models are ranked, and if not, why."""

    RANKED = "ranked"
    NOT_ENOUGH_VOTES = "not_enough_votes"
    NOT_ENOUGH_RATERS = "not_enough_raters"
    DISCONNECTED = "disconnected"
    """Some models were never compared with some others, not even by way of third ones."""


class LeftOut(FrozenModel):
    """How many votes are not counted, each under the first reason that fits."""

    superseded: int = 0
    """The same person voted again on the same battle; the later vote counts."""
    same_model: int = 0
    """Both sides were by the same model."""
    other_kind: int = 0
    """Not blind, or not named, whichever was asked for."""
    filtered: int = 0
    """Of another language, topic, group of raters, with or without picture or reasoning."""
    flagged: int = 0
    """There is a reason to doubt them; see `Board.flags`."""


class ModelRow(FrozenModel):
    """What people said about one model."""

    model: str
    rank: int | None = None
    """Equally strong models share one. None where nothing is ranked, or where every vote about this
    model was that neither is acceptable, so that it was compared with none."""
    rank_low: int | None = None
    """The best rank that it can have, with 95 % confidence."""
    rank_high: int | None = None
    """The worst."""
    score: Estimate | None = None
    """In points around 1000, the mean of the ranked models; 100 points more are preferred in 64 % of
    votes, 200 in 76 %, 400 in 91 %."""
    votes: int
    raters: int
    wins: int
    losses: int
    ties: int
    neither: int
    win_share: Estimate | None
    """Of decided votes, which are wins and losses; depends on the opponents, unlike the score."""
    unacceptable_share: Estimate | None
    """Of all votes, how many say that neither reply is acceptable."""


class Pair(FrozenModel):
    """What people said about two models; in the pair matrix, one cell and its mirror image."""

    first: str
    second: str
    votes: int
    raters: int
    wins: int
    """Of the first."""
    losses: int
    ties: int
    neither: int
    win_share: Estimate | None
    """Of the first, in decided votes."""


class Headline(FrozenModel):
    """The best model against the one that it met most often."""

    model: str
    against: str
    win_share: Estimate
    votes: int
    """Decided ones; ties and votes for neither are not among them."""
    raters: int
    """People with a decided vote on these two."""


class Effects(FrozenModel):
    """What sways votes besides the model."""

    left_share: Estimate | None
    """How often the left of two equal replies is preferred, by the position term; 0.5 is no
    effect. None with too few votes or raters to rank."""
    longer_share: Estimate | None
    """How often the longer reply won a decided vote."""
    longer_votes: int
    """Decided votes on replies of known and different length."""


class JudgeAgreement(FrozenModel):
    """What people said, beside what the judge said of the same two replies."""

    votes: int
    """With a verdict of the judge."""
    raters: int
    table: Mapping[Preference, Mapping[Preference, int]]
    """How often a person said the one (outer) and the judge the other (inner); left is first."""
    raw: Estimate | None
    """Share of votes with the same answer of the four; None without votes."""
    kappa: Estimate | None
    """Cohen (1960, Educational and Psychological Measurement 20, 37-46): agreement beyond what the
    same answers would give if they were dealt out at random. None where both always say the same,
    or fewer than five people voted."""
    ac1: Estimate | None
    """Gwet's (see `compeer_core.annotation.agreement`), for where nearly all answers are alike and kappa
    is low although people and judge hardly ever differ. None with fewer than five people."""
    reward_share: Estimate | None
    """How often the reply that won a decided vote has the higher reward; equal rewards are half."""
    reward_votes: int
    """Decided votes with both rewards known."""


class Influence(FrozenModel):
    """What one person can change: the board made again without each in turn."""

    order_holds: bool
    """Without any one person, all ranks stay as they are."""
    largest_shift: float
    """The most that any score moves, in points."""
    tried: int
    """People left out in turn: all, or the 2000 with the most votes."""


class Board(FrozenModel):
    """Everything the results page shows."""

    status: Status
    needed: int | None
    """How many votes (or raters) are asked for, where there are too few."""
    parts: tuple[tuple[str, ...], ...]
    """Where the board is disconnected, the models of each part."""
    never_lost: tuple[str, ...]
    """Ranked models that never lost so much as half a vote to any other, alone or as a group to
    those outside it. The votes put no upper bound on their scores; the ridge alone does."""
    headline: Headline | None
    models: tuple[ModelRow, ...]
    """Ranked ones first, best first; others by name."""
    pairs: tuple[Pair, ...]
    """Each two models that met, in the order of `models`."""
    effects: Effects
    judge: JudgeAgreement
    influence: Influence | None
    """None where nothing is ranked."""
    votes: int
    """Counted ones."""
    raters: int
    comparing: int
    """Counted votes other than neither acceptable."""
    comparing_raters: int
    left_out: LeftOut
    flags: Mapping[str, int]
    """How many of the flagged votes left out have each flag; one may have several."""
    filters: Filters
    settings: Settings
    as_of: Date | None
    """Later votes are not looked at."""
    vote_set: str
    """SHA-256 of the counted votes."""
    code: str
    """Version of the package, and the beginning of a hash of the modules that make a board."""


# --- Making it -----------------------------------------------------------------------------------


def bradley_terry(
    votes: Iterable[VoteRow],
    *,
    filters: Filters | None = None,
    settings: Settings | None = None,
    as_of: datetime | None = None,
) -> Board:
    """Make the board of some votes.

    Args:
        votes: In any order. Of two votes of one person on one battle the later counts.
        filters: Which are counted; by default blind ones that nothing speaks against.
        settings: Seed, number of resamples, ridge, and what is enough to rank.
        as_of: Later votes are not looked at. A store must be asked for the same moment, since a
            vote that was changed afterwards has its new time only.

    Raises:
        ValueError: `as_of` has no zone.
    """
    filters, settings = filters or Filters(), settings or Settings()
    if as_of is not None and as_of.tzinfo is None:
        raise ValueError("as_of needs a time zone")
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
    """Return what distinguishes the code that makes boards: `version+hash`."""
    try:
        version = metadata.version("compeer")
    except metadata.PackageNotFoundError:
        version = "dev"
    digest = hashlib.sha256()
    for name in _SOURCES:
        source = resources.files("compeer_core.votes").joinpath(name).read_text(encoding="utf-8")
        digest.update(source.encode())  # line ends are all alike by now
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
    """The counted votes as numbers: for each its rater, its two models and what was said."""

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
        self.said = column(lambda vote: answers[vote.preference])
        self.judged = column(lambda vote: -1 if vote.verdict is None else answers[vote.verdict])
        self.longer = column(lambda vote: _side(vote.lengths))
        self.rewarded = column(lambda vote: _side(vote.rewards))

    @cached_property
    def compares(self) -> Booleans:
        which: Booleans = self.said != _NEITHER
        return which

    @cached_property
    def decided(self) -> Booleans:
        which: Booleans = self.said < _BOTH
        return which

    def of(self, model: int) -> Booleans:
        which: Booleans = (self.left == model) | (self.right == model)
        return which

    def won(self, model: int) -> Booleans:
        """Votes that the model won."""
        side: Integers = np.where(self.left == model, _FIRST, _SECOND)
        which: Booleans = self.of(model) & (self.said == side)
        return which

    def by_rater(self, which: Booleans | Floats) -> Floats:
        """Return how many of some votes each rater gave; or the sum, if they are numbers."""
        size = max(len(self.raters), 1)
        sums = np.bincount(self.rater, weights=which.astype(np.float64), minlength=size)
        return sums.astype(np.float64)

    def people(self, which: Booleans) -> int:
        """Return how many raters gave some votes."""
        return len(np.unique(self.rater[which]))


def _side(two: tuple[float | None, float | None] | None) -> int:
    """Return which of two numbers is larger, 0 or 1; 2 where they are equal, -1 if not known."""
    if two is None or two[0] is None or two[1] is None:
        return -1
    return 2 if two[0] == two[1] else int(two[1] > two[0])


# --- Scores --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rated:
    """The fits of the models that were compared with others."""

    status: Status
    models: Integers
    """Their numbers."""
    raters: int
    """People who compared them."""
    parts: tuple[tuple[str, ...], ...]
    never_lost: tuple[str, ...]
    votes: Floats
    """Shape (raters, matches)."""
    points: Floats
    left: Integers
    right: Integers
    found: Fit
    """Of all votes: one row."""
    drawn: Fit
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
    points = np.array([1.0, 0.0, 0.5])[counted.said[compares]]

    def table(weights: Floats | None) -> Floats:
        counts = np.bincount(cell, weights=weights, minlength=raters * len(ordered))
        return counts.astype(np.float64).reshape(raters, len(ordered))

    votes_of, points_of = table(None), table(points)
    left, right = (ordered // max(size, 1)), (ordered % max(size, 1))
    matches = Matches(size, left, right, votes_of.sum(axis=0)[None], points_of.sum(axis=0)[None])
    found = fit(matches, settings.ridge)
    drawn = fit(
        Matches(size, left, right, resamples.times @ votes_of, resamples.times @ points_of),
        settings.ridge,
        prior=_prior(resamples, compared) / np.sqrt(settings.ridge),
        start=found.parameters,
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
        found=found,
        drawn=drawn,
    )


def _prior(resamples: Resamples, compared: Integers) -> Floats:
    """Return the drawn centres of the compared models and of the position."""
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
        tuple(counted.models[compared[model]] for model in np.flatnonzero(part == one))
        for one in np.unique(part)
    )


def _never_lost(counted: _Counted, compared: Integers, matches: Matches) -> tuple[str, ...]:
    """Return the models of all groups that never lost half a vote to a model outside."""
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
    if rated.status is not Status.RANKED:
        return None
    most = np.argsort(-rated.votes.sum(axis=1), kind="stable")[:_MOST_LEFT_OUT_IN_TURN]
    without = fit(
        Matches(
            len(rated.models),
            rated.left,
            rated.right,
            rated.votes.sum(axis=0) - rated.votes[most],
            rated.points.sum(axis=0) - rated.points[most],
        ),
        settings.ridge,
        start=rated.found.parameters,
    )
    shift = np.abs(without.strengths - rated.found.strengths).max()
    return Influence(
        order_holds=bool((ranks(without.strengths) == ranks(rated.found.strengths)).all()),
        largest_shift=round(float(shift) * POINTS_PER_LOGIT, 1),
        tried=len(most),
    )


# --- Rows ----------------------------------------------------------------------------------------


def _model_rows(counted: _Counted, resamples: Resamples, rated: _Rated) -> tuple[ModelRow, ...]:
    standing: dict[int, dict[str, Any]] = {}
    if rated.status is Status.RANKED:
        strengths, draws = rated.found.strengths[0], rated.drawn.strengths
        limits = rank_intervals(strengths, draws, rated.raters)
        for place, (model, rank) in enumerate(zip(rated.models, ranks(strengths), strict=True)):
            score = interval(float(strengths[place]), draws[:, place], rated.raters)
            standing[int(model)] = {
                "rank": int(rank),
                "rank_low": limits[place][0],
                "rank_high": limits[place][1],
                "score": _points(score),
            }
    rows = []
    for model, name in enumerate(counted.models):
        of, won = counted.of(model), counted.won(model)
        decided, neither = of & counted.decided, of & (counted.said == _NEITHER)
        rows.append(
            ModelRow(
                model=name,
                **standing.get(model, {}),
                votes=int(of.sum()),
                raters=counted.people(of),
                wins=int(won.sum()),
                losses=int((decided & ~won).sum()),
                ties=int((of & (counted.said == _BOTH)).sum()),
                neither=int(neither.sum()),
                win_share=_share(counted, resamples, won, decided),
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
        decided = of & counted.decided
        pairs.append(
            Pair(
                first=first,
                second=second,
                votes=int(of.sum()),
                raters=counted.people(of),
                wins=int(won.sum()),
                losses=int((decided & ~won).sum()),
                ties=int((of & (counted.said == _BOTH)).sum()),
                neither=int((of & (counted.said == _NEITHER)).sum()),
                win_share=_share(counted, resamples, won, decided),
            )
        )
    return tuple(pairs)


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
    if rated.status in {Status.RANKED, Status.DISCONNECTED}:
        logits = interval(float(rated.found.position[0]), rated.drawn.position, rated.raters)
        left = Estimate(
            value=_chance(logits.value), low=_chance(logits.low), high=_chance(logits.high)
        )
    differing = counted.decided & (counted.longer >= 0) & (counted.longer < 2)
    won = differing & (counted.longer == counted.said)
    return Effects(
        left_share=left,
        longer_share=_share(counted, resamples, won, differing),
        longer_votes=int(differing.sum()),
    )


# --- People and the judge ------------------------------------------------------------------------


def _judge(counted: _Counted, resamples: Resamples) -> JudgeAgreement:
    both = counted.judged >= 0
    size = len(_PREFERENCES)
    raters = len(resamples.times[0])
    cell = counted.rater[both] * size**2 + counted.said[both] * size + counted.judged[both]
    by_rater = np.bincount(cell, minlength=raters * size**2).reshape(raters, size**2)
    table = by_rater.sum(axis=0).reshape(1, size, size).astype(np.float64)
    drawn = (resamples.times @ by_rater).reshape(-1, size, size)
    people = counted.people(both)

    def measured(measure: Callable[[Floats], Floats]) -> Estimate | None:
        value = float(measure(table)[0])
        draws = measure(drawn)
        draws = draws[~np.isnan(draws)]
        if people < FEW_RATERS or np.isnan(value) or not draws.size:
            return None
        return _rounded(interval(value, draws, people), 4)

    rewarded = counted.decided & (counted.rewarded >= 0)
    higher = np.where(counted.rewarded == 2, 0.5, counted.rewarded == counted.said) * rewarded
    return JudgeAgreement(
        votes=int(both.sum()),
        raters=people,
        table={
            said: {judged: int(table[0, row, column]) for column, judged in enumerate(_PREFERENCES)}
            for row, said in enumerate(_PREFERENCES)
        },
        raw=_share(counted, resamples, both & (counted.said == counted.judged), both),
        kappa=measured(_kappa),
        ac1=measured(_ac1),
        reward_share=_share(counted, resamples, higher, rewarded),
        reward_votes=int(rewarded.sum()),
    )


def _kappa(tables: Floats) -> Floats:
    """Return Cohen's kappa of tables, shape (tables, 4, 4); NaN where chance explains all."""
    total = tables.sum(axis=(1, 2))
    chance = (tables.sum(axis=1) * tables.sum(axis=2)).sum(axis=1)
    return _ratio(np.trace(tables, axis1=1, axis2=2) * total - chance, total**2 - chance)


def _ac1(tables: Floats) -> Floats:
    """Return Gwet's AC1 of tables, shape (tables, 4, 4); NaN for an empty one."""
    total = tables.sum(axis=(1, 2))
    hits = _ratio(np.trace(tables, axis1=1, axis2=2), total)
    shares = _ratio(
        tables.sum(axis=1) + tables.sum(axis=2), np.repeat(2 * total[:, np.newaxis], 4, axis=1)
    )
    chance = (shares * (1 - shares)).sum(axis=1) / 3
    return _ratio(hits - chance, 1 - chance)


def _ratio(above: Floats, below: Floats) -> Floats:
    result: Floats = np.divide(above, below, out=np.full(above.shape, np.nan), where=below != 0)
    return result


# --- Numbers -------------------------------------------------------------------------------------


def _share(
    counted: _Counted,
    resamples: Resamples,
    part: Booleans | Floats,
    whole: Booleans,
) -> Estimate | None:
    found = share(counted.by_rater(part), counted.by_rater(whole), resamples.times)
    return None if found is None else _rounded(found, 4)


def _points(logits: Estimate) -> Estimate:
    def points(strength: float) -> float:
        return _MEAN_SCORE + strength * float(POINTS_PER_LOGIT)

    return _rounded(
        Estimate(value=points(logits.value), low=points(logits.low), high=points(logits.high)), 1
    )


def _chance(logit: float) -> float:
    return round(float((1 + np.tanh(logit / 2)) / 2), 4)


def _rounded(estimate: Estimate, digits: int) -> Estimate:
    # What is left of the machine in the last digits must not reach a file; + 0.0 makes -0.0 plain.
    return Estimate(
        value=round(estimate.value, digits) + 0.0,
        low=round(estimate.low, digits) + 0.0,
        high=round(estimate.high, digits) + 0.0,
    )
