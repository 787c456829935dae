"""The commands that work on a database of votes."""

import sqlite3
from contextlib import closing

import pytest
from sqlalchemy import make_url

import compeer_core.votes
from compeer_core.annotation.desk import Desk
from compeer_core.cer import CerRecord
from compeer_core.votes.__main__ import main
from compeer_core.votes.rows import read_votes
from compeer_core.votes.store import VoteStore
from tests.core.votes.made_up import fought
from training.data.records import read_records


@pytest.fixture
def filled(url):
    """The URL of a database with two votes, one of them named."""
    with VoteStore(url) as store:
        for blind in (True, False):
            store.cast(fought(store, blind=blind), "ann", "first")
    return url


def test_votes_go_out_and_come_in(filled, sqlite_url, tmp_path, capsys):
    file, rows = tmp_path / "cer.jsonl", tmp_path / "votes.jsonl"
    other = f"{sqlite_url}.other"

    assert main(["export", str(file), "--database-url", filled]) == 0
    assert capsys.readouterr().out == "1 rows\nleft out, the names were visible: 1\n"
    assert len(list(read_records(file, CerRecord))) == 1
    assert main(["export", str(rows), "--what", "votes", "--database-url", filled]) == 0
    assert len(list(read_votes(rows))) == 2
    assert main(["import", str(file), "--database-url", other]) == 0
    assert capsys.readouterr().out == "2 votes\n1 votes\n"
    with VoteStore(other) as store:
        assert [vote.flags for vote in store.votes()] == [("imported",)]


def test_a_person_is_deleted_by_pseudonym(filled, capsys):
    with VoteStore(filled) as store:
        pseudonym = next(store.votes()).voter

    assert main(["delete", pseudonym, "--database-url", filled]) == 0
    assert capsys.readouterr().out == "2 battles and 2 votes deleted\n"
    assert main(["delete", pseudonym, "--database-url", filled]) == 2
    assert pseudonym in capsys.readouterr().err


def test_a_deletion_beside_a_reader_says_that_traces_are_left(sqlite_url, capsys, monkeypatch):
    monkeypatch.setattr("compeer_core.votes.commands.ERASED_SECONDS", 0.05)
    with VoteStore(sqlite_url) as store:
        store.cast(fought(store), "ann", "first")
        pseudonym = next(store.votes()).voter
    with closing(sqlite3.connect(make_url(sqlite_url).database, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM battles").fetchone()
        assert main(["delete", pseudonym, "--database-url", sqlite_url]) == 0

    assert "1 votes deleted; the file still holds traces" in capsys.readouterr().out


def test_an_annotator_comes_in_with_the_token_that_is_shown(url, capsys):
    assert main(["annotator", "cy", "--may-adjudicate", "--database-url", url]) == 0
    token = capsys.readouterr().out.strip()

    with VoteStore(url) as store:
        assert Desk(store).log_in(token).may_adjudicate
    assert main(["annotator", "cy", "--database-url", url]) == 2
    assert main(["annotator", "cy", "--revoke", "--database-url", url]) == 0
    with VoteStore(url) as store:
        assert Desk(store).log_in(token) is None
    assert main(["annotator", "cy", "--delete", "--database-url", url]) == 0


def test_a_database_is_made_by_a_command(sqlite_url, capsys):
    assert main(["migrate", "--database-url", sqlite_url]) == 0

    assert "is up to date" in capsys.readouterr().out
    VoteStore(sqlite_url).close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["export", "a.txt"], "a.txt"),
        (["export", "a.csv", "--what", "votes"], "written as .jsonl"),
        (["import", "none.jsonl"], "cannot be read"),
        (["export"], "--help explains"),
    ],
)
def test_wrong_usage_is_one_sentence_and_code_2(filled, arguments, said, capsys):
    assert main([*arguments, "--database-url", filled]) == 2
    assert said in capsys.readouterr().err


def test_a_database_that_is_not_there_is_not_made_to_read_it(sqlite_url, tmp_path, capsys):
    for command in (["export", str(tmp_path / "a.jsonl")], ["delete", "v1"]):
        assert main([*command, "--database-url", sqlite_url]) == 2
        assert "there is no database of votes" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_package_names_what_others_use():
    assert compeer_core.votes.VoteStore is VoteStore
    assert callable(compeer_core.votes.export_cer)
    assert not hasattr(compeer_core.votes, "nothing")
