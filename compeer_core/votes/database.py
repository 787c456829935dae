"""Opening a database of votes, bringing it up to date, and transactions in it.

SQLite by default: a file in the user's data folder, with a write-ahead log, so that readers never wait
for a writer, and with every commit forced to the disk before it is acknowledged. PostgreSQL by URL,
for several servers over one database (extra ``postgres``).

A file that is no database of ours, or is damaged, is refused with a sentence and left as it is.
"""

import os
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import alembic.command
import alembic.config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry

from compeer_core.data_folder import DATABASE_URL, default_data_folder
from compeer_core.errors import ConfigError, StoreError
from compeer_core.votes.erasing import Eraser, is_due, mark_due

MIGRATIONS = Path(__file__).parent / "migrations"
VERSION_TABLE = "compeer_version"
"""Not alembic's own name: a PostgreSQL database may be shared with another program."""
_LOCK = 0x434F4D50
"""Names the lock under which PostgreSQL is migrated."""
_BUSY_SECONDS = 30.0
_WRITES = "compeer_writes"
_ERASES = "compeer_erases"


def default_url(folder: Path | None = None) -> str:
    """Return where votes are kept when no URL is given.

    In a file of the folder, if one is given; else in the database that the environment names; else in
    a file of the user's data folder.
    """
    named = os.environ.get(DATABASE_URL)
    if folder is None and named:
        return named
    path = (folder or default_data_folder()) / "compeer.sqlite3"
    return URL.create("sqlite", database=str(path)).render_as_string()


class Database:
    """A database with our tables, up to date."""

    def __init__(self, url: str | None = None) -> None:
        """Open it; make it, where there is none; bring it up to date, where it is older.

        Raises:
            ConfigError: The URL is wrong, the database cannot be reached, is damaged, is another
                program's, or was written by a newer version.
        """
        parsed = _parsed(default_url() if url is None else url)
        self.name = parsed.render_as_string(hide_password=True)
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        # SQLite has one writer at a time. Its own waiting is a sleep of up to a tenth of a second,
        # so threads of this process queue here instead.
        turn = threading.Lock()
        self._turn = turn if self.is_sqlite else nullcontext()
        self._eraser: Eraser | None = None
        if self.is_sqlite:
            assert parsed.database is not None
            _prepare_file(Path(parsed.database))
            self._eraser = Eraser(Path(parsed.database), turn)
        self._engine = _engine(parsed, is_sqlite=self.is_sqlite)
        self._writing_engine = self._engine.execution_options(**{_WRITES: True})
        try:
            with self._engine_begin() as connection:
                _migrate(connection, self.name, is_sqlite=self.is_sqlite)
                # Left by a program that was killed, or by one that only deleted and was gone.
                is_left = self._eraser is not None and is_due(connection)
        except SQLAlchemyError as error:
            self.close()
            raise ConfigError(f"{self.name}: cannot be used: {_reason(error)}") from error
        except BaseException:
            self.close()
            raise
        if self._eraser is not None and is_left:
            self._eraser.ask()

    def close(self) -> None:
        """Give the connections back. May be called twice."""
        if self._eraser is not None:
            self._eraser.close()
        self._engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A view of the database that does not change while it is read.

        Raises:
            StoreError: The database failed.
        """
        with self._told(), Session(self._engine) as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A transaction: all of it is on the disk when it ends, or nothing, if anything raises.

        Raises:
            StoreError: The database failed.
        """
        session = Session(self._writing_engine, expire_on_commit=False)
        with self._told(), self._turn, session, session.begin():
            yield session
        if _ERASES in session.info and self._eraser is not None:
            self._eraser.ask()

    def erase(self, session: Session) -> None:
        """Have what a transaction deletes overwritten in the files too; `erased` says when it is."""
        if self._eraser is not None:
            mark_due(session.connection())
            session.info[_ERASES] = True

    @property
    def erased(self) -> "Future[None]":
        """Done as soon as SQLite's files hold nothing any more of what was deleted by now.

        See `compeer_core.votes.erasing`. PostgreSQL does that for itself (``autovacuum``).
        """
        if self._eraser is not None:
            return self._eraser.erased
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (DBAPIError, PoolTimeoutError) as error:
            raise StoreError(f"the database of votes failed: {_reason(error)}") from error

    @contextmanager
    def _engine_begin(self) -> Iterator[Connection]:
        with self._turn, self._writing_engine.begin() as connection:
            yield connection


