"""Rows on disk: written and read without loss, and a bad line is named."""

import pytest

from compeer_core.cer import CaseUtterance, CerRecord
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.row_files import write_rows
from tests.training.grpo.world import record
from training.data.records import drawn, read_records

ROW = record(1, images=("faces/a",), original="Hi,\nme \u2028 \u5922 \U0001f614")


def test_rows_survive_writing_and_reading(tmp_path):
    path = tmp_path / "deep" / "rows.jsonl"

    assert write_rows(path, [ROW, ROW]) == 2
    assert list(read_records(path, CerRecord)) == [ROW, ROW]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows(path, [ROW])

    def failing():
        yield ROW.case
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_rows(path, failing())
    assert list(read_records(path, CerRecord)) == [ROW]


def test_a_row_of_another_kind_is_named_with_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows(path, [ROW, CaseUtterance(speaker=Speaker.SEEKER, text="Hi.")])

    with pytest.raises(
        ConfigError, match=r"rows\.jsonl, line 2: id: Field required \(expected a CerRecord\)"
    ):
        list(read_records(path, CerRecord))


def test_a_missing_file_and_one_that_is_not_text_are_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    with pytest.raises(ConfigError, match="an earlier stage writes it"):
        list(read_records(path, CerRecord))

    path.write_bytes(b"\x1f\x8b\x08\xff")
    with pytest.raises(ConfigError, match=r"rows\.jsonl: is not UTF-8"):
        list(read_records(path, CerRecord))


def test_records_are_drawn_without_replacement_in_order_and_reproducibly():
    records = list(range(20))

    chosen = drawn(records, 7, seed=3)

    assert len({*chosen}) == 7
    assert chosen == sorted(chosen)
    assert chosen == drawn(records, 7, seed=3) != drawn(records, 7, seed=4)
    assert drawn(records, 50, seed=3) == drawn(records, None, seed=3) == records
