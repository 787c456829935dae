"""Rounds on their way: one thread for each side, all in one place of the line, watched by the page.

Order, sides, models and seeds are in the database before anything is generated. The threads write
what they get into the visitor's `Comparison`; handlers only look, so a page that was reloaded sees
the round go on. When the last watcher has left, all sides are stopped after a moment of grace.

Who writes on which side stays in this process until the person has voted: the models are loaded
before the first side begins and turns are counted when the last one has ended, so that neither a
status nor a counter tells one side from another.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from operator import methodcaller

from compeer_core.dialogue import Dialogue, Utterance, language_of
from compeer_core.errors import CompeerError, InputError, StoreError, VoteRefusedError
from compeer_core.logs import trace_of
from compeer_core.policy import Controls, Policy
from compeer_core.reasoning import Reading
from compeer_core.safety import RiskKind
from compeer_core.taxonomy import Preference
from compeer_core.turn import SEEDS, TurnDone, TurnRecord, take_turn
from compeer_core.unifireward import Judge, ResponseVerdict
from compeer_core.votes.battles import BattlePlan, SideResult, VoteReceipt, draw_sides
from compeer_core.votes.store import VoteStore
from ui_components.compare.comparison import Ballot, Comparison, Pair, Round, Side
from ui_components.compare.identity import says_who_wrote_it
from ui_components.server.admission_queue import AdmissionQueue, LineFullError, PlacesTakenError
from ui_components.server.metrics import Metrics
from ui_components.shared.generation import GRACE_SECONDS, Job
from ui_components.shared.models import Models
from ui_components.shared.progress import Failure, Phase, Progress
from ui_components.shared.session import MAX_TURNS
from ui_components.shared.session_store import SessionKey, SessionStore

logger = logging.getLogger(__name__)

DEADLINE_SECONDS = 240.0
"""Of one side; sides of one model may share its time."""
POLL_SECONDS = 0.05
BLIND_SIDES = 2


@dataclass(frozen=True)
class Wish:
    """What a round is asked for with."""

    models: tuple[str, ...]
    """Blind: two of these are drawn. Else all of them write."""
    blind: bool = True
    with_reasoning: bool = False
    keep_words: bool = False
    judge: str = ""
    """Empty: nobody judges."""


class Match(Job):
    """One round on its way."""

    def __init__(self, key: SessionKey, round_key: str, sides: int, grace_seconds: float) -> None:
        super().__init__(key, round_key, grace_seconds)
        self.side_stops = tuple(threading.Event() for _ in range(sides))


class Comparing:
    """All rounds on their way on one server, and the votes on those that have ended."""

    def __init__(
        self,
        models: Models,
        votes: VoteStore,
        metrics: Metrics,
        *,
        deadline_seconds: float = DEADLINE_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
        is_current: Callable[[SessionKey], bool] = lambda _: True,
    ) -> None:
        self.store = SessionStore(Comparison(), is_current=is_current)
        self._models = models
        self._votes = votes
        self._metrics = metrics
        self._deadline_seconds = deadline_seconds
        self._grace_seconds = grace_seconds
        self._matches: dict[SessionKey, Match] = {}
        self._opening: set[SessionKey] = set()
        self._lock = threading.Lock()

    def match(self, key: SessionKey) -> Match | None:
        """The round on its way in a comparison, if there is one."""
        with self._lock:
            return self._matches.get(key)

    def count(self) -> int:
        """How many rounds are on their way, those in line among them."""
        with self._lock:
            return len(self._matches)

    def stop(self, key: SessionKey, side: int | None = None) -> None:
        """End one side of the round on its way, or all of them."""
        match = self.match(key)
        if match is None:
            return
        if side is None:
            match.stop.set()
        elif 0 <= side < len(match.side_stops):
            match.side_stops[side].set()

    def forget(self, visitor: str) -> None:
        """End and delete the comparisons of a visitor."""
        with self._lock:
            matches = [match for key, match in self._matches.items() if key.visitor == visitor]
        for match in matches:
            match.stop.set()
        self.store.forget(visitor)

    # --- beginning a round -----------------------------------------------------------------------

    def begin(self, key: SessionKey, said: Utterance, wish: Wish, address: str | None) -> Match:
        """Open the battles of a new round, and begin to write its replies.

        Args:
            key: Whose comparison.
            said: The message.
            wish: Models and switches.
            address: Where the request came from; the store keeps a hash of it.

        Raises:
            InputError: A round is on its way (``already_writing``), the last one has no vote
                (``compare_vote_first``), there are too many pictures (``too_many_pictures``), or the
                visitor had everything deleted meanwhile (``forgotten``); nothing changed.
            StoreError: The database failed; nothing changed.
        """
        return self._begin(key, said, wish, address, again=False)

    def begin_again(self, key: SessionKey, wish: Wish, address: str | None) -> Match:
        """Draw again for the last message: a new round takes the place of the last one.

        Raises:
            InputError: As for `begin`; there is no round (``turn_gone``), or there is a vote on it
                (``compare_voted``).
            StoreError: The database failed; nothing changed.
        """
        return self._begin(key, None, wish, address, again=True)

    def _begin(
        self,
        key: SessionKey,
        said: Utterance | None,
        wish: Wish,
        address: str | None,
        *,
        again: bool,
    ) -> Match:
        with self._lock:
            if key in self._matches or key in self._opening:
                raise InputError("a round is on its way", code="already_writing")
            self._opening.add(key)
        try:
            before = self.store.get(key)
            last = before.last
            if again:
                if last is None:
                    raise InputError("there is no round", code="turn_gone")
                if last.has_vote:
                    raise InputError("there is a vote", code="compare_voted")
                before = replace(before, rounds=before.rounds[:-1])
                said = last.said
            elif before.risk:
                before = Comparison()
            elif len(before.rounds) >= MAX_TURNS:
                raise InputError("too many", code="too_many_turns", values={"limit": MAX_TURNS})
            elif last is not None and last.goes_on is None:
                raise InputError("there is no vote", code="compare_vote_first")
            assert said is not None
            opened = self._opened(key, before.dialogue(said), said, wish, address)
            try:
                kept = self.store.update(
                    key, lambda _: replace(before, rounds=(*before.rounds, opened))
                )
            except InputError:
                for pair in opened.pairs:
                    self._votes.close_battle(pair.battle, "no room")
                raise
            if kept.is_empty:
                raise InputError("everything was deleted meanwhile", code="forgotten")
            match = Match(key, opened.key, len(opened.sides), self._grace_seconds)
            with self._lock:
                self._matches[key] = match
            if not self.store.is_current(key):
                match.stop.set()  # `forget` may have come too early to find it
        finally:
            with self._lock:
                self._opening.discard(key)
        match.stop_unless_watched()
        threading.Thread(
            target=self._run,
            args=(match, opened, before.dialogue(said)),
            name="comparison",
            daemon=True,
        ).start()
        return match

    def _opened(
        self, key: SessionKey, dialogue: Dialogue, said: Utterance, wish: Wish, address: str | None
    ) -> Round:
        """Fix what the round will be, in the database."""
        seed = secrets.randbelow(SEEDS)
        drawn = draw_sides(wish.models, seed)
        plans = drawn[:BLIND_SIDES] if wish.blind else drawn
        language = language_of(said.text)
        pairs = []
        for first, second in combinations(range(len(plans)), 2):
            plan = BattlePlan(
                voter=key.visitor,
                dialogue=dialogue,
                sides=(plans[first], plans[second]),
                seed=seed,
                blind=wish.blind,
                with_reasoning=wish.with_reasoning,
                keep_words=wish.keep_words,
                language=language,
            )
            battle = self._votes.open_battle(plan, address, partial(self.store.is_current, key))
            pairs.append(Pair(battle.id, (first, second)))
        since = time.monotonic()
        progress = Progress(model="", judge=wish.judge or None, since=since)
        return Round(
            said=said,
            sides=tuple(Side(plan, progress) for plan in plans),
            pairs=tuple(pairs),
            blind=wish.blind,
            with_reasoning=wish.with_reasoning,
            keep_words=wish.keep_words,
            seed=seed,
            language=language,
            judge=wish.judge,
        )

    def end_for_risk(self, key: SessionKey, kind: RiskKind) -> None:
        """Take the whole conversation out of all counts, since somebody may need help.

        Any sign ends it, also one that `forbids_reply` lets a chat answer: nobody should be asked
        which of two replies to it is the better one.
        """
        self.stop(key)
        before = self.store.get(key)
        self.store.update(key, lambda _: Comparison(risk=kind))
        for one in before.rounds:
            for pair in one.pairs:
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
            key: Whose comparison.
            battle: Which battle the page showed, whatever the newest is by now.
            preference: One of `Preference`.
            revision: How much the page knew of; a request sent twice is answered twice.
            dwell_ms: As the page says. It cannot have been longer than the replies have been there.
            both_seen: As the page says.
        """
        found = self.store.get(key).found(battle)
        if dwell_ms is not None and found is not None and found[0].ended_at is not None:
            dwell_ms = min(dwell_ms, round(1000 * (self.store.now() - found[0].ended_at)))
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
                self._write_down(key, battle, standing)
            raise
        self._write_down(key, battle, receipt)

    def explain(
        self, key: SessionKey, battle: str, tags: Sequence[str], note: str, token: str
    ) -> None:
        """Add reasons to a vote; see `VoteStore.revise` for what is refused.

        Raises:
            InputError: The names were shown (``compare_names_known``): the store would take the
                reasons, but the vote would no longer count.
        """
        found = self.store.get(key).found(battle)
        if found is not None and found[1].ballot.seen_names:
            raise InputError("the names were shown", code="compare_names_known")
        standing = self._votes.standing(battle, key.visitor)
        if standing is None or standing.preference is None:
            raise VoteRefusedError("there is no vote", code="not_voted")
        receipt = self._votes.revise(
            battle, key.visitor, standing.preference, tags=tags, note=note, token=f"why-{token}"
        )
        self._write_down(key, battle, receipt, tags=tuple(tags), note=note)

    def undo(self, key: SessionKey, battle: str, revision: int) -> None:
        """Take a vote back; see `VoteStore.undo` for what is refused."""
        receipt = self._votes.undo(battle, key.visitor, token=f"undo-{revision}")
        self._write_down(key, battle, receipt)

    def reveal(self, key: SessionKey, battle: str) -> None:
        """Show who wrote what; see `VoteStore.reveal` for what is refused."""
        revealed = self._votes.reveal(battle, key.visitor)
        standing = self._votes.standing(battle, key.visitor)
        self._change_ballot(
            key,
            battle,
            lambda ballot: replace(ballot, receipt=standing, reveal=revealed, seen_names=True),
        )

    def choose(self, key: SessionKey, side: int) -> None:
        """Let the conversation go on from another reply of the last round.

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

    def _write_down(
        self,
        key: SessionKey,
        battle: str,
        receipt: VoteReceipt | None,
        tags: tuple[str, ...] = (),
        note: str = "",
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
                undo_until=until,
                reveal=ballot.reveal if stands else None,
            )

        self._change_ballot(key, battle, changed)

    def _change_ballot(
        self, key: SessionKey, battle: str, change: Callable[[Ballot], Ballot]
    ) -> None:
        def changed(comparison: Comparison) -> Comparison:
            found = comparison.found(battle)
            if found is None:
                return comparison
            pair = found[1]
            return comparison.with_pair(replace(pair, ballot=change(pair.ballot)))

        self.store.update(key, changed)

    # --- in the threads of a round ---------------------------------------------------------------

    def _run(self, match: Match, opened: Round, dialogue: Dialogue) -> None:
        try:
            self._write(match, opened, dialogue)
        except PlacesTakenError:
            self._fail_all(match, opened, "places")
        except LineFullError:
            self._fail_all(match, opened, "line")
        except Exception as error:  # noqa: BLE001  (a thread's last resort: the page must hear of it)
            _log(error)
            self._fail_all(match, opened, "reply")
        finally:
            with self._lock:
                self._matches.pop(match.key, None)
            match.over.set()

    def _write(self, match: Match, opened: Round, dialogue: Dialogue) -> None:
        names = [side.plan.model for side in opened.sides]
        with ExitStack() as stack:
            for line in self._lines(names):
                ticket = stack.enter_context(line.place(match.key.caller))
                while not line.wait(ticket):
                    if match.stop.is_set():
                        self._fail_all(match, opened, "")
                        return
                    self._change_all(match, partial(replace, place=line.ahead(ticket)))
            self._phase(match, "loading")
            try:
                policies = {name: self._models.policy(name) for name in names}
            except CompeerError as error:
                _log(error)
                self._fail_all(match, opened, "model")
                return
            judge = self._judge(opened.judge)
            self._phase(match, "writing")
            records = self._write_sides(match, opened, dialogue, policies, judge)
            self._end_round(match)
            for record in records.values():
                self._metrics.count(record)
            for pair in opened.pairs:
                self._compare(match, pair, dialogue, judge, records)

    def _lines(self, names: Sequence[str]) -> list[AdmissionQueue]:
        """One place for all sides of a line, and lines in one order for everybody.

        Else two comparisons could each hold the place that the other waits for.
        """
        lines: dict[int, AdmissionQueue] = {}
        for entry in self._models.registry.entries:
            line = self._models.line(entry.name)
            if entry.name in names:
                lines.setdefault(id(line), line)
        shared = self._models.line("")
        return sorted(lines.values(), key=lambda line: line is not shared)

    def _judge(self, name: str) -> Judge | None:
        if not name:
            return None
        try:
            return self._models.judge(name)
        except CompeerError as error:
            _log(error)
            return None

    def _write_sides(
        self,
        match: Match,
        opened: Round,
        dialogue: Dialogue,
        policies: Mapping[str, Policy],
        judge: Judge | None,
    ) -> dict[int, TurnRecord]:
        records: dict[int, TurnRecord] = {}

        def write(number: int) -> None:
            record = self._write_side(
                match, opened, number, dialogue, policies[opened.sides[number].plan.model], judge
            )
            if record is not None:
                records[number] = record

        threads = [
            threading.Thread(target=write, args=(number,), name="side", daemon=True)
            for number in range(len(opened.sides))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                if match.stop.is_set():
                    for stop in match.side_stops:
                        stop.set()
                thread.join(POLL_SECONDS)
        return records

    def _write_side(
        self,
        match: Match,
        opened: Round,
        number: int,
        dialogue: Dialogue,
        policy: Policy,
        judge: Judge | None,
    ) -> TurnRecord | None:
        """Write one side, and put it down as ended, however it ended."""
        plan = opened.sides[number].plan
        record: TurnRecord | None = None
        try:
            events = take_turn(
                policy,
                judge,
                dialogue,
                Controls(sampling=replace(policy.sampling, seed=plan.seed)),
                match.side_stops[number],
                deadline_seconds=self._deadline_seconds,
            )
            with closing(events):
                for event in events:
                    if isinstance(event, TurnDone):
                        record = event.record
                        self._finish(match, opened, number, record)
                    else:
                        self._change(match, number, methodcaller("after", event))
        except Exception as error:  # noqa: BLE001  (one side must not end the other)
            _log(error)
            self._fail(match, opened, number, "reply")
        return record

    def _finish(self, match: Match, opened: Round, number: int, record: TurnRecord) -> None:
        result = SideResult.of(record)
        shown = result.turn if opened.with_reasoning else result.reply
        entries = self._models.registry.entries
        names = [name for entry in entries for name in (entry.name, entry.title)]
        leaked = says_who_wrote_it(shown, names, opened.said.text)
        result = replace(result, leaked=leaked)
        for pair in opened.pairs:
            if number in pair.sides:
                self._votes.finish_side(pair.battle, pair.sides.index(number), result)

        def ended(side: Side) -> Side:
            progress = side.progress.after(TurnDone(record))
            return replace(side, progress=progress, reply=result.reply, leaked=leaked)

        self._change_side(match, number, ended)

    def _fail_all(self, match: Match, opened: Round, failure: Failure) -> None:
        for number in range(len(opened.sides)):
            self._fail(match, opened, number, failure)

    def _fail(self, match: Match, opened: Round, number: int, failure: Failure) -> None:
        def failed(side: Side) -> Side:
            if side.is_over:
                return side
            return replace(side, progress=side.progress.failed(failure))

        self._change_side(match, number, failed)
        for pair in opened.pairs:
            if number in pair.sides:
                try:
                    self._votes.fail_side(pair.battle, pair.sides.index(number), failure)
                except StoreError as error:  # a battle without an end takes no votes either
                    _log(error)

    def _compare(
        self,
        match: Match,
        pair: Pair,
        dialogue: Dialogue,
        judge: Judge | None,
        records: Mapping[int, TurnRecord],
    ) -> None:
        """Ask the judge about the two replies; the answer is shown after the vote."""
        verdict: Preference | None = None
        sides = self.store.get(match.key).found(pair.battle)
        able = sides is not None and not any(sides[0].sides[n].has_failed for n in pair.sides)
        if judge is not None and able:
            first, second = (records[number] for number in pair.sides)
            try:
                verdict = verdict_between(judge, dialogue, first, second)
                self._votes.record_verdict(pair.battle, judge.name, verdict)
            except CompeerError as error:
                _log(error)

        def judged(comparison: Comparison) -> Comparison:
            found = comparison.found(pair.battle)
            if found is None:
                return comparison
            return comparison.with_pair(replace(found[1], verdict=verdict, judged=True))

        self.store.update(match.key, judged)

    # --- what the threads write into the comparison ----------------------------------------------

    def _phase(self, match: Match, phase: Phase) -> None:
        self._change_all(match, partial(replace, phase=phase, since=time.monotonic()))

    def _change_all(self, match: Match, change: Callable[[Progress], Progress]) -> None:
        for number in range(len(match.side_stops)):
            self._change(match, number, change)

    def _change(self, match: Match, number: int, change: Callable[[Progress], Progress]) -> None:
        self._change_side(match, number, lambda side: replace(side, progress=change(side.progress)))

    def _change_side(self, match: Match, number: int, change: Callable[[Side], Side]) -> None:
        self._change_round(match, lambda one: one.with_side(number, change(one.sides[number])))

    def _end_round(self, match: Match) -> None:
        self._change_round(match, lambda one: replace(one, ended_at=self.store.now()))

    def _change_round(self, match: Match, change: Callable[[Round], Round]) -> None:
        def changed(comparison: Comparison) -> Comparison:
            for one in comparison.rounds:
                if one.key == match.turn_key:
                    return comparison.with_round(change(one))
            return comparison  # the visitor has cleared it meanwhile

        self.store.update(match.key, changed)


def verdict_between(
    judge: Judge, dialogue: Dialogue, first: TurnRecord, second: TurnRecord
) -> Preference | None:
    """Return what a judge says of two replies, None where it cannot say.

    Each turn is asked about with the other's reply as its reference, both in both orders, and all
    is averaged: neither the place nor whose reasoning was read first counts. Where a turn lacks a
    part, replies alone are compared.
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
    one, other = (
        outcome.probabilities for outcome in outcomes if isinstance(outcome, ResponseVerdict)
    )
    averaged = {name: one[name] + other[name.swapped()] for name in Preference}
    return max(averaged, key=lambda name: averaged[name])


def _log(error: Exception) -> None:
    logger.error("a comparison met a %s", trace_of(error))
