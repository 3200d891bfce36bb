"""Which servers and workers run on a database, what they run searches on, and how they are reached.

Logs and profiles are in the folder of the server that ran a search. Another one asks it for them,
with a secret of its own that it draws at each start: of a secret only the digest is stored, so that
nobody who reads the database, or a copy of it, gets in.
"""

from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, or_, select, update

from autotune.analysis.queue_order import DeviceGroup
from autotune.spec.reading import parse
from autotune.storage.database import Database
from autotune.storage.schema import check_revision
from autotune.storage.tables import SERVERS, DatabaseNow

SERVER_SECONDS = 20.0
"""For how long a server without a sign of life counts as one that runs."""


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    """A server, or a worker, that runs on the database."""

    digest: str
    """Of the secret that it sends to other servers."""
    owner_digest: str
    """Of its owner's token, where that is random; else empty, as a chosen one could be guessed."""
    address: str
    """The URL at which other servers reach it."""
    host: str
    """Its machine, as `SearchProcess` has it."""
    groups: tuple[DeviceGroup, ...] = ()
    """What it runs searches on."""


class Servers:
    """The servers of one database. All methods raise StorageUnavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def renew(self, server: RunningServer) -> None:
        """Gives a sign of life of a server.

        Raises StorageUpgraded where a later autotune has upgraded the database.
        """
        renewed = {
            "digest": server.digest,
            "owner_digest": server.owner_digest,
            "address": server.address,
            "host": server.host,
            "device_groups": [asdict(group) for group in server.groups],
            "renewed_at": DatabaseNow(),
        }
        with self._database.writing() as connection:
            known = connection.execute(
                update(SERVERS).where(SERVERS.c.digest == server.digest).values(renewed)
            )
            check_revision(connection, self._database.url)
            if not known.rowcount:
                # What had this address has ended: only one program listens there.
                gone = or_(SERVERS.c.address == server.address, SERVERS.c.renewed_at < _OLDEST)
                connection.execute(delete(SERVERS).where(gone))
                connection.execute(insert(SERVERS).values(renewed))

    def running(self) -> list[RunningServer]:
        """Returns the servers that have given a sign of life in time."""
        with self._database.reading() as connection:
            return running_servers(connection)

    def remove(self, server: RunningServer) -> None:
        """Takes a server that ends off the list."""
        with self._database.writing() as connection:
            connection.execute(delete(SERVERS).where(SERVERS.c.digest == server.digest))


_OLDEST = DatabaseNow() - SERVER_SECONDS


def running_servers(connection: Connection) -> list[RunningServer]:
    """Returns the servers that have given a sign of life in time, the first started first."""
    query = select(SERVERS).where(SERVERS.c.renewed_at >= _OLDEST).order_by(SERVERS.c.id)
    return [
        RunningServer(
            digest=row.digest,
            owner_digest=row.owner_digest,
            address=row.address,
            host=row.host,
            groups=_groups(row),
        )
        for row in connection.execute(query)
    ]


def _groups(row: Row[Any]) -> tuple[DeviceGroup, ...]:
    """Returns the groups of a row; none where somebody has written something else into it."""
    try:
        return tuple(parse(DeviceGroup, group) for group in row.device_groups)
    except (ValueError, TypeError, RecursionError):
        return ()
