"""Opens the database behind a URL and hands out its connections."""

import os
import re
import shlex
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event, select
from sqlalchemy.engine import make_url

from autotune.errors import StorageUnavailable, StorageUnreachable, UnknownStudy
from autotune.storage.error_translation import (
    StorageBusy,
    damage_hint,
    parse_url,
    redacted_url,
    storage_errors,
)
from autotune.storage.file_systems import check_journal_mode, reject_network_file_system
from autotune.storage.stored_columns import decode
from autotune.storage.tables import IDENTITY

BUSY_TIMEOUT_SECONDS = 60.0
"""How long SQLite waits for another process's lock."""
SHORT_BUSY_TIMEOUT_SECONDS = 5.0
"""The same for a search, which retries by itself and can be stopped while it waits."""

CONNECT_TIMEOUT_SECONDS = 5

PSYCOPG = "postgresql+psycopg"

# A lost connection is noticed within a minute instead of the system's two hours; no session waits
# for a lock, or holds one while idle, for longer than SQLite would; and commits are on disk.
POSTGRESQL_CONNECTION = {
    "connect_timeout": CONNECT_TIMEOUT_SECONDS,
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 50_000,
}
POSTGRESQL_SESSION = f"""
SELECT set_config('lock_timeout', '{BUSY_TIMEOUT_SECONDS:g}s', false),
       set_config('idle_in_transaction_session_timeout', '{BUSY_TIMEOUT_SECONDS:g}s', false),
       set_config('synchronous_commit',
                  coalesce(nullif(current_setting('synchronous_commit'), 'off'), 'on'), false)
"""


