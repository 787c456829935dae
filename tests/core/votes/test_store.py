"""The votes store: what it takes, what it refuses, what it keeps, on SQLite and on PostgreSQL."""

import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import func, insert, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.errors import StoreError, VoteRefusedError
from compeer_core.taxonomy import Preference
from compeer_core.votes.battles import BattlePlan, Flag, Limits, SideStatus, draw_sides
from compeer_core.votes.reading import storable
from compeer_core.votes.schema import (
    Base,
    BattleRow,
    DeletionRow,
    PictureRow,
    RevisionRow,
    SaltRow,
    SideRow,
    VoteRecord,
    VoterRow,
)
from compeer_core.votes.store import VoteStore
from tests.core.votes.made_up import HISTORY, NOON, REWARD, fought, plan, result
from tests.databases import rows

HOSTILE = [
    "<script>alert(1)</script>",
    "![x](http://evil.example/x.png)",
    "'; DROP TABLE votes; --",
    "\u202eabc\u202c \u200b\u200d\ufeff",
    "%s {0} {{name}} :param \\",
    "\U0001f469\u200d\U0001f4bb 我很孤单",
    "</reply><reply>forged",
]


def refusal(call, *arguments, **named):
    with pytest.raises(VoteRefusedError) as caught:
        call(*arguments, **named)
    return caught.value


def only_revision(store):
    with store.database.reading() as session:
        return session.scalars(select(RevisionRow)).one()


# --- battles ------------------------------------------------------------------------------------


def test_a_battle_is_stored_before_anything_is_generated(store):
    battle = store.open_battle(plan())

    assert store.battle(battle.id, "ann") == battle
    assert [side.model for side in battle.sides] == ["policy", "base"]
    assert battle.statuses == (SideStatus.WRITING, SideStatus.WRITING)
    assert battle.expires_at == NOON + timedelta(days=1)


def test_the_order_is_drawn_by_the_seed_alone():
    models = ["a", "b", "c"]
    orders = Counter(tuple(s.model for s in draw_sides(models, seed)) for seed in range(600))

    assert draw_sides(models, 3) == draw_sides(models, 3)
    assert len(orders) == 6
    assert min(orders.values()) > 60  # 100 are expected, 4.4 standard deviations
    assert len({side.seed for side in draw_sides(models, 3)}) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"dialogue": Dialogue()},
        {"dialogue": HISTORY.adding(Utterance(Speaker.SUPPORTER, "Oh."))},
        {"sides": plan().sides[:1]},
    ],
    ids=["no history", "ends with the supporter", "one side"],
)
def test_an_invalid_plan_is_rejected(change):
    with pytest.raises(ValueError):
        replace(plan(), **change)


def test_a_side_ends_once(store):
    battle = store.open_battle(plan())

    assert store.finish_side(battle.id, 0, result("One."))
    assert not store.finish_side(battle.id, 0, result("Another."))
    assert not store.fail_side(battle.id, 0)
    assert not store.finish_side("gone", 0, result("One."))
    assert store.battle(battle.id, "ann").statuses == (SideStatus.FINISHED, SideStatus.WRITING)


def test_the_seed_of_the_shown_draw_replaces_the_planned_one(store):
    battle = store.open_battle(plan())

    store.finish_side(battle.id, 0, result("One.", seed=2**31 - 1))
    store.fail_side(battle.id, 1)

    seeds = [side.seed for side in store.battle(battle.id, "ann").sides]
    assert seeds == [2**31 - 1, battle.sides[1].seed]


@pytest.mark.parametrize("status", [SideStatus.FINISHED, SideStatus.STOPPED])
def test_a_side_without_a_reply_has_failed(store, status):
    battle = store.open_battle(plan())

    store.finish_side(battle.id, 0, result(" \n", status=status))

    assert store.battle(battle.id, "ann").statuses[0] is SideStatus.FAILED


# --- votes that are taken -----------------------------------------------------------------------


