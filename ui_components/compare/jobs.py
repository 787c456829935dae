"""Rounds that are being generated in Compare, and the votes on them.

Order, sides, models and seeds are in the database before anything is generated.

Who writes on which side stays in this process until the visitor has voted: all models are loaded before
the first side begins, and turns are counted after the last one has ended, so that neither a status nor a
counter tells the sides apart.
"""

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

from compeer_core.dialogue import Dialogue, Utterance, language_of
from compeer_core.errors import CompeerError, InputError, StoreError, VoteRefusedError
from compeer_core.logs import trace_of
from compeer_core.policy import Controls
from compeer_core.reasoning import Reading
from compeer_core.safety import RiskState
from compeer_core.taxonomy import Preference
from compeer_core.turn import SEEDS, TurnDone, TurnRecord
from compeer_core.unifireward import Judge, ResponseVerdict
from compeer_core.votes.battles import (
    Agreement,
    BattlePlan,
    SideResult,
    Steps,
    VoteReceipt,
    draw_sides,
)
from compeer_core.votes.store import VoteStore
from ui_components.compare.comparison import Ballot, Comparison, Pair, Round, Side
from ui_components.compare.identity import says_who_wrote_it
from ui_components.server.metrics import Metrics
from ui_components.shared.jobs import GRACE_SECONDS, Job, JobRunner, ProgressChange, TurnRequest
from ui_components.shared.models import Models
from ui_components.shared.progress import Failure, Progress
from ui_components.shared.session import MAX_TURNS
from ui_components.shared.session_store import SessionKey, SessionStore

logger = logging.getLogger(__name__)

DEADLINE_SECONDS = 240.0
"""For one side; sides of the same model may share its time."""
BLIND_SIDES = 2


@dataclass(frozen=True)
class RoundRequest:
    """What a round is requested with."""

    models: tuple[str, ...]
    """Blind: two of these are drawn. Named: all of them reply."""
    blind: bool = True
    with_reasoning: bool = False
    keep_words: bool = False
    judge: str = ""
    """Empty: no judge."""


class RoundJob(Job):
    """One round that is being generated."""

    def __init__(
        self, key: SessionKey, opened: Round, dialogue: Dialogue, grace_seconds: float
    ) -> None:
        super().__init__(key, len(opened.sides), grace_seconds)
        self.opened = opened
        self.dialogue = dialogue
        self.records: dict[int, TurnRecord] = {}
        """By the number of the side; only this process knows who wrote which."""


