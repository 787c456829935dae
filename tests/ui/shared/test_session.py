"""Conversations in memory: private, bounded, expiring."""

from dataclasses import replace

import pytest

from compeer_core.dialogue import Speaker, Utterance
from compeer_core.errors import InputError
from compeer_core.images import Image
from compeer_core.reasoning import Part
from ui_components.shared.progress import Origin, PartProgress, Progress
from ui_components.shared.session import (
    MAX_REPLIES,
    BestOf,
    Session,
    Turn,
    Undo,
)
from ui_components.shared.session_store import Room, SessionKey, SessionStore

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
    store = SessionStore(Session())
    store.update(ANNA, saying(turn("I feel alone")))

    assert store.get(BEN) == Session()
    assert store.get(SessionKey("anna", "other")) == Session()
    assert len(store.get(ANNA).turns) == 1


def test_a_conversation_is_forgotten_after_its_time():
    clock = Clock()
    store = SessionStore(Session(), keep_seconds=10, clock=clock)
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
    store = SessionStore(Session(), clock=clock)
    store.update(ANNA, lambda _: Session(undo=Undo("cleared", (turn("secret"),), 0, until=5)))
    clock.now = 6
    store.sweep()

    assert len(store) == 0


def test_the_least_recently_used_are_evicted():
    store = SessionStore(Session(), in_all=Room(2, 1000))
    keys = [SessionKey("v", f"conversation-{number}") for number in range(3)]
    store.update(keys[0], saying(turn("0")))
    store.update(keys[1], saying(turn("1")))
    store.get(keys[0])
    store.update(keys[2], saying(turn("2")))

    assert [bool(store.get(key).turns) for key in keys] == [True, False, True]


def test_images_are_evicted_too_but_never_the_newest_record():
    store = SessionStore(Session(), in_all=Room(10, 150))
    picture = Image(b"x" * 100, 1, 1)
    store.update(ANNA, saying(turn("a", images=(picture,))))
    store.update(BEN, saying(turn("b", images=(picture,))))

    assert not store.get(ANNA).turns
    assert store.get(BEN).turns


def test_a_picture_is_shown_to_its_visitor_only():
    store = SessionStore(Session())
    with_picture = turn("look", images=(Image(b"png", 1, 1),))
    store.update(ANNA, saying(with_picture))

    assert store.picture("anna", with_picture.key, 0) is not None
    assert store.picture("ben", with_picture.key, 0) is None
    assert store.picture("anna", with_picture.key, 1) is None
    assert store.picture("anna", with_picture.key, -1) is None
    assert store.picture("anna", "other", 0) is None


def test_the_dialogue_omits_replies_that_never_came():
    session = Session(turns=(turn("one", "first reply"), turn("two"), turn("three", "not yet")))

    assert [said.text for said in session.dialogue()] == ["one", "first reply", "two", "three"]


def test_a_reply_is_replaced_in_what_undo_holds_as_well():
    before = turn("one")
    session = Session(turns=(), undo=Undo("cleared", (before,), 0, 1.0))
    after = Progress(model="m", outcome="stopped")

    assert session.with_progress(after).undo.turns == (replace(before, progress=after),)


# --- several replies to one message --------------------------------------------------------------


def reply(text: str, key: str = "") -> Progress:
    progress = turn("", text).progress
    assert progress is not None
    return replace(progress, key=key or text)


def words(session: Session) -> list[str]:
    return [said.text for said in session.dialogue()]


def test_switching_replies_keeps_the_messages_that_followed_each():
    session = Session(turns=(turn("one", "first"), turn("two", "later")))
    branched = session.begun(0, reply("second"))

    assert [one.reply for one in branched.turns[0].replies] == ["first", "second"]
    assert [one.number for one in branched.turns[0].replies] == [1, 2]
    assert words(branched) == ["one"]
    assert branched.turns[0].progress.reply == "second"

    back = branched.switched(0, 1)
    assert [one.message.text for one in back.turns] == ["one", "two"]
    assert back.turns[0].progress.reply == "first"
    assert back.turns[1].progress.reply == "later"
    assert back.selected == 0
    again = back.switched(0, 2)
    assert [one.progress.reply for one in again.turns] == ["second"]
    assert again.switched(0, 1).turns[1].progress.reply == "later"


def test_an_empty_reply_is_replaced_by_the_next():
    session = Session(turns=(turn("one"),)).begun(0, reply("here"))

    assert [one.reply for one in session.turns[0].replies] == ["here"]
    assert session.turns[0].progress.number == 1


def test_a_reply_is_found_in_alternatives_and_undo():
    deep = Session(turns=(turn("one", "first"), turn("two", "x")))
    later = replace(deep.turns[1], progress=reply("later", "deep"))
    deep = replace(deep, turns=(deep.turns[0], later))
    branched = deep.begun(0, reply("second"))
    stopped = replace(branched.progress("deep"), outcome="stopped")
    changed = branched.with_progress(stopped)

    assert changed.progress("deep").outcome == "stopped"
    assert changed.switched(0, 1).turns[1].progress.outcome == "stopped"
    assert changed.progress("nowhere") is None
    assert changed.with_progress(replace(stopped, key="nowhere")) == changed


def test_samples_are_alternatives_to_the_current_reply():
    session = Session(turns=(turn("one", "first"),)).sampled((reply("a"), reply("b")))

    assert session.turns[0].progress.reply == "first"
    assert session.turns[0].best_of.numbers == (2, 3)
    assert session.turns[0].best_of.reference == 1
    assert session.switched(0, 3).turns[0].progress.reply == "b"


def test_without_a_reply_the_first_sample_is_current():
    session = Session(turns=(turn("one"),)).sampled((reply("a"), reply("b")))

    assert session.turns[0].progress.reply == "a"
    assert session.turns[0].best_of.numbers == (1, 2)
    assert session.turns[0].best_of.reference == 0


def test_samples_without_text_leave_the_group():
    session = Session(turns=(turn("one", "first"),))
    sample = replace(Progress(model="m", key="none"), origin=Origin("sample"))
    session = session.sampled((replace(reply("a"), origin=Origin("sample")), sample))
    left = session.ranked(session.turns[0].key, BestOf((2,)))

    assert [one.reply for one in left.turns[0].replies] == ["first", "a"]
    assert left.turns[0].best_of == BestOf((2,))


def test_replies_are_bounded_and_none_is_dropped():
    session = Session(turns=(turn("one", "first"),))
    for number in range(MAX_REPLIES - 1):
        session = session.begun(0, reply(f"reply {number}"))
    with pytest.raises(InputError) as caught:
        session.begun(0, reply("too much"))

    assert caught.value.code == "too_many_replies"
    assert len(session.turns[0].replies) == MAX_REPLIES
    with pytest.raises(InputError):
        session.sampled((reply("too much"),))


def test_images_after_an_alternative_reply_are_still_served():
    picture = Image(b"x" * 100, 1, 1)
    session = Session(turns=(turn("one", "first"), turn("two", "x", (picture,))))
    hidden = session.turns[1].key
    store = SessionStore(Session())
    store.update(ANNA, lambda _: session.begun(0, reply("second")))

    assert list(store.get(ANNA).pictures()) == [picture]
    assert store.picture("anna", hidden, 0) == picture


@pytest.mark.parametrize(("index", "number"), [(0, 2), (0, 0), (1, 1), (-1, 1)])
def test_switching_to_an_unknown_reply_is_rejected(index, number):
    with pytest.raises(InputError):
        Session(turns=(turn("one", "first"),)).switched(index, number)


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
    store = SessionStore(Session())
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