def test_a_vote_is_stored_completely(store):
    battle = fought(store)

    receipt = store.cast(
        battle,
        "ann",
        Preference.SECOND,
        tags=["empathy", "generic", "empathy"],
        note=" Warm.\r\nA bit long. ",
        dwell_ms=9000,
        both_seen=True,
        steps=((True, False, None), None),
        token="t1",
    )

    assert (receipt.number, receipt.preference, receipt.at) == (1, Preference.SECOND, NOON)
    assert receipt.counted
    assert receipt.flags == ()
    kept = only_revision(store)
    assert kept.tags == ["empathy", "generic"]
    assert kept.note == "Warm.\nA bit long."
    assert kept.steps == [[True, False, None], None]


def test_a_vote_is_read_as_the_board_wants_it(store):
    battle = store.open_battle(plan(with_reasoning=True, topic="exams"))
    scored = replace(REWARD, total=2.0)
    store.finish_side(battle.id, 0, result("One.", reward=scored))
    store.finish_side(battle.id, 1, result("Twice.", reward=REWARD))
    store.record_verdict(battle.id, "judge", Preference.BOTH)
    store.cast(battle.id, "ann", "first", dwell_ms=5000)

    [vote] = store.votes()

    assert (vote.left, vote.right, vote.preference) == ("policy", "base", Preference.FIRST)
    assert (vote.blind, vote.with_reasoning, vote.has_image) == (True, True, False)
    assert (vote.language, vote.topic) == ("en", "exams")
    assert (vote.at, vote.dwell_ms, vote.flags) == (NOON, 5000, ())
    assert (vote.verdict, vote.rewards, vote.lengths) == (Preference.BOTH, (2.0, None), (4, 6))


def test_a_pseudonym_leaves_the_store_instead_of_the_id(store, clock):
    for name in ("ann", "ann", "bo"):
        clock.forward(seconds=1)
        store.cast(fought(store, name), name, "first")

    voters = [vote.voter for vote in store.votes()]

    assert voters[0] == voters[1] != voters[2]
    assert not {"ann", "bo"} & set(voters)


def test_a_request_that_is_sent_again_is_one_vote(store, clock):
    battle = fought(store)
    first = store.cast(battle, "ann", "first", token="t1")
    clock.forward(days=2)

    assert store.cast(battle, "ann", "second", token="t1") == first
    assert rows(store, RevisionRow) == 1


def test_a_stopped_side_can_be_voted_on_and_is_flagged(store):
    battle = store.open_battle(plan())
    store.finish_side(battle.id, 0, result("One."))
    store.finish_side(battle.id, 1, result("Two, but", status=SideStatus.STOPPED))

    receipt = store.cast(battle.id, "ann", "first")

    assert receipt.flags == (Flag.STOPPED,)
    assert not receipt.counted


# --- votes that are not taken -------------------------------------------------------------------


def test_a_second_vote_is_rejected_with_the_stored_one(store):
    battle = fought(store)
    store.cast(battle, "ann", "both", token="tab 1")

    error = refusal(store.cast, battle, "ann", "first", token="tab 2")

    assert (error.code, error.values) == ("already_voted", {"preference": "both"})
    assert store.standing(battle, "ann").preference is Preference.BOTH


@pytest.mark.parametrize("same_token", [False, True], ids=["raw calls", "one request, repeated"])
def test_votes_at_the_same_moment_are_one_vote(store, same_token):
    battle = fought(store)
    together = threading.Barrier(8)

    def vote(number):
        together.wait()
        try:
            return store.cast(battle, "ann", "first", token="t" if same_token else f"t{number}")
        except VoteRefusedError as error:
            return error.code

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(vote, range(8)))

    refused = [outcome for outcome in outcomes if outcome == "already_voted"]
    assert len(refused) == (0 if same_token else 7)
    assert rows(store, RevisionRow) == rows(store, VoteRecord) == 1


