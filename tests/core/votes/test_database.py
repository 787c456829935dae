"""Opening databases of votes: new, old, half migrated, damaged, foreign, unreachable."""

import os
import signal
import sqlite3
import stat
import sys
from contextlib import closing
from pathlib import Path

import alembic.command
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine, inspect, make_url, text

from compeer_core.errors import ConfigError, StoreError
from compeer_core.votes.database import (
    VERSION_TABLE,
    Database,
    default_url,
    migration_config,
)
from compeer_core.votes.schema import Base
from compeer_core.votes.store import VoteStore
from tests.core.votes.made_up import fought
from tests.core.votes.opening import open_and_close, open_and_die, started

OLDEST, NEWEST = "0001", "0005"


@pytest.fixture
def url(new_url):
    return new_url


def path_of(url):
    return Path(make_url(url).database)


def version_of(url):
    engine = create_engine(make_url(url))
    try:
        with engine.connect() as connection:
            found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()
            return found, inspect(connection).get_table_names()
    finally:
        engine.dispose()


def take_back_to(url, version):
    database = Database(url)
    with database._engine_begin() as connection:
        alembic.command.downgrade(migration_config(connection), version)
    database.close()


def killed_while(url, operation, times=1):
    """Open the database in a process that dies when it is about to do something for the nth time."""
    process = started(open_and_die, url, operation, times)
    process.join(60)
    return process.exitcode == -signal.SIGKILL


# --- migrations ---------------------------------------------------------------------------------


def test_the_migrations_make_the_tables_that_the_code_knows(url):
    database = Database(url)
    with database._engine_begin() as connection:
        options = {"version_table": VERSION_TABLE, "compare_server_default": True}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, Base.metadata) == []
    database.close()


def test_a_database_is_opened_again_as_it_was(url):
    with VoteStore(url) as store:
        store.cast(fought(store), "ann", "first")
    with VoteStore(url) as store:
        assert len(list(store.votes())) == 1


def test_an_older_database_is_brought_up_to_date_and_keeps_its_votes(url):
    with VoteStore(url) as store:
        store.cast(fought(store), "ann", "first")
    take_back_to(url, OLDEST)
    assert "desk_items" not in version_of(url)[1]

    with VoteStore(url) as store:
        assert len(list(store.votes())) == 1
    version, tables = version_of(url)
    assert version == NEWEST
    assert "desk_items" in tables


def test_migrations_lead_back_to_nothing(url):
    take_back_to(url, "base")

    assert version_of(url) == (None, [VERSION_TABLE])
    Database(url).close()
    assert version_of(url)[0] == NEWEST


@pytest.mark.parametrize("operation", ["create_table", "create_index", "execute"])
def test_a_migration_that_is_killed_halfway_leaves_the_database_as_it_was(url, operation):
    with VoteStore(url) as store:
        store.cast(fought(store), "ann", "first")
    take_back_to(url, OLDEST)
    before = version_of(url)

    assert killed_while(url, operation)

    assert version_of(url) == before
    with VoteStore(url) as store:
        assert len(list(store.votes())) == 1
    assert version_of(url)[0] == NEWEST


def test_a_first_migration_that_is_killed_halfway_is_made_anew(url):
    assert killed_while(url, "create_table", times=5)

    with VoteStore(url) as store:
        assert store.cast(fought(store), "ann", "first").counted


def test_servers_that_start_at_once_share_one_migration(url):
    starting = [started(open_and_close, url) for _ in range(4)]
    for each in starting:
        each.join(120)

    assert [each.exitcode for each in starting] == [0] * 4
    assert version_of(url)[0] == NEWEST


def test_a_database_of_a_newer_version_is_rejected_and_unchanged(url):
    Database(url).close()
    engine = create_engine(make_url(url))
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    engine.dispose()

    with pytest.raises(ConfigError, match=r"newer version of COMPEER.*9999.*0005"):
        Database(url)

    assert version_of(url)[0] == "9999"


# --- files --------------------------------------------------------------------------------------


