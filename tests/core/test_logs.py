"""A log names errors and places, and nothing that a visitor wrote."""

import ast
import threading
from pathlib import Path

import pytest

from compeer_core.backends.scripted import ScriptedBackend, ScriptedScorer
from compeer_core.errors import BackendError
from compeer_core.logs import trace_of
from compeer_core.policy import Controls, Policy
from compeer_core.turn import take_turn
from compeer_core.unifireward import Judge
from tests.core.example import DIALOGUE, TEXT

SECRET = "what a visitor wrote"


def raised(kind=BackendError):
    """An error as a library raises it, with what it was given in its words."""
    try:
        try:
            raise ValueError(f"cannot encode {SECRET!r}")
        except ValueError as cause:
            raise kind(f"the model failed on {SECRET!r}") from cause
    except kind as error:
        return error


def test_a_trace_has_types_and_positions_but_no_messages():
    trace = trace_of(raised())

    assert SECRET not in trace
    for told in ("BackendError", "after a ValueError", "test_logs.py", "in raised"):
        assert told in trace


def test_a_trace_of_errors_that_led_to_each_other_ends():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first

    assert trace_of(first).count("ValueError") == 2


class Failing(ScriptedBackend):
    """A backend that fails before its first token."""

    def open(self, *_):
        raise raised()


@pytest.mark.parametrize(
    ("backend", "answer", "told"),
    [
        (Failing([TEXT]), "True", "policy p failed: BackendError"),
        (ScriptedBackend([TEXT]), raised(RuntimeError), "judge j failed: RuntimeError"),
    ],
)
def test_a_model_that_fails_with_the_visitors_words_does_not_take_them_into_the_log(
    caplog, backend, answer, told
):
    caplog.set_level("DEBUG")
    judge = Judge("j", ScriptedScorer([answer]))
    list(take_turn(Policy("p", backend), judge, DIALOGUE, Controls(), threading.Event()))

    assert told in caplog.text
    assert SECRET not in caplog.text


def test_no_module_gives_a_log_the_words_of_an_error_that_it_did_not_raise(repository: Path):
    """``exc_info`` and ``logger.exception`` would write them; `trace_of` leaves them out."""
    allowed = {
        ("ui_components/tour/screen.py", "exception")
    }  # files of ours, which no visitor wrote
    found = set()
    for folder in ("compeer_core", "ui_components"):
        for path in (repository / folder).rglob("*.py"):
            for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                match call:
                    case ast.Call(func=ast.Attribute(value=ast.Name(id="logger" | "_log"))):
                        names = {call.func.attr, *(each.arg for each in call.keywords)}
                    case _:
                        continue
                place = path.relative_to(repository).as_posix()
                found |= {(place, name) for name in names & {"exception", "exc_info"}}

    assert found == allowed