def test_the_database_itself_refuses_a_second_vote(store):
    battle = fought(store)
    store.cast(battle, "ann", "first")

    with pytest.raises(StoreError) as caught, store.database.writing() as session:
        session.execute(insert(VoteRecord).values(battle_id=battle, voter_id="ann"))

    assert isinstance(caught.value.__cause__, IntegrityError)
    assert rows(store, VoteRecord) == 1


@pytest.mark.parametrize(
    ("battle", "voter", "code"),
    [
        ("own", "mallory", "battle_not_yours"),
        ("own", "", "battle_not_yours"),
        ("own", "ann\udcff", "battle_not_yours"),
        ("unknown", "ann", "battle_unknown"),
        ("", "ann", "battle_unknown"),
        ("' OR 1=1 --", "ann", "battle_unknown"),
        ("a\x00b", "ann", "battle_unknown"),
        ("a\ud800", "ann", "battle_unknown"),
        ("x" * 100_000, "ann", "battle_unknown"),
    ],
)
def test_votes_in_battles_of_others_or_unknown_ones_are_rejected(store, battle, voter, code):
    own = fought(store)
    battle = own if battle == "own" else battle

    for call in (store.cast, store.revise):
        assert refusal(call, battle, voter, "first").code == code
    for call in (store.undo, store.standing, store.reveal, store.battle):
        assert refusal(call, battle, voter).code == code
    assert rows(store, VoteRecord) == 0


def test_votes_before_both_sides_have_ended_are_rejected(store):
    battle = store.open_battle(plan()).id
    assert refusal(store.cast, battle, "ann", "first").code == "battle_not_finished"

    store.finish_side(battle, 1, result())
    assert refusal(store.cast, battle, "ann", "first").code == "battle_not_finished"

    store.finish_side(battle, 0, result())
    assert store.cast(battle, "ann", "first").counted


def test_votes_are_rejected_if_a_side_failed(store):
    battle = store.open_battle(plan()).id
    store.finish_side(battle, 0, result())
    store.fail_side(battle, 1, "out of memory")

    assert refusal(store.cast, battle, "ann", "first").code == "battle_failed"


def test_votes_on_an_expired_battle_are_rejected(store, clock):
    battle = fought(store)
    clock.forward(hours=24)
    store.cast(battle, "ann", "first")
    clock.forward(seconds=1)

    assert refusal(store.revise, battle, "ann", "second").code == "battle_expired"


@pytest.mark.parametrize(
    ("named", "code"),
    [
        ({"preference": "left"}, "preference_unknown"),
        ({"preference": ""}, "preference_unknown"),
        ({"preference": None}, "preference_unknown"),
        ({"preference": "first", "tags": ["empathy", "<b>"]}, "tag_unknown"),
        ({"preference": "first", "note": "x" * 10_001}, "note_too_long"),
    ],
)
def test_an_invalid_vote_is_rejected(store, named, code):
    battle = fought(store)

    assert refusal(store.cast, battle, "ann", **named).code == code
    assert rows(store, VoteRecord) == 0


def test_a_note_of_ten_thousand_characters_is_stored(store):
    note = "我" * 9_999 + "\U0001f642"
    store.cast(fought(store), "ann", "first", note=note)

    assert only_revision(store).note == note


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_text_comes_back_as_it_went_in(store, hostile):
    dialogue = Dialogue((Utterance(Speaker.SEEKER, hostile),), id=hostile)
    battle = store.open_battle(plan("ann" + hostile, dialogue=dialogue, topic=hostile))
    for side in (0, 1):
        store.finish_side(battle.id, side, result(hostile))
    store.cast(battle.id, "ann" + hostile, "first", note=hostile, token=hostile)

    assert only_revision(store).note == hostile.strip()
    with store.database.reading() as session:
        kept = session.scalars(select(BattleRow)).one()
        assert kept.history[0]["text"] == kept.topic == hostile
        assert [side.reply for side in kept.sides] == [hostile] * 2