def with_votes(url):
    with VoteStore(url) as store:
        for number in range(20):
            store.cast(fought(store), "ann", "first", note=f"{number} " * 500)
    return path_of(url).read_bytes()


def flipped(content):
    middle = len(content) // 2
    return content[:middle] + bytes(255 - byte for byte in content[middle:])


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"not a database at all" * 100,
        lambda content: bytes(4096),
        lambda content: content[: len(content) // 2],
        lambda content: content[:50],
        lambda content: content[:16] + b"\xff" * 84 + content[100:],
        flipped,
    ],
    ids=["text", "zeros", "cut in half", "cut in the header", "header", "pages"],
)
def test_a_damaged_file_is_rejected_with_a_message_and_unchanged(sqlite_url, damage):
    path = path_of(sqlite_url)
    damaged = damage(with_votes(sqlite_url))
    path.write_bytes(damaged)

    with pytest.raises(ConfigError, match="not changed") as caught:
        VoteStore(sqlite_url)

    assert str(path) in str(caught.value)
    assert path.read_bytes() == damaged
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_damage_to_a_file_in_use_is_reported(sqlite_url):
    with_votes(sqlite_url)
    with VoteStore(sqlite_url) as store:
        path_of(sqlite_url).write_bytes(b"gone" * 4096)
        store.database.close()  # connections that hold pages in memory would not notice

        with pytest.raises(StoreError, match="the database of votes failed"):
            list(store.votes())


def test_a_database_of_another_program_is_rejected_and_unchanged(sqlite_url):
    path = path_of(sqlite_url)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
        connection.commit()
    before = path.read_bytes()

    with pytest.raises(ConfigError, match="another program"):
        Database(sqlite_url)

    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("recipes",)]
    assert len(before) == path.stat().st_size


def test_an_empty_file_becomes_a_database(sqlite_url):
    path_of(sqlite_url).touch()

    with VoteStore(sqlite_url) as store:
        assert list(store.votes()) == []


def test_folders_are_made_and_nobody_else_may_read_the_file(tmp_path):
    path = tmp_path / "a b%20'é" / "votes #1?.sqlite3"
    Database(f"sqlite:///{path}".replace("?", "%3F").replace("%20", "%2520")).close()

    [made] = path.parent.iterdir()
    assert stat.S_IMODE(made.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", [".", "file/inside"], ids=["a folder", "below a file"])
def test_a_file_that_cannot_be_opened_is_reported(tmp_path, name):
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match="cannot be opened"):
        Database(f"sqlite:///{tmp_path / name}")


def test_votes_are_stored_in_the_users_data_folder_by_default(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))

    with VoteStore() as store:
        assert store.database.name == default_url()
    assert len(list(tmp_path.rglob("compeer.sqlite3"))) == 1


# --- addresses of databases -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "votes.sqlite3",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///file:x?mode=memory&uri=true",
        "mysql://user:hush@host/db",
        "nonsense://user:hush@host/db",
        "postgresql+nonsense://user:hush@host/db",
        "postgresql://user:hush@host:port/db",
    ],
)
def test_an_invalid_address_is_rejected_without_showing_its_password(wrong):
    with pytest.raises(ConfigError) as caught:
        Database(wrong)

    assert "sqlite" in str(caught.value)
    assert "hush" not in str(caught.value)


def test_an_unreachable_server_is_reported_without_its_password():
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        Database("postgresql://user:hush@127.0.0.1:1/db")

    assert "hush" not in str(caught.value)
    assert "127.0.0.1:1" in str(caught.value)


def test_a_missing_driver_is_reported_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)

    with pytest.raises(ConfigError, match=r"pip install 'compeer\[postgres\]'"):
        Database("postgresql://user@127.0.0.1:1/db")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_reported(tmp_path):
    tmp_path.chmod(0o500)

    with pytest.raises(ConfigError, match="cannot be opened"):
        Database(f"sqlite:///{tmp_path / 'votes.sqlite3'}")
