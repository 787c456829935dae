"""Eviction: never the conversations of a visitor who holds few."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from compeer_core.dialogue import Speaker, Utterance
from compeer_core.errors import InputError
from compeer_core.images import Image
from compeer_core.safety import RiskKind
from ui_components.compare.comparison import Comparison
from ui_components.server.visitors import (
    COOKIE,
    NEW_VISITORS,
    NEW_VISITORS_SECONDS,
    NewVisitors,
    Visitors,
)
from ui_components.shared.session import Session, Turn, Undo
from ui_components.shared.session_store import (
    IN_ALL,
    OF_CROWD,
    OF_VISITOR,
    Room,
    SessionKey,
    SessionStore,
)


def key(visitor: str, number: int = 0, network: str = "") -> SessionKey:
    return SessionKey(
        visitor, f"conversation-{number:016}", network=network or f"home of {visitor}"
    )


def session(*sizes: int) -> Session:
    """One conversation with images of these sizes."""
    images = tuple(Image(bytes(size), 1, 1) for size in sizes)
    return Session(turns=(Turn(Utterance(Speaker.SEEKER, "hello", images)),))


def keep(store: SessionStore[Session], where: SessionKey, *sizes: int) -> None:
    store.update(where, lambda _: session(*sizes))


def kept(store: SessionStore[Session], *keys: SessionKey) -> list[bool]:
    return [bool(store.get(each).turns) for each in keys]


def test_beyond_their_share_a_visitor_loses_their_own_oldest():
    store = SessionStore(Session(), of_visitor=Room(2, 1000))
    keep(store, key("ben"))
    anna = [key("anna", number, f"network {number}") for number in range(3)]  # on the move
    for each in anna:
        keep(store, each)

    assert kept(store, *anna) == [False, True, True]
    assert kept(store, key("ben")) == [True]


def test_too_many_pictures_push_out_ones_own_as_well():
    store = SessionStore(Session(), of_visitor=Room(10, 150))
    keep(store, key("ben"), 150)
    keep(store, key("anna", 0), 100)
    keep(store, key("anna", 1))
    keep(store, key("anna", 2), 100)

    assert kept(store, key("anna", 0), key("anna", 1), key("anna", 2)) == [False, True, True]
    assert kept(store, key("ben")) == [True]


def test_pictures_that_are_added_to_a_message_count_too():
    store = SessionStore(Session(), of_visitor=Room(10, 150))
    keep(store, key("anna", 0), 100)
    keep(store, key("anna", 1), 40)
    keep(store, key("anna", 1), 40, 40)  # as many messages as before

    assert kept(store, key("anna", 0), key("anna", 1)) == [False, True]


def test_too_many_pictures_are_rejected_and_leave_the_conversation_unchanged():
    store = SessionStore(Session(), of_visitor=Room(10, 150))
    keep(store, key("anna"), 100)
    with pytest.raises(InputError) as refused:
        keep(store, key("anna"), 100, 100)

    assert refused.value.code == "too_many_pictures"
    assert len(store.get(key("anna")).turns[0].message.images) == 1


def test_a_picture_that_undo_holds_too_counts_once():
    store = SessionStore(Session(), of_visitor=Room(10, 150))
    before = session(100)
    with_undo = replace(before, undo=Undo("edited", before.turns, 1, until=1e9))
    store.update(key("anna"), lambda _: with_undo)

    assert kept(store, key("anna")) == [True]


def test_the_record_just_updated_is_never_evicted():
    store = SessionStore(Session(), in_all=Room(10, 150), of_visitor=Room(10, 140))
    keep(store, key("anna"), 100)
    keep(store, key("ben"), 140)

    assert kept(store, key("anna"), key("ben")) == [False, True]


def test_in_a_full_store_the_network_that_holds_most_gives_way():
    store = SessionStore(Session(), in_all=Room(5, 1000))
    for number in range(3):
        keep(store, key(f"pupil {number}", network="school"))
    keep(store, key("anna"))
    keep(store, key("ben"))
    keep(store, key("cleo"))

    pupils = [key(f"pupil {number}") for number in range(3)]
    assert kept(store, *pupils, key("anna"), key("ben")) == [False, True, True, True, True]


def test_in_a_network_the_visitor_who_holds_most_gives_way():
    store = SessionStore(Session(), in_all=Room(5, 1000))
    keep(store, key("quiet", network="school"))
    loud = [key("loud", number, "school") for number in range(4)]
    for each in loud:
        keep(store, each)
    keep(store, key("new", network="school"))

    assert kept(store, *loud, key("quiet")) == [False, True, True, True, True]


def test_the_total_image_limit_evicts_from_the_largest_holder():
    store = SessionStore(Session(), in_all=Room(10, 300))
    keep(store, key("anna"), 50)
    keep(store, key("ben", 0), 90)
    keep(store, key("ben", 1), 90)
    keep(store, key("cleo"), 90)

    assert kept(store, key("anna"), key("ben", 0), key("ben", 1)) == [True, False, True]


# --- a flood from one visitor --------------------------------------------------------------------


def with_one_cookie(visitors: Visitors, network: str) -> Callable[[], str]:
    cookie = visitors.new_cookie(network)
    return lambda: visitors.read({COOKIE: cookie})


def with_a_cookie_each(visitors: Visitors, network: str) -> Callable[[], str]:
    return lambda: visitors.read({COOKIE: visitors.new_cookie(network)})


def without_a_cookie(visitors: Visitors, network: str) -> Callable[[], str]:
    return lambda: ""


@pytest.mark.parametrize(
    ("what", "messages"),
    [
        ("conversations", 2_300),
        pytest.param("conversations", 20_000, marks=pytest.mark.slow),
        ("comparisons", 2_300),
    ],
)
@pytest.mark.parametrize("attack", [with_one_cookie, with_a_cookie_each, without_a_cookie])
@pytest.mark.parametrize("is_neighbour", [True, False])
def test_other_visitors_records_survive_a_flood_from_one(messages, attack, is_neighbour, what):
    store: SessionStore = SessionStore(Session() if what == "conversations" else Comparison())
    written = session() if what == "conversations" else Comparison(risk=RiskKind.SUICIDE)
    visitors = Visitors()
    attic = visitors.network("192.0.2.1")
    honest = []
    for number in range(50):
        network = attic if is_neighbour else visitors.network(f"198.51.100.{number}")
        visitor = visitors.read({COOKIE: visitors.new_cookie(network)})
        honest.append(key(visitor, 0, network))
        store.update(honest[-1], lambda _: written)
    visitor_of = attack(visitors, attic)
    for number in range(messages):
        store.update(key(visitor_of(), number, attic), lambda _: written)

    assert not any(store.get(each).is_empty for each in honest)
    assert len(store) <= len(honest) + NEW_VISITORS + OF_CROWD.sessions < IN_ALL.sessions


def test_all_cookies_of_one_network_cannot_evict_other_networks():
    """Two hundred visitors with full shares would exceed the store; here it is a tenth of both."""
    assert NEW_VISITORS * OF_VISITOR.sessions > IN_ALL.sessions
    visitors, room = NEW_VISITORS // 10, replace(IN_ALL, sessions=IN_ALL.sessions // 10)
    store = SessionStore(Session(), in_all=room)
    neighbour, stranger = key("anna", network="attic"), key("ben")
    keep(store, neighbour)
    keep(store, stranger)
    for number in range(visitors * OF_VISITOR.sessions):
        keep(store, key(f"attacker {number % visitors}", number, "attic"))

    assert len(store) == room.sessions
    assert kept(store, neighbour, stranger) == [True, True]


# --- networks ------------------------------------------------------------------------------------


def test_a_network_is_what_a_customer_cannot_change():
    network = Visitors().network

    assert network("2001:db8:1:2::3") == network("2001:db8:1:2:ffff::1")
    assert network("2001:db8:1:2::3") != network("2001:db8:1:3::3")
    assert network("::ffff:192.0.2.1") == network("192.0.2.1")
    assert network("192.0.2.1") != network("192.0.2.2")
    assert network("testclient") not in {"", "testclient"}
    assert network(None) == ""


def test_a_networks_pseudonym_hides_the_address():
    assert "192" not in Visitors("secret").network("192.0.2.1")
    assert Visitors("secret").network("192.0.2.1") != Visitors("other").network("192.0.2.1")


def test_new_visitors_of_a_network_are_counted_by_the_hour():
    now = 0.0
    newcomers = NewVisitors(clock=lambda: now)
    crowded = [newcomers.is_one_too_many("school") for _ in range(NEW_VISITORS + 1)]
    assert crowded == [False] * NEW_VISITORS + [True]
    assert not newcomers.is_one_too_many("home")
    now = NEW_VISITORS_SECONDS + 1

    assert not newcomers.is_one_too_many("school")
