"""The line in front of a model."""

import threading

import pytest

from compeer_core.registry import ModelEntry, Registry
from tests.pages import eventually
from ui_components.models import Models
from ui_components.waiting import Line, LineFullError


def test_first_come_first_served():
    line = Line()
    with line.place() as first:
        with line.place() as second, line.place() as third:
            assert [line.ahead(ticket) for ticket in (first, second, third)] == [0, 1, 2]
            assert not line.wait(second, seconds=0)
        assert len(line) == 0
    with line.place() as next_one:
        assert line.wait(next_one, seconds=0)


def test_several_slots_serve_several_at_once():
    line = Line(slots=2)
    with line.place() as first, line.place() as second, line.place() as third:
        assert [line.wait(ticket, 0) for ticket in (first, second, third)] == [True, True, False]
        assert len(line) == 1


def test_who_leaves_lets_the_next_one_in():
    line = Line()
    served = threading.Event()

    def wait() -> None:
        with line.place() as ticket:
            while not line.wait(ticket):
                pass
            served.set()

    with line.place():
        thread = threading.Thread(target=wait)
        thread.start()
        eventually(lambda: len(line) == 1)
        assert not served.is_set()
    thread.join(5)

    assert served.is_set()


def test_a_full_line_takes_nobody():
    line = Line(slots=1, longest=1)
    with line.place(), line.place(), pytest.raises(LineFullError), line.place():
        pass
    with line.place() as ticket:  # and is not stuck afterwards
        assert line.wait(ticket, 0)


def test_each_model_behind_an_endpoint_has_a_line_of_its_own():
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
        models.line(name) for name in ("here", "there", "judge-here", "judge-there")
    )

    assert judge_here is here
    assert len({id(here), id(there), id(judge_there)}) == 3
    assert models.line("judge-there") is judge_there
