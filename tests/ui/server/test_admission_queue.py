"""The queue in front of a model."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compeer_core.registry import ModelEntry, Registry
from tests.pages import eventually
from ui_components.server import admission_queue
from ui_components.server.admission_queue import (
    AdmissionQueue,
    PlacesTakenError,
    QueueFullError,
    Ticket,
)
from ui_components.server.visitors import Caller
from ui_components.shared.models import Models

ANNA = Caller("home", "anna")
BEN = Caller("office", "ben")


def person(name: str, network: str = "") -> Caller:
    return Caller(network or f"home of {name}", name)


def program(network: str) -> Caller:
    return Caller(network, is_program=True)


@contextmanager
def waiting_behind_one(line: AdmissionQueue, *callers: Caller) -> Iterator[dict[Ticket, str]]:
    """Take a place for each caller while somebody else is served; yields their tickets by name."""
    with ExitStack() as stack:
        stack.enter_context(line.place(person("somebody")))
        names: dict[Ticket, str] = {}
        for number, caller in enumerate(callers):
            ticket = stack.enter_context(line.place(caller))
            names[ticket] = f"{caller.visitor or caller.network} {number}"
        yield names


def order(line: AdmissionQueue, names: dict[Ticket, str]) -> list[str]:
    return [names[ticket] for ticket in sorted(names, key=line.ahead)]


def served(line: AdmissionQueue, *callers: Caller) -> list[str]:
    """Return the order in which callers are served who all arrived while somebody else was."""
    came: list[str] = []
    ready = threading.Semaphore(0)
    threads = []

    def stand(number: int, caller: Caller) -> None:
        with line.place(caller) as ticket:
            ready.release()
            while not line.wait(ticket):
                pass
            came.append(f"{caller.visitor or caller.network} {number}")

    with line.place(person("somebody")):
        for number, caller in enumerate(callers):
            threads.append(threading.Thread(target=stand, args=(number, caller)))
            threads[-1].start()
            assert ready.acquire(timeout=5)
    for thread in threads:
        thread.join(5)
    return came


def test_first_come_first_served():
    line = AdmissionQueue()
    with line.place(ANNA) as first:
        with line.place(BEN) as second, line.place(person("cleo")) as third:
            assert [line.ahead(ticket) for ticket in (first, second, third)] == [0, 1, 2]
            assert not line.wait(second, seconds=0)
        assert len(line) == 0
    with line.place(ANNA) as next_one:
        assert line.wait(next_one, seconds=0)


def test_several_slots_serve_several_at_once():
    line = AdmissionQueue(slots=2)
    with line.place(ANNA) as first, line.place(BEN) as second, line.place(ANNA) as third:
        assert [line.wait(ticket, 0) for ticket in (first, second, third)] == [True, True, False]
        assert len(line) == 1


def test_a_group_of_replies_waits_for_a_slot_for_each():
    line = AdmissionQueue(slots=4)
    with line.place(ANNA) as first, line.place(BEN, 4) as group, line.place(ANNA) as behind:
        assert [line.wait(ticket, 0) for ticket in (first, group, behind)] == [True, False, False]
    with line.place(ANNA, 3) as group, line.place(BEN) as single, line.place(ANNA, 9) as crowd:
        assert [line.wait(ticket, 0) for ticket in (group, single, crowd)] == [True, True, False]
    with line.place(ANNA, 9) as crowd:  # more than there are: it has them all
        assert line.wait(crowd, 0)


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=8))
def test_whoever_comes_and_leaves_no_slot_is_given_twice_or_left_free(slots, visits):
    line = AdmissionQueue(slots=slots)
    with ExitStack() as stack:
        tickets: dict[Ticket, ExitStack] = {}
        for number, (size, leaves) in enumerate(visits):
            stay = stack.enter_context(ExitStack())
            tickets[stay.enter_context(line.place(person(f"{number}"), size))] = stay
            if leaves:
                tickets.pop(next(iter(tickets))).close()
            in_order = sorted(tickets, key=line.ahead)
            served = [ticket for ticket in in_order if line.ahead(ticket) == 0]
            taken = sum(ticket.size for ticket in served)
            assert taken <= slots
            assert len(served) == len(tickets) or taken + in_order[len(served)].size > slots


def test_leaving_lets_the_next_one_in():
    line = AdmissionQueue()
    is_served = threading.Event()

    def wait() -> None:
        with line.place(BEN) as ticket:
            while not line.wait(ticket):
                pass
            is_served.set()

    with line.place(ANNA):
        thread = threading.Thread(target=wait)
        thread.start()
        eventually(lambda: len(line) == 1)
        assert not is_served.is_set()
    thread.join(5)

    assert is_served.is_set()


def test_a_full_queue_rejects_everyone():
    line = AdmissionQueue(slots=1, longest=1)
    with (
        line.place(ANNA),
        line.place(BEN),
        pytest.raises(QueueFullError) as refused,
        line.place(person("cleo")),
    ):
        pass
    assert not isinstance(refused.value, PlacesTakenError)
    with line.place(ANNA) as ticket:  # and is not stuck afterwards
        assert line.wait(ticket, 0)


def test_programs_and_people_do_not_take_each_others_places():
    line = AdmissionQueue(slots=1, longest=1, longest_of_programs=1)
    with waiting_behind_one(line, program("a")):
        with pytest.raises(QueueFullError), line.place(program("b")):
            pass
        with line.place(ANNA), pytest.raises(QueueFullError), line.place(BEN):
            pass


def test_a_visitor_has_a_few_places_wherever_they_are():
    line = AdmissionQueue()
    tabs = [Caller(f"network {number}", "anna") for number in range(admission_queue.OF_VISITOR)]
    with waiting_behind_one(line, *tabs):
        with pytest.raises(PlacesTakenError), line.place(ANNA):
            pass
        with line.place(BEN):
            assert len(line) == admission_queue.OF_VISITOR + 1


def test_a_network_cannot_take_all_places_with_ever_new_visitors():
    line = AdmissionQueue()
    crowd = [person(f"{number}", "attic") for number in range(admission_queue.OF_NETWORK)]
    with waiting_behind_one(line, *crowd):
        with pytest.raises(QueueFullError), line.place(person("one more", "attic")):
            pass
        with line.place(ANNA):
            assert len(line) == admission_queue.OF_NETWORK + 1


def test_the_programs_of_a_network_share_a_few_places():
    line = AdmissionQueue()
    programs = [program("attic")] * admission_queue.OF_NETWORKS_PROGRAMS
    with waiting_behind_one(line, *programs):
        with pytest.raises(PlacesTakenError), line.place(program("attic")):
            pass
        with line.place(program("elsewhere")):
            assert len(line) == len(programs) + 1


def test_a_repeated_request_waits_behind_first_requests():
    anna, ben, cleo = ANNA, BEN, person("cleo")
    expected = ["anna 0", "ben 3", "cleo 4", "anna 1", "anna 2"]
    line = AdmissionQueue()
    with waiting_behind_one(line, anna, anna, anna, ben, cleo) as names:
        assert order(line, names) == expected

    assert served(AdmissionQueue(), anna, anna, anna, ben, cleo) == expected


def test_being_served_counts_as_a_turn():
    line = AdmissionQueue()
    with line.place(ANNA), line.place(ANNA) as again, line.place(BEN) as once:
        assert line.ahead(once) < line.ahead(again)


def test_turns_in_an_idle_queue_do_not_count():
    line = AdmissionQueue()
    for _ in range(3):
        with line.place(ANNA):
            pass
    with waiting_behind_one(line, ANNA, BEN) as names:
        assert order(line, names) == ["anna 0", "ben 1"]


def test_many_visitors_of_one_network_do_not_go_first():
    crowd = [person(f"{number}", "attic") for number in range(10)]
    line = AdmissionQueue()
    with waiting_behind_one(line, *crowd) as names, line.place(ANNA) as honest:
        assert line.ahead(honest) == 2
        assert order(line, names) == [f"{number} {number}" for number in range(10)]


def turns_until_served(line: AdmissionQueue, callers: Sequence[Caller]) -> int:
    """Return after how many turns all have been served, while a newcomer arrives at each turn."""
    places: dict[Ticket, ExitStack] = {}

    def stand(caller: Caller) -> Ticket:
        place = ExitStack()
        ticket = place.enter_context(line.place(caller))
        places[ticket] = place
        return ticket

    stand(person("somebody"))
    missing = {stand(caller) for caller in callers}
    for turn in range(100):
        (served_now,) = [ticket for ticket in places if line.ahead(ticket) == 0]
        missing -= {served_now}
        if not missing:
            break
        stand(person(f"newcomer {turn}"))
        places.pop(served_now).close()
    for place in places.values():
        place.close()
    return turn


def test_a_second_message_comes_even_while_new_visitors_keep_coming():
    assert turns_until_served(AdmissionQueue(), [ANNA, ANNA]) <= 2 + admission_queue.ROUND


def test_a_class_gets_its_share_while_new_visitors_keep_coming():
    pupils = [person(f"pupil {number}", "school") for number in range(12)]

    assert turns_until_served(AdmissionQueue(), pupils) <= 3 * len(pupils)


def test_people_come_first_and_programs_get_a_turn():
    people = [person(name) for name in "abcdefg"]
    came = served(AdmissionQueue(), program("x"), program("y"), *people)

    assert came[:8] == ["a 2", "b 3", "c 4", "x 0", "d 5", "e 6", "f 7", "y 1"]


def test_the_reported_place_is_the_order_of_service():
    callers = [program("x"), ANNA, ANNA, program("x"), BEN, person("cleo"), program("y"), BEN]
    line = AdmissionQueue()
    with waiting_behind_one(line, *callers) as names:
        said = order(line, names)

    assert served(AdmissionQueue(), *callers) == said


def test_each_endpoint_model_has_its_own_queue():
    remote = "openai:http://h/v1#m"
    models = Models(
        Registry(
            [
                ModelEntry(name="here", kind="policy", source="scripted:a.toml"),
                ModelEntry(name="there", kind="policy", source=remote),
                ModelEntry(name="judge-here", kind="judge", source="scripted:b.toml"),
                ModelEntry(name="judge-there", kind="judge", source=remote),
            ]
        )
    )

    here, there, judge_here, judge_there = (
        models.queue(name) for name in ("here", "there", "judge-here", "judge-there")
    )

    assert judge_here is here
    assert len({id(here), id(there), id(judge_there)}) == 3
    assert models.queue("judge-there") is judge_there
