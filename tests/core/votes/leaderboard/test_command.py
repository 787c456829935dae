"""`python -m compeer_core.votes board`: the same bytes again, and one sentence for what is wrong."""

import json
import os
import shlex
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from compeer_core.taxonomy import Preference
from compeer_core.votes.__main__ import main
from compeer_core.votes.leaderboard.board import Board, Status, code_version
from compeer_core.votes.leaderboard.text import command
from compeer_core.votes.rows import VoteRow, write_votes
from tests.core.votes.made_up import fought

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def made_votes():
    return [
        VoteRow(
            battle_id=f"b{i}",
            voter=f"r{i % 7}",
            left="base" if i % 2 else "urp",
            right="urp" if i % 2 else "base",
            preference=list(Preference)[(i * i) % 4],
            blind=True,
            language="zh" if i % 3 else "en",
            at=NOON + timedelta(minutes=i),
            verdict=list(Preference)[i % 4],
        )
        for i in range(90)
    ]


@pytest.fixture
def votes(tmp_path):
    write_votes(tmp_path / "votes.jsonl", made_votes())
    return tmp_path / "votes.jsonl"


def output_of(capsysbinary, *arguments):
    assert main(["board", *map(str, arguments)]) == 0
    return capsysbinary.readouterr().out


FORMATS = ("json", "markdown", "csv", "svg")
ALL_FORMATS = f"""
import sys
from compeer_core.votes.__main__ import main
for form in {FORMATS}:
    assert main([*sys.argv[1:], "--format", form]) == 0
"""


def test_the_same_moment_gives_the_same_bytes(votes, capsysbinary):
    options = ("--votes", votes, "--as-of", "2026-11-21T13:00:00+01:00")
    once = [output_of(capsysbinary, *options, "--format", form) for form in FORMATS]

    later = made_votes()[0].model_copy(
        update={"battle_id": "later", "at": NOON + timedelta(days=3)}
    )
    write_votes(votes, [later, *made_votes()[::-1]])
    assert [output_of(capsysbinary, *options, "--format", form) for form in FORMATS] == once

    # in another process, with other threads and another hash seed
    again = subprocess.run(
        [sys.executable, "-c", ALL_FORMATS, "board", *map(str, options)],
        capture_output=True,
        check=True,
        cwd=Path(__file__).parents[4],
        env=os.environ | {"PYTHONHASHSEED": "99", "OMP_NUM_THREADS": "2", "TZ": "Asia/Tokyo"},
    ).stdout
    assert again == b"".join(once)
    assert b"\r" not in again


def test_json_is_the_board(votes, capsysbinary):
    written = output_of(
        capsysbinary, "--votes", votes, "--as-of", "2026-11-21T12:59:00Z", "--format", "json"
    )

    board = Board.model_validate_json(written)
    assert board.votes == 60
    assert board.as_of == NOON + timedelta(minutes=59)
    assert board.code == code_version()
    assert json.loads(written)["settings"]["seed"] == 0


def test_options_reach_the_board(votes, capsysbinary, tmp_path):
    where = tmp_path / "board.json"
    shown = output_of(
        capsysbinary,
        *("--votes", votes, "--language", "zh", "--image", "without", "--seed", 3, "--fits", 60),
        *("--min-votes", 10, "--format", "json", "--output", where),
    )

    assert shown == b""
    board = Board.model_validate_json(where.read_bytes())
    assert (board.settings.seed, board.settings.fits, board.settings.min_votes) == (3, 60, 10)
    assert (board.filters.languages, board.filters.has_image) == (("zh",), False)
    assert (board.votes, board.left_out.filtered) == (60, 30)


def test_a_store_gives_the_board_of_a_moment_again(store, url, clock, capsysbinary):
    cast = []
    for number in range(24):
        voter = f"rater-{number % 6}"
        models = ("policy", "base") if number % 2 else ("base", "policy")
        battle = fought(store, voter, models=models)
        clock.forward(minutes=1)
        preference = list(Preference)[number % 4]
        store.cast(battle, voter, preference, dwell_ms=5000, both_seen=True)
        cast.append((battle, voter))
    options = ("--database-url", url, "--min-votes", 10, "--as-of")
    moment = clock.time.isoformat()
    once = output_of(capsysbinary, *options, moment, "--format", "json")

    clock.forward(hours=2)
    store.revise(*cast[0], Preference.SECOND)
    battle = fought(store, "late")
    clock.forward(minutes=1)
    store.cast(battle, "late", Preference.FIRST, dwell_ms=5000, both_seen=True)
    again = output_of(capsysbinary, *options, moment, "--format", "json")
    now = output_of(capsysbinary, *options, clock.time.isoformat(), "--format", "json")

    assert again == once
    board, later = Board.model_validate_json(once), Board.model_validate_json(now)
    assert (board.votes, board.raters, board.comparing) == (24, 6, 18)
    assert board.status is Status.RANKED
    assert later.votes > 20
    assert later.vote_set != board.vote_set
    # what the board says of itself is the command that makes it again
    printed = shlex.split(command(board))
    assert printed[:4] == ["python", "-m", "compeer_core.votes", "board"]
    assert output_of(capsysbinary, *printed[4:], "--database-url", url, "--format", "json") == once


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "command"),
        (["bord"], "invalid choice"),
        (["board", "--as-of", "yesterday"], "'yesterday' is not a date with time and zone"),
        (["board", "--as-of", "2026-11-21T12:00:00"], "is not a date with time and zone"),
        (["board", "--fits", "10"], "--fits: Input should be greater than or equal to 50, got 10"),
        (["board", "--ridge", "nan"], "--ridge: "),
        (["board", "--min-raters", "0"], "--min-raters: "),
        (["board", "--kind", "blnd"], "invalid choice"),
        (["board", "--as"], "unrecognized arguments"),
        (["board", "--votes", "none.jsonl"], "none.jsonl: cannot be read"),
        (["board", "--votes", "a", "--database-url", "b"], "not allowed with"),
        (["board", "--database-url", "sqlite:///no.db"], "no.db: there is no database of votes"),
        (["board", "--database-url", "nonsense"], "the database must look like"),
    ],
)
def test_wrong_usage_is_one_sentence_and_code_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert main(arguments) == 2

    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("python -m compeer_core.votes: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_named(votes, capsys, tmp_path):
    assert main(["board", "--votes", str(votes), "--output", str(tmp_path / "no" / "b.md")]) == 2
    assert "b.md: cannot be written" in capsys.readouterr().err


def test_help_explains(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["board", "--help"])

    assert stopped.value.code == 0
    assert "--as-of TIME" in capsys.readouterr().out
