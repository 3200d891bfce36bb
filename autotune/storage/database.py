"""The database behind a URL: how it is opened, and its connections."""

import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event
from sqlalchemy.engine import make_url

from autotune.errors import StorageAway, StorageUnavailable, UnknownStudy
from autotune.storage.error_translation import StorageBusy, parsed_url, shown_url, storage_errors
from autotune.storage.file_systems import refuse_network_file_system, refuse_without_write_ahead_log
from autotune.storage.integrity.sqlite_file import (
    make_file,
    refuse_damaged_file,
    refuse_log_without_its_file,
)

BUSY_TIMEOUT_SECONDS = 60.0
"""How long SQLite waits for another process's lock."""
SHORT_BUSY_TIMEOUT_SECONDS = 5.0
"""For a search, which waits by itself and looks meanwhile whether it is to stop."""

CONNECT_TIMEOUT_SECONDS = 5

PSYCOPG = "postgresql+psycopg"

# A server that is cut off is noticed within a minute instead of the system's two hours; nobody
# waits for a lock, or keeps one while doing nothing, longer than SQLite would; and what was
# committed is on disk.
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


_open_files: Counter[Path] = Counter()
_opening = threading.Lock()


class Database:
    """Connections to one database.

    A file is only made with `create`; with `read_only` nothing in it changes.

    Where this process has reached it before (`was_reached`), what cannot be reached now is away,
    and will come back.
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
        self.url = shown_url(url)
        """As it may be shown: without its password."""
        self.is_read_only, self._was_reached = read_only, was_reached
        self.file = sqlite_file(url)
        """None: not SQLite, or not a file."""
        self._place = None if self.file is None else self.file.resolve()
        self._is_frozen = read_only and self.file is not None and not _log_of(self.file).exists()
        self._found = _state_of(self.file) if self._is_frozen else None
        with self.opening():
            if self.file is None:
                self.engine = _server_engine(make_url(url))
                return
            _look_at_file(self.file, self.url, create=create)
            if read_only:
                self.engine = _read_only_engine(
                    self.file, busy_timeout_seconds, is_frozen=self._is_frozen
                )
            else:
                self.engine = create_engine(url, connect_args={"timeout": busy_timeout_seconds})
                event.listen(self.engine, "connect", partial(_durable_sqlite, self.file))

    def close(self) -> None:
        self.engine.dispose()
        if self._place is not None:
            with _opening:
                _open_files[self._place] -= 1

    @property
    def has_been_opened_meanwhile(self) -> bool:
        """Whether somebody writes into a file that nobody had open when it was opened here to be read."""
        if not self._is_frozen or self.file is None:
            return False
        return _log_of(self.file).exists() or _state_of(self.file) != self._found

    @contextmanager
    def opening(self) -> Iterator[None]:
        """What was never reached is not away: its URL, its rights or its server are not as they should be."""
        try:
            with storage_errors(self.url):
                yield
        except StorageBusy:
            raise
        except StorageAway as error:
            if self._was_reached:
                raise
            raise StorageUnavailable(error.message, hint=error.hint) from None

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        with storage_errors(self.url), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """Reads of one moment, whatever others write meanwhile."""
        with self.reading() as connection:
            if connection.dialect.name == "sqlite":
                connection.exec_driver_sql("BEGIN")
                yield connection
            else:
                yield connection.execution_options(
                    isolation_level="REPEATABLE READ",
                    **(
                        {"postgresql_readonly": True}
                        if connection.dialect.name == "postgresql"
                        else {}
                    ),
                )

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """One transaction: committed when the block ends, rolled back when it raises."""
        with storage_errors(self.url), self.engine.begin() as connection:
            yield connection


def sqlite_file(url: str) -> Path | None:
    """The file behind a SQLite URL; None for another database or one in memory."""
    with storage_errors(url):
        parsed = parsed_url(url)
    name = (parsed.database or "").removeprefix(
        "file:"
    )  # with ?uri=true it is a URL of SQLite's own
    if (
        parsed.get_backend_name() != "sqlite"
        or name in ("", ":memory:")
        or parsed.query.get("mode") == "memory"
    ):
        return None
    file = Path(name)
    return (
        file.resolve() if os.path.islink(file) else file
    )  # SQLite's log lies beside the file itself


def _look_at_file(file: Path, url: str, *, create: bool) -> None:
    """Raises StorageUnavailable and UnknownStudy for what is no studies database, before SQLite opens it.

    Closing a file that SQLite has open in the same process would drop SQLite's locks on it.
    """
    refuse_network_file_system(file)
    refuse_log_without_its_file(file, url)
    with _opening:
        if not _open_files[file.resolve()]:
            if create and not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                make_file(file)
            elif not create and not file.is_file():
                what = "a folder, not a studies database" if file.is_dir() else "not there"
                raise UnknownStudy(
                    f"the studies database {file} is {what}",
                    hint="begin a study with: autotune search",
                )
            if file.is_file():
                refuse_damaged_file(file, url)
        _open_files[file.resolve()] += 1


def _state_of(file: Path | None) -> tuple[int, int] | None:
    """Changes with every change of the file; None where it is not there."""
    try:
        found = None if file is None else file.stat()
    except OSError:
        return None
    return None if found is None else (found.st_size, found.st_mtime_ns)


def _log_of(file: Path) -> Path:
    return file.with_name(file.name + "-wal")


def _read_only_engine(file: Path, busy_timeout_seconds: float, *, is_frozen: bool) -> Engine:
    """Without a log nobody has the database open: then it is read as it lies there, also in a read-only folder."""
    uri = f"file:{quote(str(file.absolute()))}?mode=ro{'&immutable=1' if is_frozen else ''}"
    return create_engine(
        "sqlite://",
        creator=lambda: sqlite3.connect(uri, uri=True, timeout=busy_timeout_seconds),
        poolclass=NullPool,
    )


def _server_engine(url: URL) -> Engine:
    if url.get_backend_name() == "sqlite":
        raise StorageUnavailable(
            f"{shown_url(str(url))!r} is a database in memory, which ends with this process",
            hint="name a file: sqlite:///studies/autotune.db",
        )
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername=PSYCOPG)
    if url.drivername != PSYCOPG:
        return create_engine(url, pool_pre_ping=True)
    connection = {
        name: value for name, value in POSTGRESQL_CONNECTION.items() if name not in url.query
    }
    engine = create_engine(url, pool_pre_ping=True, connect_args=connection)
    event.listen(engine, "connect", _patient_postgresql)
    return engine


def _patient_postgresql(connection: Any, _record: Any) -> None:
    connection.execute(POSTGRESQL_SESSION)
    connection.commit()  # or a first rollback would undo it


def _durable_sqlite(file: Path, connection: Any, _record: Any) -> None:
    """WAL lets readers and a writer work side by side; FULL syncs every commit to disk."""
    (journal_mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
    refuse_without_write_ahead_log(journal_mode, file)
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA foreign_keys=ON")
