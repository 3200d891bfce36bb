"""Sends the events of the database to everybody who listens.

One thread at a time looks for new events, however many listen: on SQLite it asks the file whether
anything was committed (`PRAGMA data_version`), outside of any transaction, so that the log of the
database does not grow; PostgreSQL is asked for the number of the last event. Each listener has a
bounded queue. One who reads too slowly is sent away and comes back with the number of the last
event that it has seen (`Last-Event-ID`), from which it goes on without losing or doubling any.
"""

import asyncio
import itertools
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import anyio.to_thread
import sqlalchemy
from anyio import CapacityLimiter
from fastapi.sse import format_sse_event
from sqlalchemy.exc import SQLAlchemyError

from autotune.errors import StorageUnavailable
from autotune.service.pages.field_names import in_fields
from autotune.service.search_json import moment
from autotune.spec.queued_search import ServiceEvent
from autotune.storage.database import Database
from autotune.storage.error_translation import storage_errors
from autotune.storage.searches import Searches

Returned = TypeVar("Returned")

_LOG = logging.getLogger("autotune.service")

_POLL_SECONDS = 0.1
_POLL_SECONDS_ON_SERVER = 0.25
_AWAY_SECONDS = 1.0
_REMEMBERED = 5_000
"""Events that are kept in memory for listeners who come back."""
_LONGEST_QUEUE = 1_000
_AT_A_TIME = 1_000
_MOST_TOGETHER = 50
"""A batch is copied for its listener, who may not read it."""
SIGN_OF_LIFE_SECONDS = 15.0
"""By which proxies and clients know that a stream is there."""


@dataclass(frozen=True, kw_only=True)
class StreamedEvent:
    """An event as it is sent: written once for all listeners."""

    number: int
    search: int
    study: str
    text: bytes
    """As it stands in a stream of server-sent events."""


def streamed(event: ServiceEvent) -> StreamedEvent:
    """Returns an event with its data as JSON."""
    data = {
        "search": event.search or None,
        "study": event.study,
        "at": moment(event.at),
        **event.data,
    }
    if isinstance(message := data.get("message"), str):
        data["on_page"] = in_fields(message)
    return StreamedEvent(
        number=event.number,
        search=event.search,
        study=event.study,
        text=format_sse_event(
            event=event.kind,
            data_str=json.dumps(data, separators=(",", ":")),
            id=str(event.number),
        ),
    )


class _Listener:
    def __init__(self, wants: Callable[[StreamedEvent], bool]) -> None:
        self.wants = wants
        self.queue: asyncio.Queue[StreamedEvent | None] = asyncio.Queue(_LONGEST_QUEUE)
        """None: it is sent away."""
        self.is_gone = False

    def offer(self, event: StreamedEvent) -> None:
        if self.is_gone or not self.wants(event):
            return
        if self.queue.full():
            self.send_away()
            return
        self.queue.put_nowait(event)

    def send_away(self) -> None:
        """End the stream after what was read already; the rest is read again when it is back."""
        self.is_gone = True
        with suppress(asyncio.QueueEmpty):
            while True:
                self.queue.get_nowait()
        self.queue.put_nowait(None)


