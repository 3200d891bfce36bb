"""Translates errors of SQLAlchemy and the database drivers into those of `errors.py`.

Each message is one sentence with the database's URL; the hint says what to do.
"""

import re
import shlex
import sqlite3
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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

from autotune.errors import (
    StorageUnavailable,
    StorageUnreachable,
    UnknownStudy,
    first_line_of,
    suggestion,
)
from autotune.spec.full_disk import says_full_disk
from autotune.spec.study import DEFAULT_STORAGE
from autotune.storage.tables import SCHEMA_VERSION
from autotune.system.lock_holders import holder_of

COPY = "bring back a copy that is whole"
COPY_OF_FILE = f"{COPY}, without the -wal and -shm files of this one"
"""Hint for SQLite, which would apply the log of the damaged file to the copy."""

# SQLite's codes for damage and for statements that do not fit its tables: waiting does not help.
_BROKEN = {
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_FORMAT,
}

_READ_ONLY = "25006"
"""PostgreSQL's `read_only_sql_transaction`: the server is a standby, as during a failover."""


@dataclass(frozen=True, kw_only=True)
class DatabaseRole:
    """How messages name a database, and the option that a user has named it with."""

    name: str
    written_by: str
    option: str
    example: str


STUDIES_DATABASE = DatabaseRole(
    name="studies database",
    written_by="autotune",
    option="--storage",
    example="sqlite:///studies/autotune.db, or leave --storage out",
)
OPTUNA_DATABASE = DatabaseRole(
    name="Optuna database",
    written_by="Optuna",
    option="--to-optuna",
    example="sqlite:///optuna.db",
)


class StorageBusy(StorageUnreachable):
    """Another process has held the database's lock for longer than the busy timeout."""


class Conflict(StorageUnavailable):
    """A constraint rejects a row: another process has inserted the same one, or there is damage."""


@contextmanager
def storage_errors(url: str, role: DatabaseRole = STUDIES_DATABASE) -> Iterator[None]:
    """Translates the errors of the block.

    Raises Conflict, StorageBusy, StorageUnreachable or StorageUnavailable, and nothing of
    SQLAlchemy.
    """
    try:
        yield
    except IntegrityError as error:
        raise Conflict(
            f"the {role.name} {redacted_url(url)} rejects a row: "
            f"{first_line_of(error.orig or error)}",
            hint=damage_hint(url, role),
        ) from None
    except (ArgumentError, NoSuchModuleError) as error:
        raise StorageUnavailable(
            f"{redacted_url(url)!r} is not a database URL: {first_line_of(error)}",
            hint=f"write for example {role.example}",
        ) from None
    except ImportError as error:
        package = {"psycopg": "psycopg[binary]", "MySQLdb": "mysqlclient"}.get(
            error.name or "", error.name
        )
        raise StorageUnavailable(
            f"the database driver {error.name!r} for {redacted_url(url)!r} is not installed",
            hint=f'install it with: pip install "{package}"',
        ) from None
    except DBAPIError as error:
        if _is_busy(error):
            raise StorageBusy(
                f"the {role.name} {redacted_url(url)} is locked by {_lock_holder(url)}",
                hint=f"wait until it has stored its results, or name another with {role.option}",
            ) from None
        message, hint = _message_and_hint(url, error, role)
        if _is_away(error):
            raise StorageUnreachable(message, hint=hint) from None
        raise StorageUnavailable(message, hint=hint) from None
    except (SQLAlchemyError, ValueError, TypeError, KeyError, AttributeError) as error:
        # Reading damaged rows raises these.
        raise StorageUnavailable(
            f"the {role.name} {redacted_url(url)} cannot be used: {first_line_of(error)}",
            hint=damage_hint(url, role),
        ) from None
    except OSError as error:
        raise StorageUnavailable(
            f"the {role.name} {redacted_url(url)} cannot be used: {error.strerror or error}",
            hint="choose a folder that can be written to, "
            f"or name another database with {role.option}",
        ) from None


def damage_hint(url: str, role: DatabaseRole = STUDIES_DATABASE) -> str:
    """Returns the hint for a damaged database: how to see the damage, or to restore a copy."""
    copy = COPY_OF_FILE if url.startswith("sqlite") else COPY
    if role != STUDIES_DATABASE:
        return f"{copy}, or name another database with {role.option}"
    storage = "" if url == DEFAULT_STORAGE else f" --storage {shlex.quote(redacted_url(url))}"
    return f"see all that is damaged with: autotune studies check{storage}; or {copy}"


