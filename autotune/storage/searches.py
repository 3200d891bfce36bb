"""The queue of a service: searches that were submitted, who runs them, and what happened to them.

Each call is one transaction. Three kinds of processes write, and none trusts that it is alone:

- the workers, on any number of machines, which take searches from the queue.
- the process of a search. Its calls name the *run*, which each start of a process raises.
- the leading server, for what only one may do. Its calls name the *epoch* of its lead.
- every server, for what its users ask for.

The second and the third hold a lease (`leases.py`): what one writes that has lost its lease is
rejected.

Events have numbers without gaps that a reader could miss: the row of `autotune_server` is locked
from the number to the commit, so that they appear in their order.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    CursorResult,
    Float,
    Integer,
    Row,
    Select,
    and_,
    case,
    cast,
    delete,
    func,
    insert,
    not_,
    or_,
    select,
    true,
    update,
)

from autotune.analysis.queue_order import (
    NO_LIMIT,
    DeviceGroup,
    DeviceHours,
    Queue,
    QueueRules,
    Running,
    Use,
    Waiting,
    kind_of,
    places,
)
from autotune.errors import NotYours, SearchConflict, StudyMismatch, UnknownSearch, UnknownStudy
from autotune.spec.queued_search import (
    ENDED,
    MOST_LOSSES,
    SEARCH_LEASE_SECONDS,
    QueuedSearch,
    QueuePlace,
    SearchEnd,
    SearchProcess,
    SearchState,
    ServiceEvent,
)
from autotune.spec.reading import check
from autotune.storage.database import Database
from autotune.storage.error_translation import Conflict
from autotune.storage.leases import LeadLease, Lease, LeaseLost, RunLease
from autotune.storage.rows import storable_text
from autotune.storage.schema import check_revision
from autotune.storage.servers import running_servers
from autotune.storage.stored_columns import check_decoded
from autotune.storage.tables import (
    EVENTS,
    OWNERS,
    SEARCHES,
    SERVER,
    STUDIES,
    USES,
    DatabaseNow,
)
from autotune.storage.tokens import OWNER
from autotune.system.failpoints import failpoint
from autotune.units import is_positive_number

MOST_QUEUED = 1000
"""More searches are not accepted; each takes some room in the database."""
_LONGEST_REASON = 2000
_MOST_RUNNING = 1000
_ANNOUNCED_SECONDS = 86_400.0
_LONGEST_LOSS_PAUSE_SECONDS = 60.0

_SEARCHES = select(
    SEARCHES, and_(SEARCHES.c.state == "running", not_(RunLease.unexpired)).label("is_expired")
)


@dataclass(frozen=True, kw_only=True)
class NewSearch:
    """A submission that was checked."""

    request: Mapping[str, Any]
    submitted_by: str
    is_of_admin: bool = False
    """Whether it may continue a study of somebody else."""
    study: str | None = None
    """Name of the study; None: `study_base` with the number of the search."""
    study_base: str = "search"
    priority: int = 0
    group: str = ""
    key: str | None = None
    """By which a repeated submission is recognized."""
    digest: str = ""
    """Of the submission's content: a key that is used again must come with the same."""
    budget_seconds: float | None = None
    """The longest that it runs; None: unknown."""


@dataclass(frozen=True, kw_only=True)
class Lead:
    """Which server leads."""

    epoch: int
    holder: str
    version: str
    limits: Mapping[str, Any]
    """What it lets searches and people have."""