class EventStream:
    """The events of one database, for any number of listeners of this process."""

    def __init__(
        self,
        database: Database,
        searches: Searches,
        *,
        when_study_changes: Callable[[ServiceEvent], None] = lambda _: None,
    ) -> None:
        self._database = database
        self._when_study_changes = when_study_changes
        self._searches = searches
        self._listeners: set[_Listener] = set()
        self._recent: deque[StreamedEvent] = deque(maxlen=_REMEMBERED)
        self._position = 0
        """The number of the last event that listeners were offered."""
        self._limiter = CapacityLimiter(1)
        self._reading = CapacityLimiter(4)
        self._connection: sqlalchemy.Connection | None = None
        self._seen_version: int | None = None
        self.sent = 0
        """How many events listeners were offered since the start."""
        self.has_ended = False

    @property
    def listeners(self) -> int:
        """How many listen now."""
        return len(self._listeners)

    @property
    def position(self) -> int:
        """The number of the last event."""
        return self._position

    async def begin(self) -> None:
        """Find out which event was the last. Raises StorageUnavailable.

        Before that nobody can be told which events come next.
        """
        self._position = await self._in_thread(self._searches.last_event)

    async def run(self) -> None:
        """Look for events until cancelled, after `begin`."""
        is_sqlite = self._database.engine.dialect.name == "sqlite"
        pause = _POLL_SECONDS if is_sqlite else _POLL_SECONDS_ON_SERVER
        try:
            while True:
                try:
                    if await self._in_thread(self._has_changed):
                        await self._read_new()
                except StorageUnavailable as error:
                    _LOG.warning("events wait: %s", error.message)
                    self._seen_version = None
                    await asyncio.sleep(_AWAY_SECONDS)
                except Exception:
                    _LOG.exception("events could not be read; it is tried again")
                    await asyncio.sleep(_AWAY_SECONDS)
                await asyncio.sleep(pause)
        finally:
            self.end()
            self._close_connection()

    def end(self) -> None:
        """Send all listeners away, and those who still come."""
        self.has_ended = True
        for listener in self._listeners:
            listener.send_away()

    def _close_connection(self) -> None:
        if self._connection is not None:
            with suppress(SQLAlchemyError):
                self._connection.close()
        self._connection = None

    async def _in_thread(self, call: Callable[[], Returned]) -> Returned:
        return await anyio.to_thread.run_sync(call, limiter=self._limiter)

    def _has_changed(self) -> bool:
        """Whether another connection has committed anything since the last call."""
        if self._database.engine.dialect.name != "sqlite":
            return self._searches.last_event() > self._position
        try:
            with storage_errors(self._database.url):
                if self._connection is None:
                    self._connection = self._database.engine.connect()
                version = self._connection.exec_driver_sql("PRAGMA data_version").scalar()
        except StorageUnavailable:
            self._close_connection()  # of a file that is gone it would tell nothing any more
            raise
        has_changed: bool = version != self._seen_version
        self._seen_version = version
        return has_changed

    async def _read_new(self) -> None:
        while True:
            events = await self._in_thread(partial(self._events_after, self._position))
            for event in events:
                if event.kind == "study":
                    await self._in_thread(partial(self._when_study_changes, event))
                sent = streamed(event)
                self._recent.append(sent)
                self._position = sent.number
                self.sent += 1
                for listener in self._listeners:
                    listener.offer(sent)
            if len(events) < _AT_A_TIME:
                return

    def _events_after(self, number: int) -> list[ServiceEvent]:
        return self._searches.events_after(number, limit=_AT_A_TIME)

    async def listen(
        self, *, after: int, wants: Callable[[StreamedEvent], bool]
    ) -> AsyncGenerator[Sequence[StreamedEvent | None], None]:
        """Yield the events that somebody wants, from the one after number `after` on.

        Those that are there at once come together, as sending costs more than what is sent, and
        nothing comes after SIGN_OF_LIFE_SECONDS without any. None stands for events that are no
        longer stored: everything has to be read again. Ends for a listener who reads too slowly,
        and when the server stops.
        """
        listener = _Listener(wants)
        begin = self._position
        self._listeners.add(listener)
        try:
            if self.has_ended:
                return
            if after > begin:
                yield [None]  # a number of another database
            elif after < begin:
                async for event in self._missed(after, begin, wants):
                    yield [event]
            while True:
                try:
                    event = await asyncio.wait_for(listener.queue.get(), SIGN_OF_LIFE_SECONDS)
                except TimeoutError:
                    yield []
                    continue
                batch = []
                while event is not None:
                    batch.append(event)
                    if listener.queue.empty() or len(batch) == _MOST_TOGETHER:
                        break
                    event = listener.queue.get_nowait()
                if batch:
                    yield batch
                if event is None:
                    return
        finally:
            self._listeners.discard(listener)

    async def _missed(
        self, after: int, until: int, wants: Callable[[StreamedEvent], bool]
    ) -> AsyncIterator[StreamedEvent | None]:
        """Yield what a listener has missed: the events after `after`, up to `until`."""
        recent = list(self._recent)
        if recent and recent[0].number <= after + 1:
            for event in itertools.takewhile(lambda event: event.number <= until, recent):
                if event.number > after and wants(event):
                    yield event
            return
        first = await anyio.to_thread.run_sync(self._searches.first_event, limiter=self._reading)
        if first is None or first > after + 1:
            yield None
            after = until if first is None else first - 1
        while after < until:
            events = await anyio.to_thread.run_sync(
                self._events_after, after, limiter=self._reading
            )
            for stored in events:
                event = streamed(stored)
                if event.number <= until and wants(event):
                    yield event
            if not events:
                return
            after = events[-1].number
