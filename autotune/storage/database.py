"""Opens the database behind a URL and hands out its connections."""

import errno
import os
import re
import shlex
import sqlite3
import stat
import threading
from collections import Counter
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
from autotune.storage.integrity.sqlite_file import (
    check_sqlite_file,
    create_empty_database,
    reject_orphaned_log,
)
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


_open_files: Counter[Path] = Counter()
"""How many Database objects of this process have a file open; guarded by `_opening`."""
_opening = threading.Lock()


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
        self._resolved_file = None if self.file is None else self.file.resolve()
        self._is_frozen = read_only and self.file is not None and not _log_file(self.file).exists()
        """Whether the file is read as it is, because no process has it open for writing."""
        self._state_when_opened = _file_state(self.file) if self._is_frozen else None
        with self.opening():
            if self.file is None:
                self.engine = _server_engine(make_url(url))
                return
            _check_file(self.file, self.url, create=create)
            if read_only:
                self.engine = _read_only_engine(
                    self.file, busy_timeout_seconds, is_frozen=self._is_frozen
                )
            else:
                self.engine = create_engine(
                    url, connect_args={"timeout": busy_timeout_seconds}, json_deserializer=decode
                )
                event.listen(self.engine, "connect", partial(_configure_sqlite, self.file))

    def close(self) -> None:
        self.engine.dispose()
        if self._resolved_file is not None:
            with _opening:
                _open_files[self._resolved_file] -= 1

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

    @property
    def has_been_opened_meanwhile(self) -> bool:
        """Whether another process has opened the file since it was opened here as frozen.

        What was read may then be inconsistent.
        """
        if not self._is_frozen or self.file is None:
            return False
        return _log_file(self.file).exists() or _file_state(self.file) != self._state_when_opened

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
    _check_path(file)
    if os.path.islink(file):
        return file.resolve()  # SQLite's log is next to the file that the link points to
    return file


def _check_path(file: Path) -> None:
    """Raises StorageUnavailable for a path that no file can have, such as a link to itself."""
    if file.parts and file.parts[0].startswith("~"):
        raise StorageUnavailable(
            f"the database {str(file)!r} would be in a folder named {file.parts[0]!r}",
            hint="write the home directory out: sqlite:////home/me/studies.db, with four slashes",
        )
    if reason := _reason_against(file):
        raise StorageUnavailable(
            f"the database {str(file)!r:.200} cannot be used: {reason}",
            hint="name another file, such as sqlite:///studies/autotune.db",
        )


def _reason_against(file: Path) -> str:
    """Returns why SQLite must not open a file, or make one of that name; empty where it may."""
    try:
        if file.is_symlink() and not file.exists():
            return "it is a link to a file that is not there"
        if file.exists() and not file.is_file() and not file.is_dir():
            return "it is not a regular file"  # that it is a folder, `_check_file` says
        real = file.resolve()
        for suffix in ("-wal", "-shm", "-journal"):  # SQLite would follow a link, and write there
            path = real.with_name(real.name + suffix)
            if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
                return f"{path.name} is not a regular file"
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES):
            return str(error.strerror)
    except RuntimeError:  # a link to itself
        return os.strerror(errno.ELOOP)
    except ValueError:  # a null byte
        return "no file has such a name"
    return ""


def _check_file(file: Path, url: str, *, create: bool) -> None:
    """Checks a file before SQLite opens it, and creates it with `create`.

    Raises UnknownStudy for a missing file, and StorageUnavailable for one that is not a studies
    database. The file is only read while no Database of this process has it open: closing a second
    descriptor would drop SQLite's POSIX locks on it.
    """
    reject_network_file_system(file)
    reject_orphaned_log(file, url)
    with _opening:
        if not _open_files[file.resolve()]:
            if create and not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                create_empty_database(file)
            elif not create and not file.is_file():
                what = "not there"
                if file.is_dir():
                    what = "a folder, not a studies database"
                raise UnknownStudy(
                    f"the studies database {file} is {what}",
                    hint="begin a study there with: autotune search --storage "
                    f"{shlex.quote(redacted_url(url))}",
                )
            if file.is_file():
                check_sqlite_file(file, url)
        _open_files[file.resolve()] += 1


def _file_state(file: Path | None) -> tuple[int, int] | None:
    """Returns size and modification time, which change with the file; None where it is missing."""
    if file is None:
        return None
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _log_file(file: Path) -> Path:
    return file.with_name(file.name + "-wal")


def _read_only_engine(file: Path, busy_timeout_seconds: float, *, is_frozen: bool) -> Engine:
    """Returns an engine that writes nothing.

    A file without a log is open in no process (`is_frozen`): it is read as immutable, which also
    works in a read-only folder.
    """
    uri = f"file:{quote(str(file.absolute()))}?mode=ro"
    if is_frozen:
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