def test_what_no_database_takes_is_left_out(store):
    text = "a\x00b\ud800c\x1b[0m\n\td"
    dialogue = Dialogue((Utterance(Speaker.SEEKER, text),))
    battle = store.open_battle(plan(dialogue=dialogue))
    for side in (0, 1):
        store.finish_side(battle.id, side, result(text, error=text))

    store.cast(battle.id, "ann", "first", note=text, token=text)

    assert storable(text) == only_revision(store).note == "abc[0m\n\td"


@pytest.mark.parametrize("dwell", [-1, 2**31, 10**30, "9", 1.5, True, None])
def test_an_impossible_duration_is_not_stored(store, dwell):
    receipt = store.cast(fought(store), "ann", "first", dwell_ms=dwell)

    assert only_revision(store).dwell_ms is None
    assert receipt.flags == ()


# --- second thoughts ----------------------------------------------------------------------------


def test_the_last_revision_counts_and_all_are_stored(store, clock):
    battle = fought(store)
    store.cast(battle, "ann", "first", note="at first")
    clock.forward(seconds=60)

    assert store.revise(battle, "ann", "neither", note="then").number == 2

    [vote] = store.votes()
    assert (vote.preference, vote.at) == (Preference.NEITHER, NOON + timedelta(seconds=60))
    with store.database.reading() as session:
        notes = session.scalars(select(RevisionRow.note).order_by(RevisionRow.number)).all()
    assert notes == ["at first", "then"]


def test_votes_are_read_as_they_stood_at_a_time(store, clock):
    battle = fought(store)
    store.cast(battle, "ann", "first")
    clock.forward(minutes=1)
    store.revise(battle, "ann", "second")
    clock.forward(seconds=5)
    store.undo(battle, "ann")

    def preferences(seconds):
        return [vote.preference for vote in store.votes(NOON + timedelta(seconds=seconds))]

    assert preferences(-1) == []
    assert preferences(0) == preferences(59) == [Preference.FIRST]
    assert preferences(60) == [Preference.SECOND]
    assert preferences(65) == list(store.votes()) == []


def test_a_vote_is_taken_back_within_ten_seconds_and_may_be_given_anew(store, clock):
    battle = fought(store)
    store.cast(battle, "ann", "first")
    clock.forward(seconds=10)

    receipt = store.undo(battle, "ann")

    assert (receipt.preference, receipt.counted) == (None, False)
    assert store.standing(battle, "ann") is None
    assert refusal(store.undo, battle, "ann").code == "not_voted"
    assert store.cast(battle, "ann", "second").number == 3


def test_a_vote_is_not_taken_back_after_ten_seconds(store, clock):
    battle = fought(store)
    store.cast(battle, "ann", "first")
    clock.forward(seconds=10.1)

    assert refusal(store.undo, battle, "ann").code == "undo_too_late"
    assert store.standing(battle, "ann").preference is Preference.FIRST


def test_an_undo_that_is_sent_again_is_one_undo(store):
    battle = fought(store)
    store.cast(battle, "ann", "first")

    assert store.undo(battle, "ann", token="u") == store.undo(battle, "ann", token="u")


def test_nothing_is_revised_or_taken_back_that_is_not_there(store):
    battle = fought(store)

    assert refusal(store.revise, battle, "ann", "first").code == "not_voted"
    assert refusal(store.undo, battle, "ann").code == "not_voted"


def test_a_clock_that_is_set_back_does_not_turn_revisions_round(store, clock):
    battle = fought(store)
    store.cast(battle, "ann", "first")
    clock.forward(hours=-1)

    assert store.revise(battle, "ann", "second").at == NOON
    assert [vote.preference for vote in store.votes(NOON)] == [Preference.SECOND]


def test_the_database_refuses_to_change_a_revision(store):
    store.cast(fought(store), "ann", "first")

    with pytest.raises(StoreError, match="never changed"), store.database.writing() as session:
        session.execute(update(RevisionRow).values(preference="second"))

    assert only_revision(store).preference == "first"


