"""Leases: who tries a trial, runs a search or leads the servers, and the fence around each.

A process that was paused for longer than its lease goes on as if it still had it. So each holder
has a *fencing token* that no later holder gets, and writes through `Lease.write`, which changes
nothing once the holder has lost the lease: M. Kleppmann, "How to do distributed locking", 2016
(https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html).

Each kind of lease has its own rule for who may take it over, and when; the three classes say it.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from sqlalchemy import ColumnElement, Connection, Table, and_, literal_column, update

from autotune.spec.attempt import LEASE_SECONDS
from autotune.spec.queued_search import SEARCH_LEASE_SECONDS
from autotune.storage.tables import ATTEMPTS, SEARCHES, SERVER, DatabaseNow

LEAD_SECONDS = 8.0
"""For how long a server without a sign of life leads."""

IS_RUNNING = ATTEMPTS.c.state == literal_column("'running'")
"""A literal instead of a bound parameter, so that queries use the partial index on running
attempts: there may be very many ended ones."""


class LeaseLost(Exception):
    """Another holder has followed, or what was held has ended: nothing was written."""


class Lease:
    """The lease of one holder, in the row of what it holds."""

    table: ClassVar[Table]
    unexpired: ClassVar[ColumnElement[bool]]
    """Whether a row has a holder that renewed its lease in time, by the clock of the database."""
    renewal: ClassVar[Mapping[str, Any]]
    is_held: ColumnElement[bool]
    """Whether a row has this holder, by its fencing token."""

    def write(self, connection: Connection, **values: Any) -> bool:
        """Renews the lease and writes `values` into its row; returns False where it is lost.

        Nobody can take it over from here to the commit, as the row is locked.
        """
        written = update(self.table).where(self.is_held).values({**self.renewal, **values})
        return connection.execute(written).rowcount > 0


class AttemptLease(Lease):
    """The leases of attempts, each with the attempt's id as its token.

    Any worker ends an attempt whose process it knows to be dead, or which has not counted a renewal
    for as long as this worker watched: no clock of another machine is trusted
    (`study/workers/liveness.py`).
    """

    table = ATTEMPTS
    until = DatabaseNow() + LEASE_SECONDS
    unexpired = and_(IS_RUNNING, ATTEMPTS.c.lease_until > DatabaseNow())
    renewal: ClassVar = {"lease_until": until, "renewals": ATTEMPTS.c.renewals + 1}

    def __init__(self, *ids: str) -> None:
        self.is_held = and_(ATTEMPTS.c.id.in_(ids), IS_RUNNING)


class RunLease(Lease):
    """The lease of a search's process, whose token is the run: how often one was started.

    A worker of its machine ends it if it knows the process to be dead, and any other worker if it
    was not renewed for as long as that worker watched (`study/workers/liveness.py`).
    """

    table = SEARCHES
    until = DatabaseNow() + SEARCH_LEASE_SECONDS
    unexpired = and_(SEARCHES.c.state == "running", SEARCHES.c.lease_until > DatabaseNow())
    renewal: ClassVar = {"lease_until": until}

    def __init__(self, number: int, run: int) -> None:
        self.is_held = and_(
            SEARCHES.c.id == number, SEARCHES.c.run == run, SEARCHES.c.state == "running"
        )


class LeadLease(Lease):
    """The lease of the leading server, whose token is the epoch: how often the lead was taken.

    Any server takes the lead if it has expired, or if it knows the server of this epoch to be dead.
    """

    table = SERVER
    unexpired = and_(SERVER.c.holder != "", SERVER.c.renewed_at > DatabaseNow() - LEAD_SECONDS)
    renewal: ClassVar = {"renewed_at": DatabaseNow()}

    def __init__(self, epoch: int) -> None:
        self.is_held = SERVER.c.epoch == epoch
