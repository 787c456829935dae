"""The response store returns what was added, from any process and after any interruption."""

import multiprocessing
import sqlite3
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compeer_core.errors import ConfigError
from training.cer.requests.response_store import Attempt, ResponseStore

texts = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ["a\u2028b\u2029c\x85d\x0b", "line\r\nline\n", "\x00", "a\x00b", "😀 难过"]
)


def attempt(request: str, number: int = 1, text: str | None = "text") -> Attempt:
    problem = None if text is not None else "wrong language"
    return Attempt(request, number, f"key of {request}", text, problem, 3)


@given(st.lists(texts, max_size=5))
def test_any_text_is_returned_unchanged(stored: list[str]) -> None:
    attempts = [attempt(str(number), text=text) for number, text in enumerate(stored)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "new" / "r.sqlite"
        with ResponseStore(path) as store:
            store.add(attempts)
        with ResponseStore(path) as store:
            assert [store.attempts(each.request) for each in attempts] == [(a,) for a in attempts]


def test_the_attempts_of_a_request_are_returned_by_number(tmp_path: Path) -> None:
    attempts = (attempt("a", 1, None), attempt("a", 2, None), attempt("a", 3, "good"))
    with ResponseStore(tmp_path / "r.sqlite") as store:
        for each in reversed(attempts):
            store.add([each, attempt("b", each.number)])

        assert store.attempts("a") == attempts
        assert store.attempts("unknown") == ()


def test_an_attempt_that_is_stored_is_not_replaced(tmp_path: Path) -> None:
    with ResponseStore(tmp_path / "r.sqlite") as store:
        store.add([attempt("a", text="first")])
        store.add([attempt("a", text="second"), attempt("b")])

        assert store.attempts("a") == (attempt("a", text="first"),)
        assert store.attempts("b") == (attempt("b"),)


def _add_many(path: Path, process: int) -> None:
    with ResponseStore(path) as store:
        for number in range(25):
            store.add([attempt(f"{process}", number), attempt("shared", number)])


def test_several_processes_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_add_many, args=(path, number)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()

    assert [process.exitcode for process in processes] == [0, 0, 0]
    with ResponseStore(path) as store:
        assert [len(store.attempts(name)) for name in ("0", "1", "2", "shared")] == [25] * 4


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    path.write_text("my notes\n" * 200, encoding="utf-8")

    with pytest.raises(ConfigError, match="cannot be used as a store of responses"):
        ResponseStore(path)
    assert path.read_text(encoding="utf-8") == "my notes\n" * 200


def test_a_file_that_another_process_has_locked_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    other = sqlite3.connect(path, check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")
    timer = threading.Timer(0.3, other.close)
    timer.start()

    with ResponseStore(path) as store:
        store.add([attempt("a")])
        assert store.attempts("a") == (attempt("a"),)
    timer.join()