# --- the reveal ---------------------------------------------------------------------------------


def test_names_are_revealed_after_the_vote(store):
    battle = store.open_battle(plan()).id
    for side in (0, 1):
        store.finish_side(battle, side, result(reward=REWARD if side else None))
    store.record_verdict(battle, "judge", Preference.SECOND)
    assert refusal(store.reveal, battle, "ann").code == "not_voted"

    store.cast(battle, "ann", "first")
    told = store.reveal(battle, "ann")

    assert told.models == ("policy", "base")
    assert told.rewards == (None, REWARD)
    assert told.verdict is Preference.SECOND


def test_who_knows_the_names_is_flagged(store):
    battle = fought(store)
    store.cast(battle, "ann", "first")
    assert store.revise(battle, "ann", "both").flags == ()
    store.reveal(battle, "ann")

    assert store.revise(battle, "ann", "second").flags == (Flag.AFTER_REVEAL,)


def test_a_blind_vote_is_final_once_the_names_were_shown(store):
    blind, named = fought(store), fought(store, blind=False)
    for battle in (blind, named):
        store.cast(battle, "ann", "first")
        store.reveal(battle, "ann")

    assert refusal(store.undo, blind, "ann").code == "undo_revealed"
    assert store.standing(blind, "ann").counted

    store.undo(named, "ann")
    assert refusal(store.reveal, named, "ann").code == "not_voted"
    assert store.cast(named, "ann", "second").flags == (Flag.AFTER_REVEAL,)


# --- doubts -------------------------------------------------------------------------------------


def test_suspicious_votes_are_stored_with_the_reasons(store):
    quick = store.cast(fought(store), "ann", "first", dwell_ms=1499, both_seen=False)
    slow = store.cast(fought(store), "ann", "first", dwell_ms=1500, both_seen=True)
    leaking = store.open_battle(plan()).id
    store.finish_side(leaking, 0, result(leaked=None))
    store.finish_side(leaking, 1, result(leaked=True))
    named = store.cast(fought(store, blind=False), "ann", "first")

    assert quick.flags == (Flag.NOT_BOTH_SEEN, Flag.TOO_FAST)
    assert slow.counted
    assert store.cast(leaking, "ann", "first").flags == (Flag.LEAKED,)
    assert (named.flags, named.counted) == ((), False)


def test_very_many_votes_of_one_person_are_flagged(url, clock):
    with VoteStore(url, Limits(votes_per_minute=3), clock) as store:
        receipts = [store.cast(fought(store), "ann", "first") for _ in range(4)]
        other = store.cast(fought(store, "bo"), "bo", "first")
        clock.forward(seconds=60)
        later = store.cast(fought(store), "ann", "first")

    assert [receipt.counted for receipt in receipts] == [True] * 3 + [False]
    assert receipts[3].flags == (Flag.RATE_LIMITED,)
    assert other.counted
    assert later.counted


def test_very_many_votes_from_one_address_are_flagged(url, clock):
    limits = Limits(votes_per_minute_and_address=2)
    with VoteStore(url, limits, clock) as store:

        def vote(voter, address):
            battle = store.open_battle(plan(voter), address).id
            for side in (0, 1):
                store.finish_side(battle, side, result())
            return store.cast(battle, voter, "first").flags

        assert vote("a", "192.0.2.1") == vote("b", "192.0.2.1") == ()
        assert vote("c", "192.0.2.1") == (Flag.RATE_LIMITED,)
        assert vote("d", "192.0.2.2") == ()


