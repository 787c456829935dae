"""Opening and migrating the database of votes, and its transactions.

SQLite by default: a file in the user's data folder, with a write-ahead log, so that readers never wait for a
writer, and with every commit synced to disk before it is acknowledged. PostgreSQL by URL, for several servers on
one database (extra ``postgres``).

A file that is damaged or belongs to another program is rejected and left unchanged.
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
"""Not alembic's default: a PostgreSQL database may be shared with another program."""
_LOCK = 0x434F4D50
"""Key of the PostgreSQL lock for migrations."""
_BUSY_SECONDS = 30.0
_WRITES = "compeer_writes"
_ERASES = "compeer_erases"


def default_url(folder: Path | None = None) -> str:
    """Return the default URL of the database.

    A file in the folder, if given; else the database named by the environment; else a file in the
    user's data folder. The path is absolute, so that the URL is right in every working directory.
    """
    from_environment = os.environ.get(DATABASE_URL)
    if folder is None and from_environment:
        return from_environment
    path = (folder or default_data_folder()).absolute() / "compeer.sqlite3"
    return URL.create("sqlite", database=str(path)).render_as_string()


class Database:
    """A database with the tables of the current version."""

    def __init__(self, url: str | None = None) -> None:
        """Open the database; create or migrate it if needed.

        Raises:
            ConfigError: The URL is wrong, the database cannot be reached, is damaged, is another
                program's, or was written by a newer version.
        """
        parsed = _parsed(default_url() if url is None else url)
        self.name = parsed.render_as_string(hide_password=True)
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        # SQLite has one writer at a time, and waits by sleeping up to a tenth of a second. So threads of
        # this process queue for a lock instead.
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
                # Left by a program that ended before it was done.
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
        """Close all connections. May be called twice."""
        if self._eraser is not None:
            self._eraser.close()
        self._engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Open a read transaction: a consistent snapshot.

        Raises:
            StoreError: The database failed.
        """
        with self._database_errors(), Session(self._engine) as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """Open a write transaction: durable when the block ends, rolled back if it raises.

        Raises:
            StoreError: The database failed.
        """
        session = Session(self._writing_engine, expire_on_commit=False)
        with self._database_errors(), self._turn, session, session.begin():
            yield session
        if _ERASES in session.info and self._eraser is not None:
            self._eraser.ask()

    def erase(self, session: Session) -> None:
        """Overwrite what a transaction deletes in the files too; see `erased`."""
        if self._eraser is not None:
            mark_due(session.connection())
            session.info[_ERASES] = True

    @property
    def erased(self) -> "Future[None]":
        """Done when SQLite's files have no trace of the data deleted so far.

        See `compeer_core.votes.erasing`. PostgreSQL has ``autovacuum``.
        """
        if self._eraser is not None:
            return self._eraser.erased
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @contextmanager
    def _database_errors(self) -> Iterator[None]:
        try:
            yield
        except (DBAPIError, PoolTimeoutError) as error:
            raise StoreError(f"the database of votes failed: {_reason(error)}") from error

    @contextmanager
    def _engine_begin(self) -> Iterator[Connection]:
        with self._turn, self._writing_engine.begin() as connection:
            yield connection


def migration_config(connection: Connection | None = None) -> alembic.config.Config:
    """Return the configuration of alembic."""
    config = alembic.config.Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _migrate(connection: Connection, name: str, *, is_sqlite: bool) -> None:
    """Migrate the tables within the transaction of the connection.

    If the process is killed, the database is unchanged. Of several servers that start at once, one
    migrates and the others wait.
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
            f"{name}: belongs to another program, and was not changed; name another file"
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
        raise ConfigError(f"votes are stored in sqlite or postgresql, not in {backend}")
    if parsed.database in {None, "", ":memory:"} or "mode" in parsed.query:
        raise ConfigError("votes are stored in a file: sqlite:///FOLDER/NAME.sqlite3")
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
    connection.isolation_level = None  # the driver must not begin transactions itself
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
        "secure_delete=ON",  # what is deleted is overwritten
    ):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin(connection: Connection) -> None:
    # A transaction that reads first could not become a writer while another one writes.
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _prepare_file(path: Path) -> None:
    """Create an empty file for this user only, or check the existing one.

    Raises:
        ConfigError: It cannot be created, read or written, is damaged, or is not a database.
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
            state = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.OperationalError as error:
        raise ConfigError(f"the database {path} cannot be opened: {error}") from error
    except sqlite3.DatabaseError as error:
        state = str(error)
    if state != "ok":
        raise ConfigError(
            f"the database {path} is damaged, or not a database ({state}). It was not changed: move "
            "it away to start a new one, or restore a backup; "
            f"'sqlite3 {path} .recover' shows what can still be read"
        )


def _reason(error: SQLAlchemyError) -> str:
    """Return the message of the database, without the statement and its values."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return next(iter(str(cause).splitlines()), "") or type(cause).__name__
