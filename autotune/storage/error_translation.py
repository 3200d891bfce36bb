"""What is said when a studies database cannot be used: one sentence with its URL, and the way out."""

import re
import shlex
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import URL
from sqlalchemy.engine import make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    NoSuchModuleError,
    OperationalError,
    SQLAlchemyError,
)

from autotune.errors import StorageAway, StorageUnavailable
from autotune.spec.study import DEFAULT_STORAGE
from autotune.storage.tables import SCHEMA_VERSION

COPY = "bring back a copy that is whole"
COPY_OF_FILE = f"{COPY}, without the -wal and -shm files of this one"
"""SQLite would read the log of the damaged file into the copy."""

# A SQLite database that answers so is not away: a statement that does not fit its tables, or
# damage.
_BROKEN = {
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_FORMAT,
}

_READ_ONLY = "25006"
"""PostgreSQL's code for a server that is a standby until another one takes over."""


class StorageBusy(StorageAway):
    """Another process has locked the database for longer than one waits; it is there."""


class Conflict(StorageUnavailable):
    """A row that a constraint of the database refuses: another process has made the same one, or it is damaged."""


@contextmanager
def storage_errors(url: str) -> Iterator[None]:
    try:
        yield
    except IntegrityError as error:
        raise Conflict(
            f"the studies database {shown_url(url)} refuses a row: {_first_line(error.orig or error)}",
            hint=way_out_of_damage(url),
        ) from None
    except (ArgumentError, NoSuchModuleError) as error:
        raise StorageUnavailable(
            f"{shown_url(url)!r} is not a database URL: {_first_line(error)}",
            hint="write for example sqlite:///studies/autotune.db, or leave --storage out",
        ) from None
    except ImportError as error:
        package = {"psycopg": "psycopg[binary]", "MySQLdb": "mysqlclient"}.get(
            error.name or "", error.name
        )
        raise StorageUnavailable(
            f"the database driver {error.name!r} for {shown_url(url)!r} is not installed",
            hint=f'install it with: pip install "{package}"',
        ) from None
    except DBAPIError as error:
        message, hint = _refusal(url, error)
        kind = (
            StorageBusy
            if _is_busy(error)
            else StorageAway
            if _is_away(error)
            else StorageUnavailable
        )
        raise kind(message, hint=hint) from None
    except (
        SQLAlchemyError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
    ) as error:  # of rows that are damaged
        raise StorageUnavailable(
            f"the studies database {shown_url(url)} cannot be used: {_first_line(error)}",
            hint=way_out_of_damage(url),
        ) from None
    except OSError as error:
        raise StorageUnavailable(
            f"the studies database {shown_url(url)} cannot be used: {error.strerror or error}",
            hint="choose a folder that can be written to, or name another database with --storage",
        ) from None


def way_out_of_damage(url: str) -> str:
    storage = "" if url == DEFAULT_STORAGE else f" --storage {shlex.quote(shown_url(url))}"
    copy = COPY_OF_FILE if url.startswith("sqlite") else COPY
    return f"see all that is damaged with: autotune studies check{storage}; or {copy}"


def refuse_other_schema(study: str, found: int, *, url: str) -> None:
    """Raises StorageUnavailable for a study that this autotune does not read."""
    if found != SCHEMA_VERSION:
        raise StorageUnavailable(
            f"study {study!r} in {shown_url(url)} has schema {found}, this autotune reads {SCHEMA_VERSION}",
            hint="use the autotune version that wrote it",
        )


def _is_busy(error: DBAPIError) -> bool:
    code = getattr(error.orig, "sqlite_errorcode", None)
    return isinstance(code, int) and code & 0xFF == sqlite3.SQLITE_BUSY


def _is_away(error: DBAPIError) -> bool:
    if getattr(error.orig, "sqlstate", None) == _READ_ONLY:
        return True
    if isinstance(error.orig, sqlite3.Error):
        return isinstance(error, OperationalError | InterfaceError) and not _is_broken(error.orig)
    return isinstance(error, OperationalError | InterfaceError) or error.connection_invalidated


def _is_broken(error: BaseException | None) -> bool:
    """By SQLite's code; the text of a column that cannot be decoded has none."""
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, sqlite3.Error) and (code is None or code & 0xFF in _BROKEN)


def _refusal(url: str, error: DBAPIError) -> tuple[str, str]:
    """What is wrong and the way out.

    A PostgreSQL that refuses a connection gives no code: its words decide.
    """
    parsed, shown = make_url(url), shown_url(url)
    said = _first_line(error.orig or error)
    if _is_broken(error.orig):
        return f"the studies database {shown} cannot be used: {said}", way_out_of_damage(url)
    reason = re.sub(r"^connection failed: (connection to .*? failed: )?(FATAL:\s+)?", "", said)
    if re.search(r"database or disk is full|No space left on device", said):
        return f"the disk of {shown} is full", "free some space"
    if parsed.get_backend_name() == "sqlite":
        hint = "check that it is an autotune database and that its folder can be written to, or name another"
    elif re.match(r"database .* does not exist", reason):
        return (
            f"the database of {shown} does not exist",
            f"create it, for example with: {_createdb(parsed)}",
        )
    elif re.match(
        r"password auth|role .* does not exist|no pg_hba|fe_sendauth: no password", reason
    ):
        allowed = parsed.set(username="user", password="password", query={}).render_as_string(
            hide_password=False
        )
        return (
            f"the server of {shown} refuses the user: {reason}",
            f"name one it lets in: --storage {allowed}",
        )
    elif reason.startswith("permission denied"):
        hint = (
            "let that user create tables in the database, for example as its owner, or name another"
        )
    elif re.match(
        r"connection |failed to resolve|consuming input|terminating connection|the database system",
        said,
    ):
        return (
            f"the server of {shown} cannot be reached: {reason}",
            "start it, or check its host and port",
        )
    else:
        hint = "check the URL and what the server's log says, or name another"
    return f"the studies database {shown} cannot be used: {reason}", f"{hint} with --storage"


def _createdb(url: URL) -> str:
    options = {"-h": url.host, "-p": url.port, "-U": url.username}
    words = [f"{option} {shlex.quote(str(value))}" for option, value in options.items() if value]
    return " ".join(["createdb", *words, shlex.quote(url.database or "autotune")])


def shown_url(url: str) -> str:
    """`url` without its password, also where it cannot be read as a URL."""
    try:
        parsed = parsed_url(url)
    except ArgumentError:
        return re.sub(r"(//(?!/)[^:/@]*):.*@", r"\1:***@", url)
    return parsed.difference_update_query(["password", "sslpassword"]).render_as_string(
        hide_password=True
    )


def parsed_url(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ValueError:
        raise ArgumentError("its port is not a number") from None
    if "@" in (parsed.host or ""):
        raise ArgumentError("an @ in a password is written %40")
    return parsed


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