def test_an_address_is_stored_as_a_hash_whose_salt_is_discarded(store, clock):
    def hashed():
        store.open_battle(plan(), "192.0.2.1")
        with store.database.reading() as session:
            salts = session.scalars(select(SaltRow.day).order_by(SaltRow.day)).all()
            return session.scalars(select(VoterRow.address_hash)).one(), salts

    monday, _ = hashed()
    assert hashed()[0] == monday
    clock.forward(days=1)
    tuesday, salts = hashed()
    assert salts == ["2026-11-21", "2026-11-22"]
    clock.forward(days=1)
    _, salts = hashed()

    assert tuesday != monday
    assert re.fullmatch("[0-9a-f]{32}", monday)  # an address would show by its dots
    assert salts == ["2026-11-22", "2026-11-23"]


# --- words, pictures, and their end -------------------------------------------------------------


def words(store):
    with store.database.reading() as session:
        battles = session.scalars(select(BattleRow)).all()
        return [
            text
            for battle in battles
            for text in (battle.history, *(t for s in battle.sides for t in (s.turn, s.reply)))
            if text is not None
        ]


def test_without_consent_no_text_is_stored_and_the_vote_counts(store, picture):
    shown = HISTORY.adding(Utterance(Speaker.SEEKER, "Look.", (picture(),)))
    battle = fought(store, keep_words=False, dialogue=shown)

    assert store.cast(battle, "ann", "first").counted
    assert words(store) == []
    assert rows(store, PictureRow) == 0
    [vote] = store.votes()
    assert (vote.has_image, vote.lengths) == (True, (14, 24))


def test_a_battle_that_is_closed_loses_its_words_and_takes_no_votes(store, picture):
    shown = HISTORY.adding(Utterance(Speaker.SEEKER, "Look.", (picture(1),)))
    both = HISTORY.adding(Utterance(Speaker.SEEKER, "Look.", (picture(1), picture(2))))
    kept, closed = fought(store, dialogue=shown), fought(store, dialogue=both)
    store.cast(closed, "ann", "first", token="t")
    assert rows(store, PictureRow) == 2

    assert store.close_battle(closed, "crisis")

    assert refusal(store.revise, closed, "ann", "both").code == "battle_closed"
    assert [vote.flags for vote in store.votes()] == [("closed",)]
    assert len(words(store)) == 5
    assert rows(store, PictureRow) == 1
    assert store.cast(kept, "ann", "first").counted
    assert not store.close_battle("gone", "crisis")


def test_everything_of_a_person_can_be_deleted(store, picture):
    shown = HISTORY.adding(Utterance(Speaker.SEEKER, "Look.", (picture(),)))
    for voter in ("ann", "bo"):
        store.cast(fought(store, voter, dialogue=shown), voter, "first", note="mine")
    battle = fought(store, "ann")

    deletion = store.delete_voter("ann")

    assert (deletion.battles, deletion.votes) == (2, 1)
    counted = [rows(store, table) for table in (VoterRow, BattleRow, SideRow, VoteRecord)]
    assert counted == [1, 1, 2, 1]
    assert rows(store, RevisionRow) == rows(store, PictureRow) == 1
    assert refusal(store.cast, battle, "ann", "first").code == "battle_unknown"
    assert not store.finish_side(battle, 0, result())
    assert store.delete_voter("ann").votes == 0
    with store.database.reading() as session:
        assert session.scalar(select(func.sum(DeletionRow.votes))) == 1


def test_no_table_is_left_with_anything_of_a_person_who_left(store, picture):
    shown = HISTORY.adding(Utterance(Speaker.SEEKER, "Look.", (picture(),)))
    store.cast(fought(store, "ann", dialogue=shown), "ann", "first", steps=((True,) * 3, None))
    store.delete_voter("ann")

    with store.database.reading() as session:
        left = {
            name: session.scalar(select(func.count()).select_from(table))
            for name, table in Base.metadata.tables.items()
        }
    assert {name for name, count in left.items() if count} == {"deletions"}


