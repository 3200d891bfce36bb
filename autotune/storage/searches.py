"""The queue of a service: searches that were submitted, who runs them, and what happened to them.

Each call is one transaction. Three kinds of processes write, and none trusts that it is alone:

- the scheduler of the leading server. Its calls name the *epoch* of its lead, which the next leader
  raises: what a server that was paused meanwhile still writes is rejected (`LeadLost`).
- the process of a search. Its calls name the *run*, which each start of a process raises: a process
  that was believed dead changes nothing any more.
- every server, for what its users ask for.

Events have numbers without gaps that a reader could miss: the row of `autotune_server` is locked
from the number to the commit, so that they appear in their order.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    and_,
    case,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)

from autotune.errors import SearchConflict, StudyMismatch, UnknownSearch, UnknownStudy
from autotune.failpoints import failpoint
from autotune.spec.queued_search import (
    ENDED,
    MOST_LOSSES,
    SEARCH_LEASE_SECONDS,
    QueuedSearch,
    SearchProcess,
    SearchState,
    ServiceEvent,
)
from autotune.spec.reading import check
from autotune.storage.database import Database
from autotune.storage.error_translation import Conflict
from autotune.storage.rows import storable_text
from autotune.storage.stored_columns import check_decoded
from autotune.storage.tables import EVENTS, SEARCHES, SERVER, STUDIES, DatabaseNow

MOST_QUEUED = 1000
"""More searches are not accepted; each takes some room in the database."""
LEAD_SECONDS = 8.0
"""After this long without a sign of life another server may take the lead."""
_LONGEST_REASON = 2000
_ANNOUNCED_SECONDS = 86_400.0
_LONGEST_LOSS_PAUSE_SECONDS = 60.0


class LeadLost(Exception):
    """Another server leads: this one schedules nothing any more."""


class RunLost(Exception):
    """The search was given to another process, or has ended."""


@dataclass(frozen=True, kw_only=True)
class NewSearch:
    """A submission that was checked."""

    request: Mapping[str, Any]
    submitted_by: str
    study: str | None = None
    """Name of the study; None: `study_base` with the number of the search."""
    study_base: str = "search"
    priority: int = 0
    group: str = ""
    key: str | None = None
    """By which a repeated submission is recognized."""
    digest: str = ""
    """Of the submission's content: a key that is used again must come with the same."""


@dataclass(frozen=True, kw_only=True)
class Lead:
    """Which server leads."""

    epoch: int
    holder: str
    version: str
    seconds_since: float
    """Since its last sign of life."""


