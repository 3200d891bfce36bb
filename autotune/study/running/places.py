"""Places: where the trials of a search run, one at a time on each, and several at once.

A place is a slot of a device with what runs trials there. The main loop (`loop.py`) takes a place,
begins a work on it, and waits for the first work that ends. It alone, in its own thread, chooses,
claims, stores and speaks to the listener. `OnePlace` runs its work in that thread, as a search on
one device needs no other; `SeveralPlaces` have a thread each, which waits for the processes of its
trial.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from autotune.errors import AutotuneError, Stopped, TrialLost
from autotune.execution.local import POLL_SECONDS, LocalExecutor
from autotune.spec.config import TrainingConfig
from autotune.spec.device_group import joint_name
from autotune.spec.prediction import Forecast
from autotune.spec.result import DeviceInfo
from autotune.study.events import (
    Event,
    Listener,
    PlaceIsFree,
    PlaceJoined,
    PlaceLeft,
    WaitingForDevice,
)
from autotune.system.failpoints import failpoint

_POLLS_PER_SECOND = 1000
"""How often the threads of all places together look whether their trials are to end."""

SECONDS_TO_END = 6.0
"""How long the works of all places may take to end, once they are to."""


@dataclass(kw_only=True, eq=False)
class TrialPlace:
    """A slot of a device, or of several that train together, and what runs trials there."""

    executor: LocalExecutor
    device: DeviceInfo
    """The first one, where trials use several; the others are `other_devices` of the executor."""
    trials_on_device: int = 1
    """How many places share the device."""
    name: str = ""
    """What a user is told of it, such as cuda:1; empty for the only place of a search."""
    predict: Callable[[TrainingConfig], Forecast] | None = None
    """Predicts in a process of this place; None: the prediction cache does as it always does."""
    prepare: Callable[[], DeviceInfo] | None = None
    """Starts the trial server and finds out about the device, once, in the thread of the place,
    before its first slot."""
    queue: str = ""
    """Places of one queue wait for their slots one after another; empty: those of a device do."""
    is_lost: Callable[[], bool] = lambda: False
    """Whether what runs trials here has ended for good, as with the node of a cluster."""
    clock: Callable[[], float] = time.monotonic
    poll_seconds: float = POLL_SECONDS
    """How often the thread of the place looks whether its trial is to end."""


@dataclass(frozen=True, kw_only=True)
class EndedWork:
    """A work that has ended, with a result or an exception."""

    place: TrialPlace
    future: Future[Any]


class TrialPlaces(Protocol):
    """The places of one search. A place is free, or taken with its device slot, or at work."""

    @property
    def first(self) -> TrialPlace:
        """The first usable place, where the noise of a device and the finalists are measured."""

    @property
    def can_lose_one(self) -> bool:
        """Whether the search goes on where a place can no longer be used."""

    @property
    def can_take(self) -> bool:
        """Whether a free place has got its device slot since `take` was asked for one."""

    def take(self) -> TrialPlace | None:
        """Take a free place that has its device slot; None where there is none at the moment."""

    def leave(self, place: TrialPlace) -> None:
        """Make a taken place free again, and give its device slot back."""

    def begin(self, place: TrialPlace, work: Callable[[], Any]) -> None:
        """Begin a work on a taken place; it stays taken when the work has ended."""

    def wait(self, seconds: float) -> list[EndedWork]:
        """Returns the works that have ended, after waiting at most so long for the first.

        Returns early, too, when a place has got its device slot.
        """

    def drop(self, place: TrialPlace) -> None:
        """Use a taken place no more, because its device no longer works."""

    def keep_only(self, place: TrialPlace) -> None:
        """Give up the other places, once no work is left to begin on them."""

    def end_all(self) -> list[EndedWork]:
        """End all works within `SECONDS_TO_END`, return them, and give all device slots back."""


class OnePlace:
    """The only place of a search. Its work runs in the thread that begins it."""

    def __init__(self, place: TrialPlace, *, listener: Listener) -> None:
        self.first = place
        self.can_lose_one = False
        self.can_take = False
        self._listener = listener
        self._slot = ExitStack()
        self._is_taken = False
        self._ended: list[EndedWork] = []

    def take(self) -> TrialPlace | None:
        """Wait for the device slot. Raises Stopped where the search is stopped while waiting."""
        if self._is_taken:
            return None
        _take_slot(self.first, self._slot, listener=self._listener)
        self._is_taken = True
        return self.first

    def leave(self, place: TrialPlace) -> None:
        self._is_taken = False
        self._slot.close()

    def begin(self, place: TrialPlace, work: Callable[[], Any]) -> None:
        future: Future[Any] = Future()
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        self._ended.append(EndedWork(place=place, future=future))

    def wait(self, seconds: float) -> list[EndedWork]:
        ended, self._ended = self._ended, []
        return ended

    def drop(self, place: TrialPlace) -> None:
        raise AssertionError("a search without a place ends")

    def keep_only(self, place: TrialPlace) -> None:
        pass

    def end_all(self) -> list[EndedWork]:
        self.leave(self.first)
        return self.wait(0.0)


def _take_slot(place: TrialPlace, held: ExitStack, *, listener: Listener) -> None:
    def report_wait(holder: str) -> None:
        device = joint_name((place.device, *place.executor.other_devices))
        listener(WaitingForDevice(device=device, holder=holder, place=place.name))

    held.enter_context(
        place.executor.slot(place.device, places=place.trials_on_device, on_wait=report_wait)
    )
    failpoint("device taken")


class ThreadedListener:
    """A listener for events from any thread, which the thread that made it hands on."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._thread = threading.get_ident()
        self._waiting: SimpleQueue[Event | None] = SimpleQueue()

    def __call__(self, event: Event) -> None:
        if threading.get_ident() == self._thread:
            self.deliver()
            self._listener(event)
        else:
            self._waiting.put(event)

    def wake(self) -> None:
        """End the `wait` of the thread that made it."""
        self._waiting.put(None)

    def wait(self, seconds: float) -> None:
        """Wait for an event or for `wake`, then hand on the events of the other threads."""
        try:
            event = self._waiting.get(timeout=max(0.0, seconds))
        except Empty:
            return
        if event is not None:
            self._listener(event)
        self.deliver()

    def deliver(self) -> None:
        """Hand on the events of the other threads."""
        while not self._waiting.empty():
            event = self._waiting.get()
            if event is not None:
                self._listener(event)


