"""Places: where the trials of a search run, one at a time on each, and several at once.

A place is a slot of a device with what runs trials there. The main loop (`loop.py`) has a flow for
each, in one thread, which alone chooses, claims, stores and speaks to the listener.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from queue import SimpleQueue

from autotune.errors import AutotuneError, Stopped, TrialLost
from autotune.execution.flow import POLL_SECONDS, Flow, Pause, WaitForOne, wait_for_one
from autotune.execution.local import LocalExecutor
from autotune.spec.device_group import joint_name
from autotune.spec.result import DeviceInfo
from autotune.study.events import (
    Event,
    Listener,
    PlaceIsFree,
    PlaceJoined,
    PlaceLeft,
    WaitingForDevice,
)
from autotune.study.prediction.prediction_cache import Predictor
from autotune.system.failpoints import failpoint

_MOST_THREADS = 1000
"""For what blocks: places that are prepared, and executors that are shut down, at a time."""


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
    predict: Predictor | None = None
    """Predicts in a process of this place; None: the prediction cache does as it always does."""
    predictions_beside: int = 0
    """How many configurations are predicted at a time while a trial runs here."""
    prepare: Callable[[], DeviceInfo] | None = None
    """Starts the trial server and finds out about the device, once, in a thread of its own, before
    the first slot."""
    queue: str = ""
    """Places of one queue wait for their slots one after another; empty: those of a device do."""
    is_lost: Callable[[], bool] = lambda: False
    """Whether what runs trials here has ended for good, as with the node of a cluster."""
    clock: Callable[[], float] = time.monotonic


class PlaceUnusable(Exception):
    """A place cannot be used; `reason` is what it raised."""

    def __init__(self, reason: AutotuneError) -> None:
        super().__init__(reason.message)
        self.reason = reason


class ThreadedListener:
    """A listener for events from any thread, which the thread that made it hands on."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._thread = threading.get_ident()
        self._waiting: SimpleQueue[Event] = SimpleQueue()

    def __call__(self, event: Event) -> None:
        if threading.get_ident() == self._thread:
            self.deliver()
            self._listener(event)
        else:
            self._waiting.put(event)

    def deliver(self) -> None:
        """Hand on the events of the other threads."""
        while not self._waiting.empty():
            self._listener(self._waiting.get())


class Places:
    """The places of one search. Use it as a context manager around the search's work.

    Executors except that of the first place are shut down at the end. A place that cannot be used
    is left out with a notice; the last one raises, after `seconds_without_place` in which none has
    `joined`. `ending` is set at the end: whatever waits in another thread looks at it.
    """

    def __init__(
        self,
        places: Sequence[TrialPlace],
        *,
        listener: ThreadedListener,
        ending: threading.Event | None = None,
        joined: "SimpleQueue[TrialPlace] | None" = None,
        seconds_without_place: float = 0.0,
        wait_for_one: WaitForOne = wait_for_one,
    ) -> None:
        self.usable = list(places)
        self.wait_for_one = wait_for_one
        self._listener = listener
        self._ending = ending or threading.Event()
        self._joined = joined
        self._seconds_without_place = seconds_without_place
        self._none_since: float | None = None
        self._first_executor = places[0].executor
        self._in_line: dict[str, TrialPlace] = {}
        """The place of each queue that waits for its slot; if others did, too, they would seem to
        wait for another search."""
        self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="places")

    def __enter__(self) -> "Places":
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for place in self.usable:
            self._shut_down(place)
        self._threads.shutdown()
        self._listener.deliver()

    def _shut_down(self, place: TrialPlace) -> None:
        if place.executor is not self._first_executor:
            self._threads.submit(place.executor.shutdown)

    @property
    def first(self) -> TrialPlace:
        """The first usable place, where the noise of a device and the finalists are measured."""
        if not self.usable:
            raise TrialLost(
                "no device is left to measure on", hint="run the same command again to continue"
            )
        known = (place for place in self.usable if place.prepare is None)
        return next(known, self.usable[0])

    def deliver(self) -> None:
        """Hand on what other threads have said."""
        self._listener.deliver()

    @property
    def takes_more(self) -> bool:
        """Whether it adds places that join."""
        return self._joined is not None

    def newly_joined(self) -> Iterator[TrialPlace]:
        """Add the places that have joined. Raises TrialLost after too long without any place."""
        while self._joined is not None and not self._joined.empty():
            place = self._joined.get()
            self.usable.append(place)
            self._listener(PlaceJoined(device=place.name))
            yield place
        if self.usable:
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

    def slot(self, place: TrialPlace) -> Flow[ExitStack]:
        """Returns the device slot of a place, once the place has it; raises PlaceUnusable.

        The first time, the place is prepared.
        """
        try:
            if place.prepare is not None:
                place.device = yield self._threads.submit(place.prepare)
                place.prepare = None
            return (yield from self._slot(place))
        except Stopped:
            raise
        except AutotuneError as error:
            raise PlaceUnusable(error) from error

    def _slot(self, place: TrialPlace) -> Flow[ExitStack]:
        def report_wait(holder: str) -> None:
            device = joint_name((place.device, *place.executor.other_devices))
            self._listener(WaitingForDevice(device=device, holder=holder, place=place.name))

        queue = place.queue or place.device.device
        while queue in self._in_line:
            yield Pause(POLL_SECONDS)
        self._in_line[queue] = place
        try:
            taken = yield from place.executor.take_slot(
                place.device, places=place.trials_on_device, on_wait=report_wait
            )
        finally:
            del self._in_line[queue]
        with ExitStack() as slot:
            if place.name:
                slot.callback(self._listener, PlaceIsFree(device=place.name))
            slot.enter_context(taken)
            failpoint("device taken")
            return slot.pop_all()

    def lose(self, place: TrialPlace, reason: AutotuneError) -> None:
        """Use a place no more; whatever it has on its device ends. Raises where it is the last."""
        if len(self.usable) == 1 and self._seconds_without_place == 0.0:
            raise reason
        self.usable.remove(place)
        self._shut_down(place)
        self._listener(PlaceLeft(device=place.name, reason=reason.message))

    def keep_only(self, place: TrialPlace) -> None:
        """Give up the other places, once no work is left to begin on them."""
        self._joined = None
        for other in self.usable:
            if other.executor is not place.executor:
                self._shut_down(other)
        self.usable = [place]