class RoundJobs(JobRunner[Comparison, RoundJob]):
    """The jobs of Compare, and the votes on the rounds that have ended."""

    def __init__(
        self,
        models: Models,
        store: SessionStore[Comparison],
        votes: VoteStore,
        metrics: Metrics,
        *,
        deadline_seconds: float = DEADLINE_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
        gated: bool = True,
    ) -> None:
        super().__init__(
            models,
            store,
            metrics,
            deadline_seconds=deadline_seconds,
            grace_seconds=grace_seconds,
            gated=gated,
        )
        self._votes = votes

    # --- beginning a round -----------------------------------------------------------------------

    def begin(
        self, key: SessionKey, message: Utterance, request: RoundRequest, address: str | None
    ) -> RoundJob:
        """Open the battles of a new round and begin to generate its replies.

        Args:
            key: The comparison.
            message: The seeker's message.
            request: Models and switches.
            address: Where the request came from; the vote store keeps a hash of it.

        Raises:
            InputError: A round is being generated (``already_writing``), the last one has no vote
                (``compare_vote_first``), there are too many pictures (``too_many_pictures``), or the
                visitor deleted everything in the meantime (``forgotten``); nothing changed.
            StoreError: The database failed; nothing changed.
        """
        with self._reserved(key):
            before = self.store.get(key)
            if before.risk:
                before = Comparison()
            elif len(before.rounds) >= MAX_TURNS:
                raise InputError("too many", code="too_many_turns", values={"limit": MAX_TURNS})
            elif before.last is not None and before.last.goes_on is None:
                raise InputError("there is no vote", code="compare_vote_first")
            job = self._registered(key, before, message, request, address)
        self._start(job, lambda: self._write(job))
        return job

    def begin_again(self, key: SessionKey, request: RoundRequest, address: str | None) -> RoundJob:
        """Replace the last round by a new draw for the same message, of other models if there are any.

        Votes on the replaced round stay in the database.

        Raises:
            InputError: As for `begin`; there is no round (``turn_gone``), or it has a vote but the
                names are not revealed (``compare_voted``).
            StoreError: The database failed; nothing changed.
        """
        with self._reserved(key):
            before = self.store.get(key)
            if before.last is None:
                raise InputError("there is no round", code="turn_gone")
            if before.last.has_vote and before.last.active is not None:
                raise InputError("there is a vote", code="compare_voted")
            earlier = replace(before, rounds=before.rounds[:-1])
            drawn = {side.plan.model for side in before.last.sides}
            job = self._registered(key, earlier, before.last.message, request, address, drawn)
        self._start(job, lambda: self._write(job))
        return job

    def _registered(
        self,
        key: SessionKey,
        before: Comparison,
        message: Utterance,
        request: RoundRequest,
        address: str | None,
        drawn_before: Set[str] = frozenset(),
    ) -> RoundJob:
        dialogue = before.dialogue(message)
        opened = self._opened(key, dialogue, request, address, drawn_before)
        try:
            stored = self.store.update(
                key, lambda _: replace(before, rounds=(*before.rounds, opened))
            )
        except InputError:
            for pair in opened.pairs:
                self._votes.close_battle(pair.battle, "no room")
            raise
        if stored.is_empty:
            raise InputError("everything was deleted in the meantime", code="forgotten")
        job = RoundJob(key, opened, dialogue, self._grace_seconds)
        self._register(job)
        return job

    def _opened(
        self,
        key: SessionKey,
        dialogue: Dialogue,
        request: RoundRequest,
        address: str | None,
        drawn_before: Set[str],
    ) -> Round:
        """Draw the sides of a round about the last message and store them in the database."""
        message = dialogue.utterances[-1]
        while True:
            seed = secrets.randbelow(SEEDS)
            drawn = draw_sides(request.models, seed)
            plans = drawn[:BLIND_SIDES] if request.blind else drawn
            is_new = {plan.model for plan in plans} != drawn_before
            if is_new or len(plans) == len(request.models):
                break
        language = language_of(message.text)
        pairs = []
        for first, second in combinations(range(len(plans)), 2):
            plan = BattlePlan(
                voter=key.visitor,
                dialogue=dialogue,
                sides=(plans[first], plans[second]),
                seed=seed,
                blind=request.blind,
                with_reasoning=request.with_reasoning,
                keep_words=request.keep_words,
                language=language,
            )
            battle = self._votes.open_battle(plan, address, partial(self.store.is_current, key))
            pairs.append(Pair(battle.id, (first, second)))
        since = time.monotonic()
        progress = Progress(model="", judge=request.judge or None, since=since)
        return Round(
            message=message,
            sides=tuple(Side(plan, progress) for plan in plans),
            pairs=tuple(pairs),
            blind=request.blind,
            with_reasoning=request.with_reasoning,
            keep_words=request.keep_words,
            seed=seed,
            language=language,
            judge=request.judge,
        )

    def end_for_risk(self, key: SessionKey, risk: RiskState, message: str) -> None:
        """Exclude the whole conversation from all counts, since the visitor may need help.

        Args:
            key: The comparison.
            risk: The state for which no reply is generated.
            message: The message that gets none.
        """
        self.stop(key)
        before = self.store.get(key)
        ended = Comparison(
            risk=risk.withheld_for, risk_is_earlier=risk.messages_since > 0, unanswered=message
        )
        self.store.update(key, lambda _: ended)
        for round_ in before.rounds:
            for pair in round_.pairs:
                self._votes.close_battle(pair.battle, "risk")

    # --- votes -----------------------------------------------------------------------------------

    def vote(
        self,
        key: SessionKey,
        battle: str,
        preference: str,
        *,
        revision: int,
        dwell_ms: int | None,
        both_seen: bool | None,
    ) -> None:
        """Vote; see `VoteStore.cast` for what is refused.

        Args:
            key: The comparison.
            battle: The battle that the page showed, which need not be the newest.
            preference: One of `Preference`.
            revision: The ballot's revision that the page knew; makes the request idempotent.
            dwell_ms: As reported by the page; capped by the time since the replies ended.
            both_seen: As reported by the page.
        """
        located = self.store.get(key).locate(battle)
        if dwell_ms is not None and located is not None and located[0].ended_at is not None:
            dwell_ms = min(dwell_ms, round(1000 * (self.store.now() - located[0].ended_at)))
        try:
            receipt = self._votes.cast(
                battle,
                key.visitor,
                preference,
                dwell_ms=dwell_ms,
                both_seen=both_seen,
                token=f"cast-{revision}-{preference}",
            )
        except VoteRefusedError as error:
            if error.code == "already_voted":  # from another page
                standing = self._votes.standing(battle, key.visitor)
                self._store_receipt(key, battle, standing)
            raise
        self._store_receipt(key, battle, receipt)

    def explain(
        self,
        key: SessionKey,
        battle: str,
        tags: Sequence[str],
        note: str,
        token: str,
        steps: Steps = (None, None),
    ) -> None:
        """Add reasons and opinions of steps to a vote; see `VoteStore.revise` for what is refused.

        Raises:
            InputError: The names were shown (``compare_names_known``): the store would accept the
                reasons, but the vote would no longer count. After Clear it is unknown whether they were
                (``battle_unknown``).
        """
        located = self.store.get(key).locate(battle)
        if located is not None and located[1].ballot.seen_names:
            raise InputError("the names were shown", code="compare_names_known")
        standing = self._votes.standing(battle, key.visitor)
        if standing is None or standing.preference is None:
            raise VoteRefusedError("there is no vote", code="not_voted")
        if located is None:
            raise VoteRefusedError("the comparison was cleared", code="battle_unknown")
        receipt = self._votes.revise(
            battle,
            key.visitor,
            standing.preference,
            tags=tags,
            note=note,
            steps=steps if any(steps) else None,
            token=f"why-{token}",
        )
        self._store_receipt(key, battle, receipt, tags=tuple(tags), note=note, steps=steps)

    def undo(self, key: SessionKey, battle: str, revision: int) -> None:
        """Take a vote back; see `VoteStore.undo` for what is refused."""
        receipt = self._votes.undo(battle, key.visitor, token=f"undo-{revision}")
        self._store_receipt(key, battle, receipt)

    def reveal(self, key: SessionKey, battle: str) -> None:
        """Show which model wrote which reply; see `VoteStore.reveal` for what is refused."""
        revealed = self._votes.reveal(battle, key.visitor)
        standing = self._votes.standing(battle, key.visitor)
        self._change_ballot(
            key,
            battle,
            lambda ballot: replace(ballot, receipt=standing, reveal=revealed, seen_names=True),
        )

    def choose(self, key: SessionKey, side: int) -> None:
        """Continue the conversation from another reply of the last round.

        Raises:
            InputError: There is no such reply, or no vote yet (``compare_vote_first``).
        """

        def change(comparison: Comparison) -> Comparison:
            last = comparison.last
            if last is None or not 0 <= side < len(last.sides) or last.sides[side].has_failed:
                raise InputError("there is no such reply", code="turn_gone")
            if not last.has_vote:
                raise InputError("there is no vote", code="compare_vote_first")
            return comparison.with_round(replace(last, chosen=side))

        self.store.update(key, change)

    def _store_receipt(
        self,
        key: SessionKey,
        battle: str,
        receipt: VoteReceipt | None,
        tags: tuple[str, ...] = (),
        note: str = "",
        steps: Steps = (None, None),
    ) -> None:
        seconds = self._votes.limits.undo_seconds
        until = self.store.now() + seconds

        def changed(ballot: Ballot) -> Ballot:
            if receipt is None:
                return ballot
            stands = receipt.preference is not None
            return replace(
                ballot,
                receipt=receipt if stands else None,
                revision=receipt.number,
                tags=tags,
                note=note,
                steps=steps,
                undo_until=until,
                reveal=ballot.reveal if stands else None,
            )

        self._change_ballot(key, battle, changed)

    def _change_ballot(
        self, key: SessionKey, battle: str, change: Callable[[Ballot], Ballot]
    ) -> None:
        def changed(comparison: Comparison) -> Comparison:
            located = comparison.locate(battle)
            if located is None:
                return comparison
            pair = located[1]
            return comparison.with_pair(replace(pair, ballot=change(pair.ballot)))

        self.store.update(key, changed)

    def agreement(self, visitor: str) -> Agreement:
        """How often the visitor and the judge agree; see `VoteStore.agreement`."""
        return self._votes.agreement(visitor)

    # --- in the threads of a job -----------------------------------------------------------------

    def _write(self, job: RoundJob) -> None:
        plans = [side.plan for side in job.opened.sides]
        with self._admitted(job, [plan.model for plan in plans]) as policies:
            judge = self._loaded_judge(job, job.opened.judge)
            requests = [
                TurnRequest(policy, Controls(sampling=replace(policy.sampling, seed=plan.seed)))
                for plan in plans
                for policy in (policies[plan.model],)
            ]
            self._generate(job, job.dialogue, judge, requests)
            self._change_round(job, lambda round_: replace(round_, ended_at=self.store.now()))
            for record in job.records.values():
                self._metrics.count(record)
            for pair in job.opened.pairs:
                self._judge_pair(job, pair, judge)

    def _finish(self, job: RoundJob, number: int, event: TurnDone) -> None:
        job.records[number] = event.record
        result = SideResult.of(event.record)
        shown = result.turn if job.opened.with_reasoning else result.reply
        names = [
            name for entry in self._models.registry.entries for name in (entry.name, entry.title)
        ]
        leaked = says_who_wrote_it(shown, names, job.opened.message.text)
        result = replace(result, leaked=leaked)
        for pair in job.opened.pairs:
            if number in pair.sides:
                self._votes.finish_side(pair.battle, pair.sides.index(number), result)

        def ended(side: Side) -> Side:
            progress = side.progress.after(event)
            return replace(side, progress=progress, reply=result.reply, leaked=leaked)

        self._change_side(job, number, ended)

    def _fail(self, job: RoundJob, failure: Failure, number: int | None = None) -> None:
        def failed(side: Side) -> Side:
            return side if side.is_over else replace(side, progress=side.progress.failed(failure))

        for side in range(len(job.opened.sides)) if number is None else (number,):
            self._change_side(job, side, failed)
            for pair in job.opened.pairs:
                if side in pair.sides:
                    try:
                        self._votes.fail_side(pair.battle, pair.sides.index(side), failure)
                    except StoreError as error:  # an unfinished battle accepts no votes either
                        _log(error)

    def _abandon(self, job: RoundJob) -> None:
        self._fail(job, "")

    def _judge_pair(self, job: RoundJob, pair: Pair, judge: Judge | None) -> None:
        """Ask the judge to compare two replies; the page shows its verdict after the vote."""
        chances: Mapping[Preference, float] | None = None
        verdict: Preference | None = None
        located = self.store.get(job.key).locate(pair.battle)
        is_comparable = located is not None and not any(
            located[0].sides[number].has_failed for number in pair.sides
        )
        if judge is not None and is_comparable:
            first, second = (job.records[number] for number in pair.sides)
            try:
                chances = chances_between(judge, job.dialogue, first, second)
                verdict = None if chances is None else max(chances, key=chances.__getitem__)
                self._votes.record_verdict(pair.battle, judge.name, verdict)
            except CompeerError as error:
                _log(error)

        def judged(comparison: Comparison) -> Comparison:
            located = comparison.locate(pair.battle)
            if located is None:
                return comparison
            return comparison.with_pair(
                replace(located[1], verdict=verdict, chances=chances, judged=True)
            )

        self.store.update(job.key, judged)

    # --- what the threads write into the comparison ----------------------------------------------

    def _change(self, job: RoundJob, change: ProgressChange, number: int | None = None) -> None:
        def changed(side: Side) -> Side:
            return replace(side, progress=change(side.progress))

        for side in range(len(job.opened.sides)) if number is None else (number,):
            self._change_side(job, side, changed)

    def _change_side(self, job: RoundJob, number: int, change: Callable[[Side], Side]) -> None:
        self._change_round(
            job, lambda round_: round_.with_side(number, change(round_.sides[number]))
        )

    def _change_round(self, job: RoundJob, change: Callable[[Round], Round]) -> None:
        def changed(comparison: Comparison) -> Comparison:
            for round_ in comparison.rounds:
                if round_.key == job.opened.key:
                    return comparison.with_round(change(round_))
            return comparison  # cleared in the meantime

        self.store.update(job.key, changed)


def chances_between(
    judge: Judge, dialogue: Dialogue, first: TurnRecord, second: TurnRecord
) -> Mapping[Preference, float] | None:
    """Return the judge's probability of each answer about two replies, None if it gives no verdict.

    Each turn is judged with the other's reply as its reference, in both orders, and the probabilities
    are averaged, so neither position nor whose reasoning is read matters. If a turn is incomplete, only
    the replies are compared.
    """
    replies = (SideResult.of(first).reply, SideResult.of(second).reply)
    turns: tuple[Reading | str, ...] = (first.reading, second.reading)
    if not (first.reading.is_complete and second.reading.is_complete):
        turns = replies
    outcomes = [
        judgement.response for judgement in judge.judge(dialogue, turns, (replies[1], replies[0]))
    ]
    if not all(isinstance(outcome, ResponseVerdict) for outcome in outcomes):
        return None
    of_first, of_second = (
        outcome.probabilities for outcome in outcomes if isinstance(outcome, ResponseVerdict)
    )
    return {name: (of_first[name] + of_second[name.swapped()]) / 2 for name in Preference}


def _log(error: Exception) -> None:
    logger.error("a comparison failed: %s", trace_of(error))