class Searches:
    """The queue of one database. All methods raise StorageUnavailable and StorageUnreachable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # -- for users -----------------------------------------------------------------------------

    def submit(self, new: NewSearch, *, only_of_study: bool = False) -> tuple[QueuedSearch, bool]:
        """Adds a search; returns it, and whether it is new.

        A repeated key returns the search that it was first used for. Raises SearchConflict where
        the content was another one then, for a full queue, and with `only_of_study` while another
        search of the study is queued or running.
        """
        with self._database.writing() as connection:
            _lock(connection)
            if new.key is not None:
                first = connection.execute(
                    select(SEARCHES).where(SEARCHES.c.key == new.key)
                ).one_or_none()
                if first is not None:
                    if first.digest != new.digest:
                        raise SearchConflict(
                            f"Invalid Idempotency-Key {new.key!r}: search {first.id} was submitted "
                            "with it, with other settings",
                            hint="choose a new key for a new submission",
                        )
                    return _search(first), False
            if only_of_study and new.study is not None:
                _check_no_active_search(connection, new.study)
            waiting = connection.scalar(
                select(func.count()).select_from(SEARCHES).where(SEARCHES.c.state == "queued")
            )
            if (waiting or 0) >= MOST_QUEUED:
                raise SearchConflict(
                    f"the queue is full: {waiting} searches wait in it",
                    hint="wait until some have ended, or cancel some",
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
                )
            )
            (number,) = inserted.inserted_primary_key or (0,)
            if new.study is None:
                connection.execute(
                    update(SEARCHES)
                    .where(SEARCHES.c.id == number)
                    .values(study=f"{new.study_base}-{number}")
                )
            search = _read(connection, number)
            _add_events(connection, [_state_event(search)])
            failpoint("search submitted, not committed")
        return search, True

    def get(self, number: int) -> QueuedSearch:
        """Returns a search. Raises UnknownSearch."""
        with self._database.reading() as connection:
            return _read(connection, number)

    def find(
        self,
        *,
        states: Sequence[SearchState] = (),
        study: str | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> tuple[list[QueuedSearch], int]:
        """Returns searches and how many there are without `limit` and `offset`.

        Running ones come first, then queued ones in the order in which they will begin, then ended
        ones, the latest first.
        """
        conditions: list[ColumnElement[bool]] = []
        if states:
            conditions.append(SEARCHES.c.state.in_(states))
        if study is not None:
            conditions.append(SEARCHES.c.study == study)
        rank = case((SEARCHES.c.state == "running", 0), (SEARCHES.c.state == "queued", 1), else_=2)
        is_queued = SEARCHES.c.state == "queued"
        query = (
            select(SEARCHES)
            .where(*conditions)
            .order_by(
                rank,
                case((and_(is_queued, SEARCHES.c.run > 0), 0), else_=1),
                case((is_queued, -SEARCHES.c.priority), else_=0),
                case((rank < 2, SEARCHES.c.id), else_=-SEARCHES.c.id),
            )
            .limit(limit)
            .offset(offset)
        )
        with self._database.reading() as connection:
            rows = connection.execute(query).all()
            total = connection.scalar(select(func.count()).select_from(SEARCHES).where(*conditions))
        return [_search(row) for row in rows], total or 0

    def counts(self) -> dict[SearchState, int]:
        """Returns how many searches are in each state."""
        query = select(SEARCHES.c.state, func.count()).group_by(SEARCHES.c.state)
        with self._database.reading() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def positions(self) -> dict[int, int]:
        """Returns {number of a queued search: its place in the queue}; the next one is at 1."""
        query = select(SEARCHES.c.id).where(SEARCHES.c.state == "queued").order_by(*_QUEUE_ORDER)
        with self._database.reading() as connection:
            numbers = connection.scalars(query).all()
        return {number: place for place, number in enumerate(numbers, start=1)}

    def latest_of_studies(self) -> dict[str, QueuedSearch]:
        """Returns the latest search of each study that the service has run or will run."""
        latest = select(func.max(SEARCHES.c.id)).group_by(SEARCHES.c.study)
        with self._database.reading() as connection:
            rows = connection.execute(select(SEARCHES).where(SEARCHES.c.id.in_(latest))).all()
        return {row.study: _search(row) for row in rows}

    def set_priority(self, number: int, priority: int) -> QueuedSearch:
        """Changes the priority of a search that has not ended. Raises SearchConflict."""
        with self._changing(number) as (connection, search):
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
        with self._changing(number) as (connection, search):
            if search.state in ("finished", "failed"):
                raise SearchConflict(
                    f"search {number} cannot be cancelled: it is {search.state}",
                    hint=f"its results stay: autotune show {search.study}",
                )
            if search.state == "queued":
                _end(connection, number, "cancelled", reason=f"cancelled by {by}", exit_code=75)
            elif search.state == "running":
                _update(connection, number, is_stopping=True, reason=f"cancelled by {by}")
        return self.get(number)

    def remove(self, number: int) -> None:
        """Removes a search that has ended from the list; its study stays. Raises SearchConflict."""
        with self._changing(number) as (connection, search):
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
        name in use.
        """
        try:
            with self._database.writing() as connection:
                _lock(connection)
                _check_no_active_search(connection, study)
                renamed = connection.execute(
                    update(STUDIES).where(STUDIES.c.name == study).values(name=new_name)
                )
                connection.execute(
                    update(SEARCHES).where(SEARCHES.c.study == study).values(study=new_name)
                )
                data = {"action": "renamed", "name": new_name}
                _add_events(connection, [(0, study, "study", data)])
        except Conflict:
            raise StudyMismatch(
                f"there is a study {new_name!r} in {self._database.url} already",
                hint="choose another name",
            ) from None
        if renamed.rowcount == 0:
            raise UnknownStudy(f"there is no study {study!r} in {self._database.url}")

    def delete_study(self, study: str) -> None:
        """Deletes a study with all that is stored of it; nothing if there is none.

        Raises SearchConflict while a search of it is active.
        """
        with self._database.writing() as connection:
            _lock(connection)
            _check_no_active_search(connection, study)
            connection.execute(delete(STUDIES).where(STUDIES.c.name == study))
            _add_events(connection, [(0, study, "study", {"action": "deleted"})])

    @contextmanager
    def _changing(self, number: int) -> Iterator[tuple[Connection, QueuedSearch]]:
        """Yields the search in a transaction, and adds the event of its new state at the end."""
        with self._database.writing() as connection:
            _lock(connection)
            before = _read(connection, number)
            yield connection, before
            after = connection.execute(
                select(SEARCHES).where(SEARCHES.c.id == number)
            ).one_or_none()
            if after is not None and _search(after) != before:
                _add_events(connection, [_state_event(_search(after))])

    # -- for the scheduler -----------------------------------------------------------------------

    def take_lead(self, holder: str, *, version: str, dead_epoch: int | None = None) -> int | None:
        """Takes the lead where no server has it; returns its epoch, else None.

        `dead_epoch` is that of a leader whose process is known to have ended.
        """
        is_free = or_(
            SERVER.c.renewed_at < DatabaseNow() - LEAD_SECONDS,
            SERVER.c.holder == "",
            SERVER.c.epoch == (-1 if dead_epoch is None else dead_epoch),
        )
        with self._database.writing() as connection:
            taken = connection.execute(
                update(SERVER)
                .where(SERVER.c.id == 1, is_free)
                .values(
                    epoch=SERVER.c.epoch + 1,
                    holder=holder,
                    version=version,
                    renewed_at=DatabaseNow(),
                )
            )
            if taken.rowcount == 0:
                return None
            return connection.scalar(select(SERVER.c.epoch).where(SERVER.c.id == 1))

    def lead(self) -> Lead:
        """Returns which server leads, or led last."""
        with self._database.reading() as connection:
            row = connection.execute(
                select(SERVER, (DatabaseNow() - SERVER.c.renewed_at).label("seconds_since")).where(
                    SERVER.c.id == 1
                )
            ).one()
        return Lead(
            epoch=row.epoch,
            holder=row.holder,
            version=row.version,
            seconds_since=row.seconds_since,
        )

    def keep_lead(self, epoch: int) -> None:
        """Renews the lead. Raises LeadLost."""
        with self._fenced(epoch):
            pass

    def give_lead(self, epoch: int) -> None:
        """Lets another server take the lead at once."""
        with self._database.writing() as connection:
            connection.execute(
                update(SERVER)
                .where(SERVER.c.id == 1, SERVER.c.epoch == epoch)
                .values(holder="", renewed_at=0.0)
            )

    def claim_next(self, epoch: int, *, group: str, version: str) -> QueuedSearch | None:
        """Marks the next search for a group of devices as running; None where none waits.

        None too while another search runs on the group. Raises LeadLost.
        """
        with self._fenced(epoch) as connection:
            is_busy = select(SEARCHES.c.id).where(
                SEARCHES.c.state == "running", SEARCHES.c.device_group == group
            )
            if connection.execute(is_busy.limit(1)).first() is not None:
                return None
            waiting = (
                select(SEARCHES.c.id)
                .where(
                    SEARCHES.c.state == "queued",
                    SEARCHES.c.device_group.in_(("", group)),
                    SEARCHES.c.not_before <= DatabaseNow(),
                )
                .order_by(*_QUEUE_ORDER)
                .limit(1)
            )
            number = connection.scalar(waiting)
            if number is None:
                return None
            _update(
                connection,
                number,
                state="running",
                run=SEARCHES.c.run + 1,
                reported=0,
                device_group=group,
                started_at=func.coalesce(SEARCHES.c.started_at, DatabaseNow()),
                lease_until=DatabaseNow() + SEARCH_LEASE_SECONDS,
                host=None,
                pid=None,
                process_started_at=None,
                reason="",
                hint="",
                version=version,
            )
            search = _read(connection, number)
            if search.state != "running":  # its row cannot be read: no process could run it
                _end(
                    connection,
                    number,
                    "failed",
                    reason=search.reason,
                    hint=search.hint,
                    exit_code=search.exit_code,
                )
            _add_events(connection, [_state_event(search)])
            failpoint("search claimed, not committed")
        failpoint("search claimed")
        return search if search.state == "running" else None

    def give_up_run(self, epoch: int, number: int, run: int, *, reason: str) -> QueuedSearch | None:
        """Notes that the process of a search ended without a word, and queues the search again.

        It fails where that happened too often; it is cancelled where that was asked for. Returns
        None where the process has said how it ended, or another one runs. Raises LeadLost.
        """
        with self._fenced(epoch) as connection:
            search = _read(connection, number)
            if search.state != "running" or search.run != run:
                return None
            if search.is_stopping:
                _end(connection, number, "cancelled", reason=search.reason, exit_code=75)
            else:
                _queue_again(connection, search, reason=reason, hint="")
            search = _read(connection, number)
            _add_events(connection, [_state_event(search)])
        return search

    def is_expired(self, number: int, run: int) -> bool:
        """Returns whether a process has given no sign of life for SEARCH_LEASE_SECONDS."""
        query = select(SEARCHES.c.id).where(
            SEARCHES.c.id == number,
            SEARCHES.c.run == run,
            SEARCHES.c.state == "running",
            SEARCHES.c.lease_until < DatabaseNow(),
        )
        with self._database.reading() as connection:
            return connection.execute(query).first() is not None

    def fail(self, epoch: int, number: int, run: int, *, reason: str, hint: str) -> None:
        """Notes that no process could be started for a search. Raises LeadLost."""
        with self._fenced(epoch) as connection:
            search = _read(connection, number)
            if search.state == "running" and search.run == run:
                _end(connection, number, "failed", reason=reason, hint=hint, exit_code=70)
                _add_events(connection, [_state_event(_read(connection, number))])

    def to_announce(self, *, limit: int = 20) -> list[QueuedSearch]:
        """Returns searches of the last day that no webhook was called for yet."""
        query = (
            select(SEARCHES)
            .where(
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
        """Notes that the webhook was called for these searches. Raises LeadLost."""
        with self._fenced(epoch) as connection:
            connection.execute(
                update(SEARCHES).where(SEARCHES.c.id.in_(numbers)).values(is_announced=True)
            )

    def explain_waiting(self, epoch: int, groups: Sequence[str]) -> None:
        """Says at queued searches for a group that no server has why they wait. Raises LeadLost."""
        with self._fenced(epoch) as connection:
            connection.execute(
                update(SEARCHES)
                .where(
                    SEARCHES.c.state == "queued",
                    SEARCHES.c.device_group.not_in(("", *groups)),
                    SEARCHES.c.reason == "",
                )
                .values(reason="it waits for a group of devices that the server does not have")
            )

    @contextmanager
    def _fenced(self, epoch: int) -> Iterator[Connection]:
        """Yields a transaction of the leading server; renews its lead. Raises LeadLost."""
        with self._database.writing() as connection:
            renewed = connection.execute(
                update(SERVER)
                .where(SERVER.c.id == 1, SERVER.c.epoch == epoch)
                .values(renewed_at=DatabaseNow())
            )
            if renewed.rowcount == 0:
                raise LeadLost
            yield connection

    # -- for the process of a search ---------------------------------------------------------------

    def begin_run(
        self, number: int, run: int, process: SearchProcess, *, version: str
    ) -> QueuedSearch:
        """Notes which process runs a search, and the version of its autotune. Raises RunLost."""
        with self._of_run(number, run) as (connection, _):
            _update(
                connection,
                number,
                host=storable_text(process.host, longest=200),
                pid=process.pid,
                process_started_at=process.started_at,
                version=version,
                lease_until=DatabaseNow() + SEARCH_LEASE_SECONDS,
            )
            search = _read(connection, number)
            _add_events(connection, [_state_event(search)])
        return search

    def renew_run(
        self, number: int, run: int, *, progress: Mapping[str, Any], study: str, has_results: bool
    ) -> bool:
        """Gives a sign of life and says what the search does; returns whether it is to stop.

        `has_results` ends the count of losses in a row. Raises RunLost.
        """
        with self._of_run(number, run) as (connection, search):
            values: dict[str, Any] = {"study": study}
            if has_results:
                values["losses"] = 0
            _update(
                connection,
                number,
                lease_until=DatabaseNow() + SEARCH_LEASE_SECONDS,
                progress=dict(progress),
                **values,
            )
            return search.is_stopping

    def end_run(
        self,
        number: int,
        run: int,
        state: SearchState,
        *,
        reason: str = "",
        hint: str = "",
        exit_code: int | None = None,
        is_loss: bool = False,
    ) -> None:
        """Notes how a search ended; `queued` where another process is to resume it.

        With `is_loss` that counts as a loss, and the search fails after too many. Raises RunLost.
        """
        with self._of_run(number, run) as (connection, search):
            if state == "queued" and search.is_stopping:
                _end(connection, number, "cancelled", reason=search.reason, exit_code=75)
            elif state == "queued" and is_loss:
                _queue_again(connection, search, reason=reason, hint=hint)
            elif state == "queued":
                _update(
                    connection,
                    number,
                    state="queued",
                    reason=reason,
                    hint=hint,
                    device_group=search.request.get("group", ""),
                )
            else:
                _end(
                    connection,
                    number,
                    state,
                    reason=reason or (search.reason if state == "cancelled" else ""),
                    hint=hint,
                    exit_code=exit_code,
                )
            _add_events(connection, [_state_event(_read(connection, number))])

    def add_events(
        self, number: int, run: int, events: Sequence[tuple[str, Any]], *, after: int
    ) -> None:
        """Adds events of a search, each a kind and what JSON can hold. Raises RunLost.

        `after` counts the events of the run before these: a call that is repeated because its
        answer was lost adds none again.
        """
        with self._of_run(number, run) as (connection, search):
            reported = connection.scalar(select(SEARCHES.c.reported).where(SEARCHES.c.id == number))
            new = events[max(0, (reported or 0) - after) :]
            _update(connection, number, reported=after + len(events))
            _add_events(connection, [(search.id, search.study, kind, data) for kind, data in new])

    @contextmanager
    def _of_run(self, number: int, run: int) -> Iterator[tuple[Connection, QueuedSearch]]:
        with self._database.writing() as connection:
            _lock(connection)
            try:
                search = _read(connection, number)
            except UnknownSearch:
                raise RunLost from None
            if search.run != run or search.state != "running":
                raise RunLost
            yield connection, search

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
        """Removes all but the last `most` events. Raises LeadLost."""
        with self._fenced(epoch) as connection:
            last = connection.scalar(select(SERVER.c.last_event).where(SERVER.c.id == 1)) or 0
            connection.execute(delete(EVENTS).where(EVENTS.c.id <= last - most))


# -- rows ------------------------------------------------------------------------------------------

_QUEUE_ORDER = (
    # A search that was begun goes on before new ones begin.
    case((SEARCHES.c.run > 0, 0), else_=1),
    SEARCHES.c.priority.desc(),
    SEARCHES.c.id,
)


def _lock(connection: Connection) -> None:
    """Locks the row of the server until the commit, so that changes come one after another."""
    connection.execute(
        update(SERVER).where(SERVER.c.id == 1).values(last_event=SERVER.c.last_event)
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
        row = connection.execute(select(SEARCHES).where(SEARCHES.c.id == number)).one_or_none()
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
        started_at=row.started_at,
        ended_at=row.ended_at,
        reason=row.reason,
        hint=row.hint,
        exit_code=row.exit_code,
        run=row.run,
        losses=row.losses,
        is_stopping=row.is_stopping,
        process=process,
        lease_until=row.lease_until,
        progress=row.progress,
        version=row.version,
    )


def _update(connection: Connection, number: int, **values: Any) -> None:
    for name in ("reason", "hint"):
        if isinstance(values.get(name), str):
            values[name] = storable_text(values[name], longest=_LONGEST_REASON)
    connection.execute(update(SEARCHES).where(SEARCHES.c.id == number).values(**values))


def _queue_again(connection: Connection, search: QueuedSearch, *, reason: str, hint: str) -> None:
    """Queues a search after the loss of its process; it fails after too many in a row."""
    losses = search.losses + 1
    if losses > MOST_LOSSES:
        _end(
            connection,
            search.id,
            "failed",
            reason=f"its process was lost {losses} times in a row, the last time: {reason}",
            hint=hint or "see the log of the search, then continue it",
            exit_code=75,
        )
        return
    pause = min(2.0 ** (losses - 1), _LONGEST_LOSS_PAUSE_SECONDS)
    _update(
        connection,
        search.id,
        state="queued",
        losses=losses,
        reason=reason,
        hint=hint,
        not_before=DatabaseNow() + pause,
        device_group=search.request.get("group", ""),
    )


def _end(
    connection: Connection,
    number: int,
    state: SearchState,
    *,
    reason: str = "",
    hint: str = "",
    exit_code: int | None,
) -> None:
    _update(
        connection,
        number,
        state=state,
        reason=reason,
        hint=hint,
        exit_code=exit_code,
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