def test_votes_are_not_lost_or_orphaned_when_their_owner_leaves_meanwhile(store):
    battles = [fought(store, "ann") for _ in range(12)]
    together = threading.Barrier(4)

    def vote(own):
        together.wait()
        codes = []
        for battle in own:
            try:
                store.cast(battle, "ann", "first")
            except VoteRefusedError as error:
                codes.append(error.code)
        return codes

    def leave():
        together.wait()
        store.delete_voter("ann")

    with ThreadPoolExecutor(4) as pool:
        left = pool.submit(leave)
        codes = [
            code for each in pool.map(vote, (battles[i::3] for i in range(3))) for code in each
        ]
        left.result()

    assert set(codes) <= {"battle_unknown"}
    assert rows(store, VoteRecord) == rows(store, RevisionRow) == rows(store, VoterRow) == 0


def test_a_battle_that_is_not_wanted_any_more_is_not_opened(store):
    assert refusal(store.open_battle, plan("ann"), None, lambda: False).code == "forgotten"
    assert rows(store, BattleRow) == rows(store, VoterRow) == rows(store, PictureRow) == 0


@pytest.mark.parametrize("is_known", [False, True])
def test_a_deletion_while_a_battle_is_being_opened_deletes_the_battle(store, is_known):
    if is_known:
        fought(store, "ann")
    with ThreadPoolExecutor(1) as pool:
        leaving = []

        def is_wanted():
            leaving.append(pool.submit(store.delete_voter, "ann"))
            wait(leaving, timeout=0.5)  # it must not end before the battle is there
            return True

        store.open_battle(plan("ann"), None, is_wanted)
        assert leaving[0].result().battles == 1 + is_known

    assert rows(store, BattleRow) == rows(store, VoterRow) == rows(store, PictureRow) == 0


# --- a stamp of all votes -----------------------------------------------------------------------


def test_a_stamp_changes_with_whatever_changes_votes(store, clock):
    seen = [store.stamp()]

    def changed():
        seen.append(store.stamp())
        return len(set(seen)) == len(seen)

    battle = fought(store)
    assert store.stamp() == seen[0]  # nobody has voted
    store.cast(battle, "ann", "first")
    assert changed()
    store.revise(battle, "ann", "both")
    assert changed()
    store.record_verdict(battle, "judge", Preference.FIRST)
    assert changed()
    store.undo(battle, "ann")
    assert changed()
    store.close_battle(battle, "crisis")
    assert changed()
    store.delete_voter("ann")
    assert changed()


def test_a_stamp_of_a_moment_does_not_change_with_later_votes(store, clock):
    store.cast(fought(store), "ann", "first")
    before = store.stamp(as_of=clock())
    clock.forward(seconds=1)
    store.cast(fought(store), "ann", "second")

    assert store.stamp(as_of=clock() - timedelta(seconds=1)) == before
    assert store.stamp(as_of=clock()) != before


# --- what servers share -------------------------------------------------------------------------


def test_all_servers_over_one_database_share_a_secret(url):
    with VoteStore(url) as one, VoteStore(url) as other, ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda store: store.secret("cookie"), [one, other] * 4))
        assert len(found) == 1
        assert one.secret("other") not in found
        assert len(one.secret("other")) == 32


def test_a_new_person_who_opens_many_battles_at_once_is_one_person(store):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: store.open_battle(plan(), "192.0.2.1"), range(16)))

    assert rows(store, VoterRow) == 1
    assert rows(store, BattleRow) == 16


def test_a_database_failure_is_reported_without_the_texts(new_url):
    with VoteStore(new_url) as store:
        battle = fought(store)
        with store.database.writing() as session:
            session.execute(text("ALTER TABLE vote_revisions RENAME TO lost"))

        with pytest.raises(StoreError) as caught:
            store.cast(battle, "ann", "first", note="my secret")

        assert "vote_revisions" in str(caught.value)
        assert "my secret" not in str(caught.value)
        assert isinstance(caught.value.__cause__, DBAPIError)
        assert rows(store, VoteRecord) == 0


def test_a_plan_needs_no_consent_by_default():
    assert not BattlePlan("ann", HISTORY, plan().sides, 1).keep_words
