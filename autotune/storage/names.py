"""The names of studies, for a shell that completes them.

Reads the database of any version and changes nothing: neither a database that is not there nor an
older one is created or upgraded because somebody pressed a key.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager

from sqlalchemy import Connection, select

from autotune.storage.database import Database, sqlite_file
from autotune.storage.tables import STUDIES

_BUSY_TIMEOUT_SECONDS = 0.2


def study_names(url: str) -> list[str]:
    """Returns the names of all studies, the latest first; none of a database on a server.

    A server may be far away, and a prompt must not wait for it.
    """
    with _connected(url) as connection:
        if connection is None:
            return []
        return list(connection.scalars(select(STUDIES.c.name).order_by(STUDIES.c.id.desc())))


@contextmanager
def _connected(url: str) -> Iterator[Connection | None]:
    if sqlite_file(url) is None:
        yield None
        return
    database = Database(url, read_only=True, busy_timeout_seconds=_BUSY_TIMEOUT_SECONDS)
    with closing(database), database.reading() as connection:
        yield connection
