"""A journal holds what was appended, wherever it was cut."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compeer_core.errors import ConfigError
from training.cer.requests.journal import Journal, Try

UNDER = {"model": "tiny", "temperature": 0.7}
texts = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ["a\u2028b\u2029c\x85d\x0b", "line\r\nline\n", "\x00", '"}\n{"tries": []}', "😀 难过"]
)


def made(key: str, number: int = 1, text: str | None = "text") -> Try:
    problem = None if text is not None else "wrong language"
    return Try(key=key, asked="5f3c", number=number, text=text, problem=problem, tokens=3)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "journals" / "filter.tiny.jsonl"


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), texts, max_size=5))
def test_any_text_comes_back_as_it_was(said: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "j.jsonl"
        with Journal(path, UNDER) as journal:
            for key, text in said.items():
                journal.append([made(key, text=text)])
        with Journal(path, UNDER) as journal:
            assert len(journal) == len(said)
            assert {key: journal.of(key)[0].text for key in said} == said


def test_the_tries_of_a_question_come_back_in_order(path: Path) -> None:
    tries = [made("a", 1, None), made("a", 2, None), made("a", 3, "good")]
    with Journal(path, UNDER) as journal:
        for one in tries:
            journal.append([one, made(f"b{one.number}")])
        assert journal.of("a") == tries
    with Journal(path, UNDER) as journal:
        assert journal.of("a") == tries
        assert journal.of("unknown") == []


def test_a_journal_cut_at_any_byte_has_the_whole_lines_before_it_and_goes_on(
    tmp_path: Path,
) -> None:
    whole = tmp_path / "whole.jsonl"
    lines = [[made("a", text="难过\u2028")], [made("b"), made("c")], [made("d", text=None)]]
    with Journal(whole, UNDER) as journal:
        ends = [whole.stat().st_size]
        for line in lines:
            journal.append(line)
            ends.append(whole.stat().st_size)
    data = whole.read_bytes()
    for cut in range(len(data) + 1):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(data[:cut])
        complete = sum(end <= cut for end in ends[1:])
        with Journal(path, UNDER) as journal:
            kept = [one.key for line in lines[:complete] for one in line]
            assert [key for key in "abcd" if journal.of(key)] == kept
            for line in lines[complete:]:
                journal.append(line)
        assert path.read_bytes() == data


def test_a_line_is_with_the_system_as_soon_as_it_was_appended(path: Path) -> None:
    with Journal(path, UNDER) as journal:
        journal.append([made("a", text="here")])
        assert b"here" in path.read_bytes()


def test_a_journal_made_under_other_settings_is_refused_by_their_names(path: Path) -> None:
    Journal(path, UNDER).close()

    with pytest.raises(ConfigError, match=r"other settings: temperature \(was 0\.7, is 0\.9\)"):
        Journal(path, {**UNDER, "temperature": 0.9})


def test_a_file_that_is_no_journal_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("my notes\n", encoding="utf-8")

    with pytest.raises(ConfigError, match="is no journal"):
        Journal(path, UNDER)
    assert path.read_text(encoding="utf-8") == "my notes\n"


def test_damage_in_the_middle_is_named_by_its_line(path: Path) -> None:
    with Journal(path, UNDER) as journal:
        journal.append([made("a")])
        journal.append([made("b")])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\x00\x00\n" + lines[2])

    with pytest.raises(ConfigError, match="line 2: damaged"):
        Journal(path, UNDER)


def test_two_runs_cannot_write_to_one_journal(path: Path) -> None:
    with Journal(path, UNDER), pytest.raises(ConfigError, match="in use by another run"):
        Journal(path, UNDER)
    Journal(path, UNDER).close()
