"""Conversations in memory: found by their visitor only, bounded, and gone after a while."""

from dataclasses import replace

import pytest

from compeer_core.dialogue import Speaker, Utterance
from compeer_core.images import Image
from compeer_core.reasoning import Part
from ui_components.progress import PartProgress, Progress
from ui_components.session import Session, SessionKey, SessionStore, Turn, Undo

ANNA = SessionKey("anna", "conversation")
BEN = SessionKey("ben", "conversation")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def turn(text: str, reply: str = "", images: tuple[Image, ...] = ()) -> Turn:
    progress = Progress(model="m")
    if reply:
        parts = {**progress.parts, Part.REPLY: PartProgress("done", reply)}
        progress = replace(progress, parts=parts, outcome="finished")
    return Turn(Utterance(Speaker.SEEKER, text, images), progress)


def saying(*turns: Turn):
    return lambda _: Session(turns=turns)


def test_a_conversation_needs_both_the_cookie_and_the_id():
    store = SessionStore()
    store.update(ANNA, saying(turn("I feel alone")))

    assert store.get(BEN) == Session()
    assert store.get(SessionKey("anna", "other")) == Session()
    assert len(store.get(ANNA).turns) == 1


def test_a_conversation_is_forgotten_after_its_time():
    clock = Clock()
    store = SessionStore(keep_seconds=10, clock=clock)
    store.update(ANNA, saying(turn("hello")))
    clock.now = 9
    assert store.get(ANNA).turns  # looking at it keeps it
    clock.now = 18
    assert store.get(ANNA).turns
    clock.now = 29
    store.sweep()

    assert len(store) == 0


def test_what_undo_holds_is_forgotten_after_its_time():
    clock = Clock()
    store = SessionStore(clock=clock)
    store.update(ANNA, lambda _: Session(undo=Undo("cleared", (turn("secret"),), 0, until=5)))
    clock.now = 6
    store.sweep()

    assert len(store) == 0


def test_the_longest_away_make_room_when_there_are_too_many():
    store = SessionStore(max_sessions=2)
    keys = [SessionKey("v", f"conversation-{number}") for number in range(3)]
    store.update(keys[0], saying(turn("0")))
    store.update(keys[1], saying(turn("1")))
    store.get(keys[0])
    store.update(keys[2], saying(turn("2")))

    assert [bool(store.get(key).turns) for key in keys] == [True, False, True]


def test_too_many_pictures_make_room_too_but_never_ones_own():
    store = SessionStore(max_image_bytes=150)
    picture = Image(b"x" * 100, 1, 1)
    store.update(ANNA, saying(turn("a", images=(picture,))))
    store.update(BEN, saying(turn("b", images=(picture,))))

    assert not store.get(ANNA).turns
    assert store.get(BEN).turns


def test_a_picture_is_shown_to_its_visitor_only():
    store = SessionStore()
    with_picture = turn("look", images=(Image(b"png", 1, 1),))
    store.update(ANNA, saying(with_picture))

    assert store.picture("anna", with_picture.key, 0) is not None
    assert store.picture("ben", with_picture.key, 0) is None
    assert store.picture("anna", with_picture.key, 1) is None
    assert store.picture("anna", with_picture.key, -1) is None
    assert store.picture("anna", "other", 0) is None


def test_the_policy_reads_replies_and_leaves_out_those_that_never_came():
    session = Session(turns=(turn("one", "first reply"), turn("two"), turn("three", "not yet")))

    assert [said.text for said in session.dialogue()] == ["one", "first reply", "two", "three"]


def test_a_turn_is_replaced_in_what_undo_holds_as_well():
    before = turn("one")
    session = Session(turns=(), undo=Undo("cleared", (before,), 0, 1.0))
    after = replace(before, progress=Progress(model="m", outcome="stopped"))

    assert session.with_turn(after).undo.turns == (after,)


def test_the_newest_turn_is_shown_unless_another_one_was_picked():
    session = Session(turns=(turn("one"), turn("two")))

    assert Session().shown is None
    assert session.shown == 1
    assert replace(session, selected=0).shown == 0


@pytest.mark.parametrize(
    "thing", [ANNA, turn("private words"), Session(turns=(turn("private words"),))]
)
def test_nothing_private_is_in_the_text_form_that_a_log_would_take(thing):
    assert "private" not in repr(thing)
    assert "anna" not in repr(thing)


def test_all_conversations_of_a_visitor_are_forgotten_and_nobody_elses():
    store = SessionStore()
    mine, other_of_mine = SessionKey("me", "a" * 16), SessionKey("me", "b" * 16)
    yours, nobodys = SessionKey("you", "a" * 16), SessionKey("", "a" * 16)
    for key in (mine, other_of_mine, yours, nobodys):
        store.update(key, lambda session: replace(session, draft="hello"))

    assert set(store.keys_of("me")) == {mine, other_of_mine}
    assert store.keys_of("") == []
    store.forget("me")
    store.forget("")

    assert store.get(mine) == store.get(other_of_mine) == Session()
    assert store.get(yours).draft == store.get(nobodys).draft == "hello"