def unknown_study(study: str, known: Collection[str], *, url: str) -> UnknownStudy:
    """Returns the error for a study that is none of the `known`, such as a deleted one."""
    hint = "begin one with: autotune search"
    if known:
        hint = suggestion(study, known, otherwise=f"there is {', '.join(known)}")
    return UnknownStudy(f"there is no study {study!r} in {redacted_url(url)}", hint=hint)


def check_schema_version(study: str, found: int, *, url: str) -> None:
    """Raises StorageUnavailable for a study of another schema version than this autotune reads."""
    if found != SCHEMA_VERSION:
        raise StorageUnavailable(
            f"study {study!r} in {redacted_url(url)} has schema {found}, "
            f"this autotune reads {SCHEMA_VERSION}",
            hint="use the autotune version that wrote it",
        )


def _is_busy(error: DBAPIError) -> bool:
    code = getattr(error.orig, "sqlite_errorcode", None)
    return isinstance(code, int) and code & 0xFF == sqlite3.SQLITE_BUSY


def _lock_holder(url: str) -> str:
    """Returns which process of which user has the lock of an SQLite database."""
    database = make_url(url).database
    if database is None:
        return "another process"
    return holder_of([Path(database), Path(f"{database}-shm")]) or "another process"


def _is_away(error: DBAPIError) -> bool:
    if getattr(error.orig, "sqlstate", None) == _READ_ONLY:
        return True
    if isinstance(error.orig, sqlite3.Error):
        return isinstance(error, OperationalError | InterfaceError) and not _is_broken(error.orig)
    return isinstance(error, OperationalError | InterfaceError) or error.connection_invalidated


def _is_broken(error: BaseException | None) -> bool:
    """Whether SQLite reports damage; an undecodable text column raises an error without a code."""
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, sqlite3.Error) and (code is None or code & 0xFF in _BROKEN)


def _message_and_hint(url: str, error: DBAPIError, role: DatabaseRole) -> tuple[str, str]:
    """Returns the message and the hint for a database error.

    PostgreSQL gives no code for a rejected connection: the text of its message decides.
    """
    parsed = make_url(url)
    shown = redacted_url(url)
    text = first_line_of(error.orig or error)
    if _is_broken(error.orig):
        return f"the {role.name} {shown} cannot be used: {text}", damage_hint(url, role)
    reason = re.sub(r"^connection failed: (connection to .*? failed: )?(FATAL:\s+)?", "", text)
    if says_full_disk(error.orig or error):
        return f"the disk of {shown} is full", "free some space"
    if parsed.get_backend_name() == "sqlite":
        hint = (
            f"check that {role.written_by} has written it and that its folder can be written to, "
            "or name another"
        )
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
            f"the server of {shown} rejects the user: {reason}",
            f"name a user with access: {role.option} {allowed}",
        )
    elif reason.startswith("permission denied"):
        hint = (
            "let that user create tables in the database, for example as its owner, or name another"
        )
    elif re.match(
        r"connection |failed to resolve|consuming input|terminating connection|the database system",
        text,
    ):
        return (
            f"the server of {shown} cannot be reached: {reason}",
            "start it, or check its host and port",
        )
    else:
        hint = "check the URL and what the server's log says, or name another"
    return f"the {role.name} {shown} cannot be used: {reason}", f"{hint} with {role.option}"


def _createdb(url: URL) -> str:
    options = {"-h": url.host, "-p": url.port, "-U": url.username}
    arguments = [f"{name} {shlex.quote(str(value))}" for name, value in options.items() if value]
    return " ".join(["createdb", *arguments, shlex.quote(url.database or "autotune")])


def redacted_url(url: str) -> str:
    """Returns `url` without its password, also where it cannot be parsed."""
    try:
        parsed = parse_url(url)
    except ArgumentError:
        return re.sub(r"(//(?!/)[^:/@]*):.*@", r"\1:***@", url)
    return parsed.difference_update_query(["password", "sslpassword"]).render_as_string(
        hide_password=True
    )


def parse_url(url: str) -> URL:
    """Parses a database URL. Raises SQLAlchemy's ArgumentError."""
    try:
        url.encode()
    except UnicodeEncodeError:
        raise ArgumentError("it is not UTF-8 text") from None
    try:
        parsed = make_url(url)
    except ValueError:
        raise ArgumentError("its port is not a number") from None
    if "@" in (parsed.host or ""):
        raise ArgumentError("an @ in a password is written %40")
    return parsed