class SeveralPlaces:
    """Places with a thread each. Use it as a context manager around the search's work.

    `ending` is set when all works are to end: whatever waits in a thread of a place looks at it.
    Executors except that of the first place are shut down at the end. A place that cannot be used
    is left out with a notice; the last one raises, after `seconds_without_place` in which none has
    `joined`.
    """

    def __init__(
        self,
        places: Sequence[TrialPlace],
        *,
        listener: ThreadedListener,
        ending: threading.Event,
        joined: "SimpleQueue[TrialPlace] | None" = None,
        seconds_without_place: float = 0.0,
    ) -> None:
        self._usable: list[TrialPlace] = []
        self._listener = listener
        self._ending = ending
        self._joined = joined
        self._seconds_without_place = seconds_without_place
        self._none_since: float | None = None
        self._threads: dict[TrialPlace, ThreadPoolExecutor] = {}
        self._first_executor = places[0].executor
        self._slots: dict[TrialPlace, ExitStack] = {}
        """Of the taken places."""
        self._getting_slots: dict[TrialPlace, Future[ExitStack]] = {}
        self._works: dict[TrialPlace, Future[Any]] = {}
        self._queues: dict[str, threading.Lock] = {}
        """One place at a time waits for a device; else it would seem to wait for another search."""
        for place in places:
            self._add(place)

    def _add(self, place: TrialPlace) -> None:
        self._usable.append(place)
        for one in self._usable:
            one.poll_seconds = max(POLL_SECONDS, len(self._usable) / _POLLS_PER_SECOND)
        self._threads[place] = ThreadPoolExecutor(1, thread_name_prefix=place.name)
        self._queues.setdefault(place.queue or place.device.device, threading.Lock())

    def __enter__(self) -> "SeveralPlaces":
        return self

    def __exit__(self, *_: object) -> None:
        self.end_all()
        for place, thread in self._threads.items():
            if place.executor is not self._first_executor:
                thread.submit(place.executor.shutdown)
        for thread in self._threads.values():
            thread.shutdown()
        self._listener.deliver()

    @property
    def first(self) -> TrialPlace:
        if not self._usable:
            raise TrialLost(
                "no device is left to measure on", hint="run the same command again to continue"
            )
        known = (place for place in self._usable if place.prepare is None)
        return next(known, self._usable[0])

    @property
    def can_lose_one(self) -> bool:
        return len(self._usable) > 1 or self._seconds_without_place > 0.0

    @property
    def takes_more(self) -> bool:
        """Whether it adds places that join."""
        return self._joined is not None

    @property
    def can_take(self) -> bool:
        return any(future.done() for future in self._getting_slots.values())

    def take(self) -> TrialPlace | None:
        self._add_joined()
        for place in list(self._usable):
            if place in self._slots:
                continue
            if place not in self._getting_slots:
                self._getting_slots[place] = self._submit(place, partial(self._slot, place))
            if self._getting_slots[place].done() and self._has_slot(place):
                return place
        return None

    def _add_joined(self) -> None:
        """Add the places that have joined. Raises TrialLost after too long without any place."""
        while self._joined is not None and not self._joined.empty():
            place = self._joined.get()
            self._add(place)
            self._listener(PlaceJoined(device=place.name))
        if self._usable:
            self._none_since = None
            return
        now = time.monotonic()
        if self._none_since is None:
            self._none_since = now
        if now - self._none_since > self._seconds_without_place:
            raise TrialLost(
                f"no device has come back for {self._seconds_without_place:.0f} s",
                hint="run the same command again to continue",
            )

    def _has_slot(self, place: TrialPlace) -> bool:
        try:
            self._slots[place] = self._getting_slots.pop(place).result()
        except Stopped:
            raise
        except AutotuneError as error:
            self._leave_out(place, error)
            return False
        return True

    def _slot(self, place: TrialPlace) -> ExitStack:
        if place.prepare is not None:
            place.device = place.prepare()
            place.prepare = None
        with ExitStack() as line:
            lock = self._queues[place.queue or place.device.device]
            while not lock.acquire(timeout=POLL_SECONDS):
                if self._ending.is_set():
                    raise Stopped(
                        "the search has ended", hint="run the same command again to continue"
                    )
            line.callback(lock.release)
            with ExitStack() as held:
                _take_slot(place, held, listener=self._listener)
                return held.pop_all()
        raise AssertionError("a slot is waited for until there is one")

    def leave(self, place: TrialPlace) -> None:
        self._slots.pop(place).close()
        self._listener(PlaceIsFree(device=place.name))

    def begin(self, place: TrialPlace, work: Callable[[], Any]) -> None:
        self._works[place] = self._submit(place, work)

    def _submit(self, place: TrialPlace, work: Callable[[], Any]) -> Future[Any]:
        future = self._threads[place].submit(work)
        future.add_done_callback(lambda _: self._listener.wake())
        return future

    def wait(self, seconds: float) -> list[EndedWork]:
        deadline = time.monotonic() + seconds
        while not self._something_is_done() and time.monotonic() < deadline:
            self._listener.wait(deadline - time.monotonic())
        self._listener.deliver()
        ended = [place for place, future in self._works.items() if future.done()]
        return [EndedWork(place=place, future=self._works.pop(place)) for place in ended]

    def _something_is_done(self) -> bool:
        return self.can_take or any(future.done() for future in self._works.values())

    def drop(self, place: TrialPlace) -> None:
        self.leave(place)
        self._end(place)

    def _end(self, place: TrialPlace) -> None:
        """Use a place no more; whatever it has on its device ends."""
        self._usable.remove(place)
        if place.executor is not self._first_executor:
            thread = self._threads.pop(place)
            thread.submit(place.executor.shutdown)
            thread.shutdown(wait=False)

    def keep_only(self, place: TrialPlace) -> None:
        self._joined = None
        self._usable = [place]
        for other, thread in self._threads.items():
            if other.executor not in (place.executor, self._first_executor):
                thread.submit(other.executor.shutdown)

    def _leave_out(self, place: TrialPlace, error: AutotuneError) -> None:
        if not self.can_lose_one:
            raise error
        self._end(place)
        self._listener(PlaceLeft(device=place.name, reason=error.message))

    def end_all(self) -> list[EndedWork]:
        self._ending.set()
        futures = [*self._works.values(), *self._getting_slots.values()]
        if not wait(futures, timeout=SECONDS_TO_END).not_done:
            self._ending.clear()  # what follows in this search uses the same executors
        self._listener.deliver()
        for future in self._getting_slots.values():
            if future.done() and future.exception() is None:
                future.result().close()
        self._getting_slots = {}
        ended = [EndedWork(place=place, future=future) for place, future in self._works.items()]
        self._works = {}
        for place in list(self._slots):
            self.leave(place)
        return ended