class Searches:
    """The queue of one database. All methods raise StorageUnavailable and StorageUnreachable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # -- for users -----------------------------------------------------------------------------

    def submit(
        self, new: NewSearch, *, only_of_study: bool = False, most_of_person: int | None = None
    ) -> tuple[QueuedSearch, bool]:
        """Adds a search; returns it, and whether it is new.

        A repeated key returns the search that it was first used for. Raises SearchConflict where
        the content was another one then, for a full queue, where `most_of_person` searches of who
        submits it are queued, and with `only_of_study` while another search of the study is queued
        or running; NotYours for a study of somebody else.
        """
        with self._writing() as connection:
            if new.key is not None:
                first = connection.execute(_SEARCHES.where(SEARCHES.c.key == new.key)).one_or_none()
                if first is not None:
                    if first.digest != new.digest:
                        raise SearchConflict(
                            f"Invalid Idempotency-Key: search {first.id} was submitted with it, "
                            "with other settings",
                            hint="choose a new key for a new submission",
                        )
                    return _search(first), False
            if new.study is not None:
                _take_name(connection, new.study, new)
                if only_of_study:
                    _check_no_active_search(connection, new.study)
            queued = select(func.count()).where(SEARCHES.c.state == "queued")
            waiting = connection.scalar(queued) or 0
            if waiting >= MOST_QUEUED:
                raise SearchConflict(
                    f"the queue is full: {waiting} searches wait in it",
                    hint="wait until some have ended, or cancel some",
                )
            of_person = queued.where(SEARCHES.c.submitted_by == new.submitted_by)
            if most_of_person is not None:
                waiting = connection.scalar(of_person) or 0
                if waiting >= most_of_person:
                    raise SearchConflict(
                        f"{waiting} searches of {new.submitted_by} wait in the queue, the most "
                        "that this server takes of a person",
                        hint="wait until one of them begins, or cancel one",
                    )
            inserted = connection.execute(
                insert(SEARCHES).values(
                    study=new.study or "",
                    state="queued",
                    request=dict(new.request),
                    priority=new.priority,
                    device_group=new.group,
                    submitted_by=new.submitted_by,
                    submitted_at=DatabaseNow(),
                    key=new.key,
                    digest=new.digest,
                    budget_seconds=new.budget_seconds,
                )
            )
            (number,) = inserted.inserted_primary_key or (0,)
            if new.study is None:
                given = f"{new.study_base}-{number}"
                _take_name(connection, given, new)
                connection.execute(
                    update(SEARCHES).where(SEARCHES.c.id == number).values(study=given)
                )
            search = _read(connection, number)
            _add_events(connection, [_state_event(search)])
            failpoint("search submitted, not committed")
        return search, True

    def owner_of(self, study: str) -> str | None:
        """Returns who submitted the first search of a study, or of its name; None for a free name.

        One that was searched at a terminal, or imported, belongs to the owner of the server.
        """
        with self._database.reading() as connection:
            return _owner_of(connection, study)

    def owners(self) -> dict[str, str]:
        """Returns who owns each study that was submitted, by its name."""
        with self._database.reading() as connection:
            return {row.study: row.owner for row in connection.execute(select(OWNERS))}

    def get(self, number: int) -> QueuedSearch:
        """Returns a search. Raises UnknownSearch."""
        with self._database.reading() as connection:
            return _read(connection, number)

    def find(
        self,
        *,
        states: Sequence[SearchState] = (),
        study: str | None = None,
        by: str | None = None,
        limit: int = 100,
        offset: int = 0,
        order: Iterable[int] = (),
    ) -> tuple[list[QueuedSearch], int]:
        """Returns searches and how many there are without `limit` and `offset`.

        `by` is who has submitted them. Running ones come first, then queued ones in their `order`,
        which is that of `places`, then ended ones, the latest first.
        """
        conditions: list[ColumnElement[bool]] = []
        if states:
            conditions.append(SEARCHES.c.state.in_(states))
        if study is not None:
            conditions.append(SEARCHES.c.study == study)
        if by is not None:
            conditions.append(SEARCHES.c.submitted_by == by)
        with self._database.reading() as connection:
            query = _in_order(order).where(*conditions).limit(limit).offset(offset)
            rows = connection.execute(query).all()
            total: int | None = offset + len(rows)
            if len(rows) == limit or (offset and not rows):
                count = select(func.count()).select_from(SEARCHES).where(*conditions)
                total = connection.scalar(count)
        return [_search(row) for row in rows], total or 0

    def running(self) -> list[QueuedSearch]:
        """Returns the searches that run."""
        searches, _ = self.find(states=("running",), limit=_MOST_RUNNING)
        return searches

    def counts(self) -> dict[SearchState, int]:
        """Returns how many searches are in each state."""
        query = select(SEARCHES.c.state, func.count()).group_by(SEARCHES.c.state)
        with self._database.reading() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def people(self) -> list[str]:
        """Returns everybody who has submitted a search."""
        query = select(SEARCHES.c.submitted_by).distinct().order_by(SEARCHES.c.submitted_by)
        with self._database.reading() as connection:
            return list(connection.scalars(query))

    def places(self) -> dict[int, QueuePlace]:
        """Returns {number of a queued search: its place in the queue}, the next one first."""
        with self._database.reading() as connection:
            if connection.scalar(_HAS_QUEUED) is None:
                return {}
            queue = _queue(connection)
        return places(queue)

    def groups(self) -> list[DeviceGroup]:
        """Returns what the workers that are there run searches on."""
        with self._database.reading() as connection:
            return list(_groups(connection))

    def states_of_studies(self) -> dict[str, SearchState]:
        """Returns the state of the latest search of each study that has one."""
        with self._database.reading() as connection:
            return {row.study: row.state for row in connection.execute(_STATES_OF_STUDIES)}

    def latest_of(self, study: str) -> QueuedSearch | None:
        """Returns the latest search of a study; None where it has none."""
        query = _SEARCHES.where(SEARCHES.c.study == study).order_by(SEARCHES.c.id.desc()).limit(1)
        with self._database.reading() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else _search(row)

    def set_priority(self, number: int, priority: int) -> QueuedSearch:
        """Changes the priority of a search that has not ended. Raises SearchConflict."""
        with self._writing() as connection, _telling(connection, number) as search:
            if search.has_ended:
                raise SearchConflict(
                    f"search {number} has ended: it is {search.state}",
                    hint="continue it to run more trials",
                )
            _update(connection, number, priority=priority)
        return self.get(number)

    def cancel(self, number: int, *, by: str) -> QueuedSearch:
        """Cancels a search: at once in the queue, within seconds where it runs.

        Raises SearchConflict for one that has ended otherwise; repeating it changes nothing.
        """
        with self._writing() as connection, _telling(connection, number) as search:
            if search.state in ("finished", "failed"):
                raise SearchConflict(
                    f"search {number} cannot be cancelled: it is {search.state}",
                    hint=f"its results stay: autotune show {search.study}",
                )
            if search.state == "queued":
                _end(connection, number, _cancelled(f"cancelled by {by}"))
            elif search.state == "running":
                _update(connection, number, is_stopping=True, reason=f"cancelled by {by}")
        return self.get(number)

    def remove(self, number: int) -> None:
        """Removes a search that has ended from the list; its study stays. Raises SearchConflict."""
        with self._writing() as connection, _telling(connection, number) as search:
            if not search.has_ended:
                raise SearchConflict(
                    f"search {number} is {search.state}", hint="cancel it before you remove it"
                )
            connection.execute(delete(SEARCHES).where(SEARCHES.c.id == number))

    def check_no_active_search(self, study: str) -> None:
        """Raises SearchConflict while a search of the study is queued or running."""
        with self._database.reading() as connection:
            _check_no_active_search(connection, study)

    def rename_study(self, study: str, new_name: str) -> None:
        """Gives a study and its searches another name.

        Raises UnknownStudy, SearchConflict while a search of it is active, and StudyMismatch for a
        name in use, also by a search that waits.
        """
        in_use = StudyMismatch(
            f"there is a study {new_name!r} in {self._database.url} already",
            hint="choose another name",
        )
        try:
            with self._writing() as connection:
                _check_no_active_search(connection, study)
                if _owner_of(connection, new_name) is not None:
                    raise in_use
                renamed = connection.execute(
                    update(STUDIES).where(STUDIES.c.name == study).values(name=new_name)
                )
                self._check_was_there(study, renamed)
                connection.execute(delete(OWNERS).where(OWNERS.c.study == new_name))
                for table in (SEARCHES, OWNERS):
                    connection.execute(
                        update(table).where(table.c.study == study).values(study=new_name)
                    )
                data = {"action": "renamed", "name": new_name}
                _add_events(connection, [(0, study, "study", data)])
        except Conflict:
            raise in_use from None

    def delete_study(self, study: str) -> None:
        """Deletes a study with all that is stored of it.

        Raises UnknownStudy, also for one that somebody else has just renamed, and SearchConflict
        while a search of it is active.
        """
        with self._writing() as connection:
            _check_no_active_search(connection, study)
            deleted = connection.execute(delete(STUDIES).where(STUDIES.c.name == study))
            self._check_was_there(study, deleted)
            connection.execute(delete(OWNERS).where(OWNERS.c.study == study))
            _add_events(connection, [(0, study, "study", {"action": "deleted"})])

    def _check_was_there(self, study: str, changed: CursorResult[Any]) -> None:
        """Raises UnknownStudy, within the transaction, for a change of no row."""
        if changed.rowcount == 0:
            raise UnknownStudy(f"there is no study {study!r} in {self._database.url}")

    @contextmanager
    def _writing(self, lease: Lease | None = None) -> Iterator[Connection]:
        """Yields a transaction in which nobody else changes the queue, of the holder of `lease`.

        The row of the server is locked until the commit, so that changes come one after another.
        Raises LeaseLost, and StorageUnavailable for a queue that a later autotune has upgraded.
        """
        with self._database.writing() as connection:
            connection.execute(
                update(SERVER).where(SERVER.c.id == 1).values(last_event=SERVER.c.last_event)
            )
            check_revision(connection, self._database.url)
            if lease is not None and not lease.write(connection):
                raise LeaseLost
            yield connection

    # -- for the leading server --------------------------------------------------------------------

    def take_lead(
        self,
        holder: str,
        *,
        version: str,
        dead_epoch: int = -1,
        limits: Mapping[str, Any] | None = None,
    ) -> int | None:
        """Takes the lead where no server has it; returns its epoch, else None.

        `dead_epoch` is that of a leader whose process is known to have ended. The `limits`, by the
        names of the server's settings, hold for all workers until another server leads.
        """
        is_free = or_(not_(LeadLease.unexpired), SERVER.c.epoch == dead_epoch)
        with self._database.writing() as connection:
            taken = connection.execute(
                update(SERVER)
                .where(is_free)
                .values(
                    epoch=SERVER.c.epoch + 1,
                    holder=holder,
                    version=version,
                    limits=dict(limits or {}),
                    **LeadLease.renewal,
                )
            )
            if taken.rowcount == 0:
                return None
            check_revision(connection, self._database.url)
            return connection.scalar(select(SERVER.c.epoch))

    def lead(self) -> Lead:
        """Returns which server leads, or led last."""
        with self._database.reading() as connection:
            row = connection.execute(select(SERVER)).one()
        return Lead(epoch=row.epoch, holder=row.holder, version=row.version, limits=_limits(row))

    def keep_lead(self, epoch: int) -> None:
        """Renews the lead. Raises LeaseLost."""
        with self._writing(LeadLease(epoch)):
            pass

    def give_lead(self, epoch: int) -> None:
        """Lets another server take the lead at once."""
        with self._database.writing() as connection:
            LeadLease(epoch).write(connection, holder="", renewed_at=0.0)

    def to_announce(
        self, *, by: Collection[str] | None = None, limit: int = 20
    ) -> list[QueuedSearch]:
        """Returns searches of the last day that no webhook was called for yet.

        With `by` only those that one of these people submitted.
        """
        query = (
            _SEARCHES.where(
                true() if by is None else SEARCHES.c.submitted_by.in_(by),
                SEARCHES.c.state.in_(ENDED),
                SEARCHES.c.is_announced.is_(False),
                SEARCHES.c.ended_at > DatabaseNow() - _ANNOUNCED_SECONDS,
            )
            .order_by(SEARCHES.c.id)
            .limit(limit)
        )
        with self._database.reading() as connection:
            return [_search(row) for row in connection.execute(query)]

    def set_announced(self, epoch: int, numbers: Sequence[int]) -> None:
        """Notes that the webhook was called for these searches. Raises LeaseLost."""
        with self._writing(LeadLease(epoch)) as connection:
            connection.execute(
                update(SEARCHES).where(SEARCHES.c.id.in_(numbers)).values(is_announced=True)
            )

    # -- for the workers ---------------------------------------------------------------------------

    def claim_next(
        self, group: DeviceGroup, *, version: str, lacking: Mapping[int, str] | None = None
    ) -> QueuedSearch | None:
        """Marks the next search for a group of devices as running; None where none may begin.

        None too while another search runs on the group. `lacking` are the searches whose files its
        machine does not have, each with the sentence that they say while they wait.
        """
        lacking = lacking or {}
        with self._writing() as connection:
            is_busy = select(SEARCHES.c.id).where(
                SEARCHES.c.state == "running",
                SEARCHES.c.host == group.machine,
                SEARCHES.c.device_group == group.name,
            )
            if connection.execute(is_busy.limit(1)).first() is not None:
                return None
            for number, reason in lacking.items():
                connection.execute(
                    update(SEARCHES)
                    .where(SEARCHES.c.id == number, SEARCHES.c.state == "queued")
                    .where(SEARCHES.c.reason == "")
                    .values(reason=storable_text(reason, longest=_LONGEST_REASON))
                )
            following = _queue(connection).next_for(group, except_for=lacking)
            if following is None:
                return None
            number = following.id
            _update(
                connection,
                number,
                state="running",
                run=SEARCHES.c.run + 1,
                reported=0,
                device_group=group.name,
                started_at=func.coalesce(SEARCHES.c.started_at, DatabaseNow()),
                lease_until=RunLease.until,
                host=storable_text(group.machine, longest=200),
                pid=None,
                process_started_at=None,
                reason="",
                hint="",
                version=version,
            )
            search = _read(connection, number)
            if search.state != "running":  # its row cannot be read: no process could run it
                end = SearchEnd(
                    state="failed",
                    reason=search.reason,
                    hint=search.hint,
                    exit_code=search.exit_code,
                )
                _end(connection, number, end)
            else:
                connection.execute(
                    insert(USES).values(
                        search_id=number,
                        person=search.submitted_by,
                        devices=group.number,
                        began_at=DatabaseNow(),
                    )
                )
            _add_events(connection, [_state_event(search)])
            failpoint("search claimed, not committed")
        failpoint("search claimed")
        return search if search.state == "running" else None

    def end_lost_run(
        self, number: int, run: int, end: SearchEnd, *, unrenewed_since: float | None = None
    ) -> QueuedSearch | None:
        """Notes how a search ended whose process did not say it, or could not be started.

        With `unrenewed_since`, the `lease_until` that was watched, only where its lease was not
        renewed since. Returns None where the process has said it, another one runs, or another
        worker has noted it.
        """
        with self._writing() as connection:
            lease = RunLease(number, run)
            is_ended = (
                true() if unrenewed_since is None else SEARCHES.c.lease_until == unrenewed_since
            )
            lease_until = select(SEARCHES.c.lease_until).where(lease.is_held, is_ended)
            held_until = connection.scalar(lease_until)
            if held_until is None or not lease.write(connection):
                return None
            last_sign = held_until - SEARCH_LEASE_SECONDS
            _end_use(connection, number, at=last_sign)
            with _telling(connection, number) as search:
                _end_run(connection, search, end)
            return _read(connection, number)

    def await_run(self, number: int, run: int) -> None:
        """Renews the lease of a run whose process its worker has started, until that has begun.

        Does nothing where the run is lost.
        """
        with self._writing() as connection:
            RunLease(number, run).write(connection)

    # -- for the process of a search ---------------------------------------------------------------

    def begin_run(
        self, number: int, run: int, process: SearchProcess, *, version: str
    ) -> QueuedSearch:
        """Notes which process runs a search, and the version of its autotune. Raises LeaseLost."""
        lease = RunLease(number, run)
        with self._writing(lease) as connection, _telling(connection, number):
            _update(
                connection,
                number,
                host=storable_text(process.host, longest=200),
                pid=process.pid,
                process_started_at=process.started_at,
                version=version,
            )
            return _read(connection, number)

    def renew_run(
        self,
        number: int,
        run: int,
        *,
        progress: Mapping[str, Any],
        study: str,
        has_results: bool,
        events: Sequence[tuple[str, Any]] = (),
        after: int = 0,
    ) -> bool:
        """Gives a sign of life and says what the search does; returns whether it is to stop.

        `has_results` ends the count of losses in a row. `events` are each a kind and what JSON can
        hold; `after` counts those of the run before them: a call that is repeated because its
        answer was lost adds none again. Raises LeaseLost.
        """
        lease = RunLease(number, run)
        with self._writing(lease) as connection, _telling(connection, number) as search:
            known = connection.scalar(select(SEARCHES.c.reported).where(SEARCHES.c.id == number))
            reported = known or 0
            new = events[max(0, reported - after) :]
            _update(
                connection,
                number,
                progress=dict(progress),
                study=study,
                losses=0 if has_results else search.losses,
                reported=reported + len(new),
            )
            _add_events(connection, [(number, study, kind, data) for kind, data in new])
            return search.is_stopping

    def end_run(self, number: int, run: int, end: SearchEnd) -> None:
        """Notes how a search ended. Raises LeaseLost."""
        lease = RunLease(number, run)
        with self._writing(lease) as connection, _telling(connection, number) as search:
            _end_use(connection, number, at=DatabaseNow())
            _end_run(connection, search, end)

    # -- events ------------------------------------------------------------------------------------

    def last_event(self) -> int:
        """Returns the number of the last event; 0 before the first."""
        with self._database.reading() as connection:
            return connection.scalar(select(SERVER.c.last_event).where(SERVER.c.id == 1)) or 0

    def first_event(self) -> int | None:
        """Returns the number of the oldest event that is still there; None without any."""
        with self._database.reading() as connection:
            first: int | None = connection.scalar(select(func.min(EVENTS.c.id)))
            return first

    def events_after(self, number: int, *, limit: int = 1000) -> list[ServiceEvent]:
        """Returns events with higher numbers, the oldest first."""
        query = select(EVENTS).where(EVENTS.c.id > number).order_by(EVENTS.c.id).limit(limit)
        with self._database.reading() as connection:
            return [
                ServiceEvent(
                    number=row.id,
                    search=row.search_id,
                    study=row.study,
                    kind=row.kind,
                    data=row.data if isinstance(row.data, dict) else {},
                    at=row.at,
                )
                for row in connection.execute(query)
            ]

    def prune_events(self, epoch: int, *, most: int) -> None:
        """Removes all but the last `most` events. Raises LeaseLost."""
        with self._writing(LeadLease(epoch)) as connection:
            last = connection.scalar(select(SERVER.c.last_event).where(SERVER.c.id == 1)) or 0
            connection.execute(delete(EVENTS).where(EVENTS.c.id <= last - most))


# -- rows ------------------------------------------------------------------------------------------

_HAS_QUEUED = select(SEARCHES.c.id).where(SEARCHES.c.state == "queued").limit(1)
_ACTIVE = _SEARCHES.where(SEARCHES.c.state.in_(("queued", "running")))
# SQLite takes any text in a column of numbers.
_BEGAN_AT, _ENDED_AT = cast(USES.c.began_at, Float), cast(USES.c.ended_at, Float)
_USES = select(
    USES.c.search_id,
    USES.c.person,
    cast(USES.c.devices, Integer).label("devices"),
    _BEGAN_AT.label("began_at"),
    _ENDED_AT.label("ended_at"),
)


def _groups(connection: Connection) -> Iterator[DeviceGroup]:
    """Yields each group once: a server and a worker of one machine may have the same."""
    known = set()
    for server in running_servers(connection):
        for group in server.groups:
            if (group.machine, group.name) not in known:
                known.add((group.machine, group.name))
                yield group


def _limits(row: Row[Any]) -> Mapping[str, Any]:
    """Returns the limits of the server that leads; none where the column cannot be read."""
    return row.limits if isinstance(row.limits, dict) else {}


def _rules(connection: Connection) -> QueueRules:
    limits = _limits(connection.execute(select(SERVER.c.limits)).one())
    most_running = limits.get("most_running_of_person")
    hours = limits.get("most_device_hours_of_person")
    return QueueRules(
        groups=tuple(_groups(connection)),
        most_running=most_running if isinstance(most_running, int) else None,
        most_hours=DeviceHours.parse(hours) if isinstance(hours, str) else NO_LIMIT,
    )


def _queue(connection: Connection) -> Queue:
    """Returns the searches that wait and run, with what decides who is next."""
    rules = _rules(connection)
    now = connection.scalar(select(DatabaseNow())) or 0.0
    rows = connection.execute(_ACTIVE).all()
    models = _models(connection, {row.study for row in rows if row.state == "queued"})
    people = {row.submitted_by for row in rows}
    # Of the uses, which outlive the searches; a search that goes on takes no new turn.
    starts = (
        select(USES.c.person, func.min(_BEGAN_AT).label("at"))
        .where(USES.c.person.in_(people))
        .group_by(USES.c.person, USES.c.search_id)
        .subquery()
    )
    last_starts = select(starts.c.person, func.max(starts.c.at)).group_by(starts.c.person)
    return Queue(
        rules,
        now=now,
        waiting=[_waiting(_search(row), models) for row in rows if row.state == "queued"],
        running=[_running(_search(row)) for row in rows if row.state == "running"],
        last_starts={row[0]: row[1] for row in connection.execute(last_starts)},
        uses=_uses(connection, people, since=now - rules.most_hours.window_seconds)
        if rules.most_hours != NO_LIMIT
        else (),
    )


def _models(connection: Connection, studies: Collection[str]) -> dict[str, str]:
    """Returns the names of the devices that studies were begun on, by the names of the studies."""
    query = select(STUDIES.c.name, STUDIES.c.device).where(STUDIES.c.name.in_(studies))
    models = {}
    for row in connection.execute(query):
        model = row.device.get("name") if isinstance(row.device, dict) else None
        if isinstance(model, str):
            models[row.name] = model
    return models


def _waiting(search: QueuedSearch, models: Mapping[str, str]) -> Waiting:
    return Waiting(
        id=search.id,
        person=search.submitted_by,
        priority=search.priority,
        group=search.group,
        kind=kind_of(search.request),
        model=models.get(search.study, ""),
        devices=max(_number(search.request, name) for name in ("devices", "devices_per_trial")),
        nodes=_number(search.request, "nodes_per_trial"),
        slots=_slots(search.request),
        is_begun=search.run > 0,
        not_before=search.not_before,
        seconds=_budget_left(search),
    )


def _slots(request: Mapping[str, Any]) -> int:
    """Returns how many trials a search asks to run at once; 1 where it does not say."""
    return _number(request, "devices") * _number(request, "trials_per_device")


def _number(request: Mapping[str, Any], name: str) -> int:
    """Returns a number that a search asks for; 1 where it does not say."""
    number = str(request.get(name))
    return int(number) if re.fullmatch(r"[0-9]{1,4}", number) else 1


def _running(search: QueuedSearch) -> Running:
    left = (search.progress or {}).get("seconds_left")
    seconds = left if is_positive_number(left) else _budget_left(search)
    return Running(
        id=search.id,
        person=search.submitted_by,
        machine=search.host,
        group=search.group,
        seconds=0.0 if search.is_stopping else seconds,
    )


def _budget_left(search: QueuedSearch) -> float | None:
    """Returns how much of its time a search has; None without a budget, and where it is over."""
    progress = search.progress or {}
    budget: Any = progress.get("time_budget_seconds") or search.budget_seconds
    used = progress.get("used_seconds")
    if not is_positive_number(budget):
        return None
    left = budget - used if is_positive_number(used) else budget
    return float(left) if left > 0.0 else None


def _uses(connection: Connection, people: Iterable[str], *, since: float) -> list[Use]:
    """Returns the times for which searches of some people had devices, as far as they count."""
    counts = or_(_ENDED_AT.is_(None), since < _ENDED_AT)
    return [
        Use(
            search=row.search_id,
            person=row.person,
            devices=row.devices,
            began_at=row.began_at,
            ended_at=math.inf if row.ended_at is None else row.ended_at,
        )
        for row in connection.execute(_USES.where(USES.c.person.in_(people), counts))
    ]


def _end_use(connection: Connection, number: int, *, at: Any) -> None:
    """Notes that a search does not have its devices any more."""
    runs = USES.c.ended_at.is_(None)
    connection.execute(update(USES).where(USES.c.search_id == number, runs).values(ended_at=at))


_RANK = case((SEARCHES.c.state == "running", 0), (SEARCHES.c.state == "queued", 1), else_=2)
_BY_AGE = case((_RANK < 2, SEARCHES.c.id), else_=-SEARCHES.c.id)


def _in_order(numbers: Iterable[int]) -> Select[Any]:
    """Returns the query of a list of searches; `numbers` are those that wait, in their order."""
    positions = {number: position for position, number in enumerate(numbers)}
    in_queue = [case(positions, value=SEARCHES.c.id, else_=0)] if positions else []
    return _SEARCHES.order_by(_RANK, *in_queue, _BY_AGE)


_STATES_OF_STUDIES = select(SEARCHES.c.study, SEARCHES.c.state).where(
    SEARCHES.c.id.in_(select(func.max(SEARCHES.c.id)).group_by(SEARCHES.c.study))
)
"""Made once: a server asks for these with every page."""


def _owner_of(connection: Connection, study: str) -> str | None:
    """Returns who owns a study, or a name of which a search is listed; None for a free name."""
    has_study = select(STUDIES.c.id).where(STUDIES.c.name == study).exists()
    has_search = select(SEARCHES.c.id).where(SEARCHES.c.study == study).exists()
    recorded = select(OWNERS.c.owner).where(OWNERS.c.study == study, or_(has_study, has_search))
    owner = connection.scalar(recorded)
    if owner is None and connection.scalar(select(has_study)):
        return OWNER
    return owner


def _take_name(connection: Connection, study: str, new: NewSearch) -> None:
    """Lets a study that is to begin belong to who submits it. Raises NotYours."""
    owner = _owner_of(connection, study)
    if owner is None:
        connection.execute(delete(OWNERS).where(OWNERS.c.study == study))
        connection.execute(insert(OWNERS).values(study=study, owner=new.submitted_by))
    elif owner != new.submitted_by and not new.is_of_admin:
        raise NotYours(
            f"study {study} belongs to {owner}",
            hint="choose another name: results of the same workload are taken over from it",
        )


def _check_no_active_search(connection: Connection, study: str) -> None:
    """Raises SearchConflict while a search of the study is queued or running."""
    is_active = SEARCHES.c.state.in_(("queued", "running"))
    active = connection.execute(
        select(SEARCHES.c.id, SEARCHES.c.state).where(SEARCHES.c.study == study, is_active)
    ).first()
    if active is not None:
        raise SearchConflict(
            f"search {active.id} of study {study} is {active.state}",
            hint="wait until it ends, or cancel it",
        )


def _read(connection: Connection, number: int) -> QueuedSearch:
    row = None
    if 0 < number < 2**31:
        row = connection.execute(_SEARCHES.where(SEARCHES.c.id == number)).one_or_none()
    if row is None:
        raise UnknownSearch(
            f"there is no search {number}", hint="see the searches with: autotune queue"
        )
    return _search(row)


def _search(row: Row[Any]) -> QueuedSearch:
    """Returns the search of a row; a failed one without settings where the row cannot be read.

    Lists of searches, and the server that works them off, must not end with one such row.
    """
    try:
        check_decoded(row, "request", "progress")
        search = _readable_search(row)
        check(search)
    except (ValueError, TypeError) as error:
        return QueuedSearch(
            id=row.id,
            study=row.study if isinstance(row.study, str) else "",
            state="failed",
            request={},
            priority=0,
            group="",
            submitted_by="",
            submitted_at=0.0,
            reason=storable_text(f"its row cannot be read: {error}", longest=_LONGEST_REASON),
            hint="remove it from the list, and submit it again",
            exit_code=70,
        )
    return search


def _readable_search(row: Row[Any]) -> QueuedSearch:
    process = None
    if row.pid is not None:
        process = SearchProcess(
            host=row.host or "", pid=row.pid, started_at=row.process_started_at or 0.0
        )
    return QueuedSearch(
        id=row.id,
        study=row.study,
        state=row.state,
        request=row.request,
        priority=row.priority,
        group=row.device_group,
        submitted_by=row.submitted_by,
        submitted_at=row.submitted_at,
        not_before=row.not_before,
        budget_seconds=row.budget_seconds,
        started_at=row.started_at,
        ended_at=row.ended_at,
        reason=row.reason,
        hint=row.hint,
        exit_code=row.exit_code,
        run=row.run,
        losses=row.losses,
        is_stopping=row.is_stopping,
        host=row.host or "",
        process=process,
        lease_until=row.lease_until,
        is_expired=row.is_expired,
        progress=row.progress,
        version=row.version,
    )


def _update(connection: Connection, number: int, **values: Any) -> None:
    for name in ("reason", "hint"):
        if isinstance(values.get(name), str):
            values[name] = storable_text(values[name], longest=_LONGEST_REASON)
    connection.execute(update(SEARCHES).where(SEARCHES.c.id == number).values(**values))


_SIGNS_OF_LIFE = ("lease_until", "is_expired", "progress", "losses")


@contextmanager
def _telling(connection: Connection, number: int) -> Iterator[QueuedSearch]:
    """Yields a search, and adds an event at the end if anything but its signs of life changed."""
    before = _read(connection, number)
    yield before
    row = connection.execute(_SEARCHES.where(SEARCHES.c.id == number)).one_or_none()
    if row is None:
        return
    after = _search(row)
    signs = {name: getattr(after, name) for name in _SIGNS_OF_LIFE}
    if replace(before, **signs) != after:
        _add_events(connection, [_state_event(after)])


def _end_run(connection: Connection, search: QueuedSearch, end: SearchEnd) -> None:
    """Ends a search, or queues it again; it fails after too many losses in a row."""
    losses = search.losses + end.is_loss
    if end.state == "cancelled" or (end.state == "queued" and search.is_stopping):
        _end(connection, search.id, _cancelled(search.reason))
    elif end.state != "queued":
        _end(connection, search.id, end)
    elif losses > MOST_LOSSES:
        failure = SearchEnd(
            state="failed",
            reason=f"its process was lost {losses} times in a row, the last time: {end.reason}",
            hint=end.hint or "see the log of the search, then continue it",
            exit_code=75,
        )
        _end(connection, search.id, failure)
    else:
        pause = min(2.0 ** (losses - 1), _LONGEST_LOSS_PAUSE_SECONDS) if end.is_loss else 0.0
        _update(
            connection,
            search.id,
            state="queued",
            losses=losses,
            reason=end.reason,
            hint=end.hint,
            not_before=DatabaseNow() + pause,
            device_group=search.request.get("group", ""),
        )


def _cancelled(reason: str) -> SearchEnd:
    return SearchEnd(state="cancelled", reason=reason, exit_code=75)


def _end(connection: Connection, number: int, end: SearchEnd) -> None:
    _update(
        connection,
        number,
        state=end.state,
        reason=end.reason,
        hint=end.hint,
        exit_code=end.exit_code,
        ended_at=DatabaseNow(),
        is_stopping=False,
    )


def _state_event(search: QueuedSearch) -> tuple[int, str, str, dict[str, Any]]:
    data = {
        "id": search.id,
        "study": search.study,
        "state": search.state,
        "reason": search.reason,
        "hint": search.hint,
        "priority": search.priority,
        "exit_code": search.exit_code,
        "is_stopping": search.is_stopping,
    }
    return search.id, search.study, "search", data


def _add_events(
    connection: Connection, events: Sequence[tuple[int, str, str, Mapping[str, Any]]]
) -> None:
    if not events:
        return
    connection.execute(
        update(SERVER).where(SERVER.c.id == 1).values(last_event=SERVER.c.last_event + len(events))
    )
    last = connection.scalar(select(SERVER.c.last_event).where(SERVER.c.id == 1)) or 0
    first = last - len(events) + 1
    now = connection.scalar(select(DatabaseNow()))
    connection.execute(
        insert(EVENTS),
        [
            {
                "id": first + index,
                "search_id": number,
                "study": study,
                "kind": kind,
                "data": dict(data),
                "at": now,
            }
            for index, (number, study, kind, data) in enumerate(events)
        ],
    )
