"""Databases for the tests of the votes store: SQLite files, and a real PostgreSQL.

``COMPEER_TEST_POSTGRES``
    The URL of a PostgreSQL server whose user may create databases. Without it, one is started from
    Debian's package, and where that is not installed the tests that need it are skipped.
"""

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

from compeer_core.votes.database import Database
from compeer_core.votes.schema import Base
from compeer_core.votes.store import VoteStore
from tests.core.votes.made_up import NOON
from tests.databases import write_empty
from tests.voting import Clock


def _programs() -> Path | None:
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parts[4]))
    return folders[-1] if folders else None


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a server, `postgresql://USER@HOST:PORT/DATABASE`."""
    named = os.environ.get("COMPEER_TEST_POSTGRES")
    if named:
        yield named
        return
    programs = _programs()
    if programs is None:
        pytest.skip("no PostgreSQL; on Debian: apt-get install postgresql")
    user = "postgres" if os.geteuid() == 0 else None  # it refuses to run as root
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = Path(tempfile.mkdtemp())  # pytest's own folders cannot be entered by another user
    if user:
        shutil.chown(folder, user)

    def run(program: str, *arguments: str) -> None:
        command = [programs / program, "-D", folder / "data", *arguments]
        subprocess.run(
            command,
            user=user,
            cwd=folder,
            check=True,
            timeout=60,
            stdout=subprocess.DEVNULL,
        )

    run("initdb", "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8")
    # No test survives a crash of the machine, so the server need not wait for the disk.
    options = f"-h 127.0.0.1 -p {port} -k {folder} -c fsync=off"
    run("pg_ctl", "-w", "-o", options, "-l", str(folder / "log"), "start")
    yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
    run("pg_ctl", "-w", "-m", "immediate", "stop")
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _new_database(postgres: str) -> Iterator[str]:
    server = make_url(postgres).set(drivername="postgresql+psycopg")
    name = f"test_{secrets.token_hex(6)}"
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} ENCODING 'UTF8' TEMPLATE template0"))
    yield server.set(database=name).render_as_string(hide_password=False)
    with engine.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    engine.dispose()


@pytest.fixture
def postgres_url(postgres: str) -> Iterator[str]:
    """The URL of a new database without tables on a real server."""
    with _new_database(postgres) as url:
        yield url


@pytest.fixture(scope="session")
def _shared_database(postgres: str) -> Iterator[str]:
    """A database with tables; making one takes longer than most tests."""
    with _new_database(postgres) as url:
        Database(url).close()
        yield url


@pytest.fixture
def _emptied_url(_shared_database: str) -> Iterator[str]:
    yield _shared_database
    engine = create_engine(_shared_database, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        others = "datname = current_database() AND pid <> pg_backend_pid()"
        connection.execute(
            text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")
        )
        tables = ", ".join(Base.metadata.tables)
        connection.execute(text(f"TRUNCATE {tables} RESTART IDENTITY CASCADE"))
    engine.dispose()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of a file that is not there yet."""
    return f"sqlite:///{tmp_path / 'votes.sqlite3'}"


@pytest.fixture(params=["sqlite", "postgresql"])
def new_url(request: pytest.FixtureRequest) -> str:
    """The URL of a database without tables, of either kind."""
    name = "sqlite_url" if request.param == "sqlite" else "postgres_url"
    url: str = request.getfixturevalue(name)
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of a database with empty tables, of either kind."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("_emptied_url"))
    file = request.getfixturevalue("tmp_path") / "votes.sqlite3"
    write_empty(file)
    return f"sqlite:///{file}"


@pytest.fixture
def clock() -> Clock:
    """A clock that stands still until it is set."""
    return Clock(NOON)


@pytest.fixture
def store(url: str, clock: Clock) -> Iterator[VoteStore]:
    """An empty store, on either database."""
    with VoteStore(url, clock=clock) as opened:
        yield opened
