"""The database behind a URL: how it is opened, and what is said when it cannot be used."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError, SQLAlchemyError

from autotune.errors import StorageUnavailable, UnknownStudy

BUSY_TIMEOUT_SECONDS = 60


def sqlite_file(url: str) -> Path | None:
    """The file behind a SQLite URL; None for another database or one in memory."""
    with storage_errors(url):
        parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database == ":memory:":
        return None
    return Path(parsed.database)


def make_engine(url: str, *, create: bool) -> Engine:
    file = sqlite_file(url)
    if file is None:
        return create_engine(url)
    if create:
        file.parent.mkdir(parents=True, exist_ok=True)
    elif not file.is_file():
        what = "a folder, not a studies database" if file.is_dir() else "not there"
        raise UnknownStudy(f"the studies database {file} is {what}", hint="begin a study with: autotune search")
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_SECONDS})
    event.listen(engine, "connect", _durable_sqlite)
    return engine


def _durable_sqlite(connection: Any, _record: Any) -> None:
    """WAL lets readers and a writer work side by side; FULL syncs every commit to disk."""
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA foreign_keys=ON")


@contextmanager
def storage_errors(url: str) -> Iterator[None]:
    try:
        yield
    except IntegrityError:
        raise
    except (ArgumentError, NoSuchModuleError) as error:
        raise StorageUnavailable(
            f"{shown_url(url)!r} is not a database URL: {_first_line(error)}",
            hint="write for example sqlite:///studies/autotune.db, or leave --storage out",
        ) from None
    except ImportError as error:
        package = {"psycopg": "psycopg[binary]", "MySQLdb": "mysqlclient"}.get(error.name or "", error.name)
        raise StorageUnavailable(
            f"the database driver {error.name!r} for {shown_url(url)!r} is not installed",
            hint=f'install it with: pip install "{package}"',
        ) from None
    except DBAPIError as error:
        raise StorageUnavailable(
            f"the studies database {shown_url(url)} cannot be used: {_first_line(error.orig or error)}",
            hint="check that it is an autotune database and that its folder can be written to, or name another "
            "with --storage",
        ) from None
    except (SQLAlchemyError, ValueError, TypeError, KeyError) as error:  # the latter from rows that are damaged
        raise StorageUnavailable(
            f"the studies database {shown_url(url)} cannot be used: {_first_line(error)}",
            hint="bring back a copy that is whole, or name another with --storage",
        ) from None
    except OSError as error:
        raise StorageUnavailable(
            f"the studies database {shown_url(url)} cannot be used: {error.strerror or error}",
            hint="choose a folder that can be written to, or name another database with --storage",
        ) from None


def shown_url(url: str) -> str:
    """`url` without its password."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return url


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]