def migration_config(connection: Connection | None = None) -> alembic.config.Config:
    """Return what alembic needs to know."""
    config = alembic.config.Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _migrate(connection: Connection, name: str, *, is_sqlite: bool) -> None:
    """Bring the tables up to date, all in the transaction of the connection.

    A process that is killed meanwhile leaves the database as it was. Of several servers that start
    at once, one migrates and the others wait.
    """
    if not is_sqlite:
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    config = migration_config(connection)
    newest = ScriptDirectory.from_config(config).get_current_head()
    version = context.get_current_revision()
    if version == newest:
        return
    others = set(inspect(connection).get_table_names()) - {VERSION_TABLE} if is_sqlite else set()
    if version is None and others:
        raise ConfigError(
            f"{name}: is a database of another program, and was left as it was; name another file"
        )
    try:
        alembic.command.upgrade(config, "head")
    except CommandError as error:
        raise ConfigError(
            f"{name}: was written by a newer version of COMPEER (its tables are at {version}, this "
            f"version knows those up to {newest}); update COMPEER or name another database"
        ) from error


def _parsed(url: str) -> URL:
    # A URL may hold a password, so no message repeats it.
    try:
        parsed = make_url(url)
        backend = parsed.get_backend_name()
        parsed.get_dialect()
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        raise ConfigError(
            "the database must look like sqlite:///FOLDER/NAME.sqlite3 or "
            "postgresql://USER:PASSWORD@HOST/NAME"
        ) from error
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise ConfigError(f"votes are kept in sqlite or postgresql, not in {backend}")
    if parsed.database in {None, "", ":memory:"} or "mode" in parsed.query:
        raise ConfigError("votes are kept in a file: sqlite:///FOLDER/NAME.sqlite3")
    return parsed.set(drivername="sqlite")


def _engine(url: URL, *, is_sqlite: bool) -> Engine:
    if not is_sqlite:
        try:
            return create_engine(url, pool_pre_ping=True)
        except ImportError as error:
            raise ConfigError(
                "PostgreSQL needs an extra: pip install 'compeer[postgres]'"
            ) from error
    engine = create_engine(url, connect_args={"timeout": _BUSY_SECONDS})
    event.listen(engine, "connect", _prepare_connection)
    event.listen(engine, "begin", _begin)
    return engine


def _prepare_connection(connection: sqlite3.Connection, _: ConnectionPoolEntry) -> None:
    connection.isolation_level = None  # transactions begin where we say, tables included
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
        "secure_delete=ON",  # what is deleted is overwritten
    ):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin(connection: Connection) -> None:
    # A transaction that reads before it writes could not become a writer while another one is.
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _prepare_file(path: Path) -> None:
    """Make an empty file for this user alone, or look whether what is there is sound.

    Raises:
        ConfigError: It cannot be made, read or written, is damaged, or is no database.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise ConfigError(
            f"the database {path} cannot be opened: {error.strerror or error}"
        ) from error
    try:
        with closing(sqlite3.connect(path, timeout=_BUSY_SECONDS)) as connection:
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.OperationalError as error:
        raise ConfigError(f"the database {path} cannot be opened: {error}") from error
    except sqlite3.DatabaseError as error:
        found = str(error)
    if found != "ok":
        raise ConfigError(
            f"the database {path} is damaged, or no database ({found}). It was left as it was: move "
            "it away to begin a new one, or put a copy in its place; "
            f"'sqlite3 {path} .recover' shows what can still be read"
        )


def _reason(error: SQLAlchemyError) -> str:
    """Return what the database said, without the statement and the values in it."""
    said = error.orig if isinstance(error, DBAPIError) else error
    return next(iter(str(said).splitlines()), "") or type(said).__name__
