"""Rows of votes: what a file gives back, and what it says where a line is none."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from compeer_core.errors import ConfigError
from compeer_core.taxonomy import Preference
from compeer_core.votes.rows import VoteRow, read_votes, write_votes

VOTE = VoteRow(
    battle_id="b1",
    voter="ann",
    left="base",
    right="urp",
    preference=Preference.SECOND,
    blind=True,
    language="en",
    at=datetime(2026, 11, 21, 12, tzinfo=UTC),
    flags=("leaked",),
    rewards=(3.0, None),
    lengths=(120, 80),
)


def test_a_file_gives_back_what_was_written(tmp_path):
    other = VOTE.model_copy(
        update={"voter": "bo", "topic": "a\u2028b\n", "verdict": Preference.BOTH}
    )

    assert write_votes(tmp_path / "deep" / "votes.jsonl", [VOTE, other]) == 2
    again = list(read_votes(tmp_path / "deep" / "votes.jsonl"))

    assert again == [VOTE, other]


def test_flags_have_one_order_and_times_one_zone():
    berlin = timezone(timedelta(hours=1))
    row = VoteRow.model_validate(
        VOTE.model_dump()
        | {"flags": ["fast", "leaked", "fast"], "at": datetime(2026, 11, 21, 13, tzinfo=berlin)}
    )

    assert row.flags == ("fast", "leaked")
    assert row.at == VOTE.at
    assert row.at.tzinfo is UTC


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Invalid JSON"),
        ("[]", "line 2: Input should be an object"),
        (VOTE.model_dump_json().replace("second", "tie"), "line 2: preference: Input should be"),
        (VOTE.model_dump_json().replace("3.0", "NaN"), r"line 2: rewards\.0: "),
        (VOTE.model_dump_json().replace('["leaked"]', "[1]"), r"line 2: flags\.0: "),
        (VOTE.model_dump_json().replace("T12:00:00Z", ""), "line 2: at: .*not a date with time"),
    ],
)
def test_an_invalid_line_is_named(tmp_path, line, message):
    path = tmp_path / "votes.jsonl"
    path.write_text(f"\ufeff{VOTE.model_dump_json()}\n{line}\n\n", encoding="utf-8")

    with pytest.raises(ConfigError, match=message):
        list(read_votes(path))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.jsonl: cannot be read"):
        list(read_votes(tmp_path / "none.jsonl"))
    (tmp_path / "latin.jsonl").write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        list(read_votes(tmp_path / "latin.jsonl"))