class Database:
    """Connections to one database.

    With `create`, a SQLite file is created where there is none; with `read_only`, nothing in it
    changes. Where this process has used the database before (`was_reached`), one that cannot be
    reached is treated as temporarily away: StorageUnreachable instead of StorageUnavailable.
    """

    def __init__(
        self,
        url: str,
        *,
        create: bool = False,
        read_only: bool = False,
        was_reached: bool = False,
        busy_timeout_seconds: float = BUSY_TIMEOUT_SECONDS,
    ) -> None:
        self.url = redacted_url(url)
        """The URL without its password, for messages."""
        self.is_read_only = read_only
        self._was_reached = was_reached
        self._written_file: tuple[int, int] | None = None
        """Device and inode of the file at the first write."""
        self.file = sqlite_file(url)
        """The SQLite file; None for another database or one in memory."""
        with self.opening():
            if self.file is None:
                self.engine = _server_engine(make_url(url))
                return
            _check_file(self.file, self.url, create=create)
            if read_only:
                self.engine = _read_only_engine(self.file, busy_timeout_seconds)
            else:
                self.engine = create_engine(
                    url, connect_args={"timeout": busy_timeout_seconds}, json_deserializer=decode
                )
                event.listen(self.engine, "connect", partial(_configure_sqlite, self.file))

    def close(self) -> None:
        self.engine.dispose()

    @cached_property
    def identity(self) -> str | None:
        """32 hexadecimal digits, drawn for each new database; None where it has no table for them.

        Raises StorageUnavailable where the table holds anything else: this becomes the name of a
        folder.
        """
        with self.reading() as connection:
            if not sqlalchemy.inspect(connection).has_table(IDENTITY.name):
                return None
            found = connection.scalars(select(IDENTITY.c.identity)).all()
        if len(found) != 1 or not is_identity(found[0]):
            raise StorageUnavailable(
                f"the studies database {self.url} has lost its identity: the table "
                f"{IDENTITY.name} has {found!r:.100}",
                hint=damage_hint(self.url),
            )
        return str(found[0])

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Raises StorageUnavailable instead of StorageUnreachable for one never reached before.

        Its URL, its permissions or its server are then wrong, and waiting does not help.
        """
        try:
            with storage_errors(self.url):
                yield
        except StorageBusy:
            raise
        except StorageUnreachable as error:
            if self._was_reached:
                raise
            raise StorageUnavailable(error.message, hint=error.hint) from None

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Yields a connection for reads."""
        with storage_errors(self.url), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """Yields a connection whose reads all see the same snapshot of the database."""
        with self.reading() as connection:
            if connection.dialect.name == "sqlite":
                connection.exec_driver_sql("BEGIN")
                yield connection
                return
            options: dict[str, Any] = {"isolation_level": "REPEATABLE READ"}
            if connection.dialect.name == "postgresql":
                options["postgresql_readonly"] = True
            yield connection.execution_options(**options)

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Yields a connection in one transaction, committed at the block's end.

        Where the block raises, it is rolled back.
        """
        with storage_errors(self.url), self.engine.begin() as connection:
            self._check_not_removed()
            yield connection

    def _check_not_removed(self) -> None:
        """Raises StorageUnreachable where the file of the open connection is not there any more.

        SQLite itself would go on, and write into a file that ends with this process.
        """
        if self.file is None:
            return
        try:
            status = self.file.stat()
        except OSError:
            found = None
        else:
            found = (status.st_dev, status.st_ino)
        if self._written_file is None:
            self._written_file = found
        if found is None or found != self._written_file:
            raise StorageUnreachable(
                f"the database {self.url} was removed or replaced while it was in use",
                hint="put it back where it was",
            )


def is_identity(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None


def sqlite_file(url: str) -> Path | None:
    """Returns the file of a SQLite URL; None for another database or one in memory."""
    with storage_errors(url):
        parsed = parse_url(url)
    if parsed.get_backend_name() != "sqlite" or parsed.query.get("mode") == "memory":
        return None
    # With ?uri=true the name is itself a URL, in SQLite's format.
    name = (parsed.database or "").removeprefix("file:")
    if name in ("", ":memory:"):
        return None
    file = Path(name)
    if file.parts[0].startswith("~"):
        raise StorageUnavailable(
            f"the database {str(file)!r} would be in a folder named {file.parts[0]!r}",
            hint="write the home directory out: sqlite:////home/me/studies.db, with four slashes",
        )
    try:
        os.stat(file)
    except (FileNotFoundError, NotADirectoryError):
        pass  # a new file, or one about which opening it says what is wrong
    except (OSError, ValueError) as error:  # a link to itself, or a name that no file can have
        raise StorageUnavailable(
            f"the database {str(file)!r:.200} cannot be used: "
            f"{getattr(error, 'strerror', None) or error}",
            hint="name another file, such as sqlite:///studies/autotune.db",
        ) from None
    if os.path.islink(file):
        return Path(os.path.realpath(file))  # SQLite's log is next to the file it points to
    return file


def _check_file(file: Path, url: str, *, create: bool) -> None:
    """Makes the folder of a new file; SQLite itself says what is wrong with one that is there.

    Raises UnknownStudy for a missing file without `create`, and StorageUnavailable for one on a
    network file system, and for what is no file: SQLite would wait for a pipe.
    """
    reject_network_file_system(file)
    if file.exists() and not file.is_file():
        what = "a folder, not a file" if file.is_dir() else "not a regular file"
        raise StorageUnavailable(
            f"the studies database {file} is {what}",
            hint="name a file, such as sqlite:///studies/autotune.db",
        )
    if create:
        file.parent.mkdir(parents=True, exist_ok=True)
    elif not file.exists():
        raise UnknownStudy(
            f"the studies database {file} is not there",
            hint="begin a study there with: autotune search --storage "
            f"{shlex.quote(redacted_url(url))}",
        )


def _read_only_engine(file: Path, busy_timeout_seconds: float) -> Engine:
    """Returns an engine that writes nothing.

    A file without a log is open in no process: it is read as immutable, which also works in a
    read-only folder.
    """
    uri = f"file:{quote(str(file.absolute()))}?mode=ro"
    if not file.with_name(file.name + "-wal").exists():
        uri += "&immutable=1"
    return create_engine(
        "sqlite://",
        creator=lambda: sqlite3.connect(uri, uri=True, timeout=busy_timeout_seconds),
        poolclass=NullPool,
        json_deserializer=decode,
    )


def _server_engine(url: URL) -> Engine:
    if url.get_backend_name() == "sqlite":
        raise StorageUnavailable(
            f"{redacted_url(str(url))!r} is a database in memory, which ends with this process",
            hint="name a file: sqlite:///studies/autotune.db",
        )
    url = with_driver(url)
    options: dict[str, Any] = {}
    if url.get_backend_name() == "postgresql":
        options["json_deserializer"] = decode  # other databases' dialects may not know it
    engine = create_engine(url, pool_pre_ping=True, connect_args=connection_options(url), **options)
    if url.drivername == PSYCOPG:
        event.listen(engine, "connect", _configure_postgresql)
    return engine


def with_driver(url: URL) -> URL:
    """Returns `url` with psycopg as its driver, if it names PostgreSQL without a driver."""
    if url.drivername in ("postgresql", "postgres"):
        return url.set(drivername=PSYCOPG)
    return url


def connection_options(url: URL) -> dict[str, Any]:
    """Returns the options of a connection that `url` leaves open."""
    if url.get_backend_name() == "sqlite":
        return {"timeout": BUSY_TIMEOUT_SECONDS}
    if url.drivername != PSYCOPG:
        return {}
    return {name: value for name, value in POSTGRESQL_CONNECTION.items() if name not in url.query}


def _configure_postgresql(connection: Any, _record: Any) -> None:
    connection.execute(POSTGRESQL_SESSION)
    connection.commit()  # a rollback of the first transaction would undo the settings


def _configure_sqlite(file: Path, connection: Any, _record: Any) -> None:
    """WAL lets readers work while one process writes; FULL syncs every commit to disk."""
    (journal_mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
    check_journal_mode(journal_mode, file)
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA foreign_keys=ON")
