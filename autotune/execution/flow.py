"""Flows: work that reads from top to bottom, and waits by yielding a future.

    def flow():
        with (yield from executor.take_slot(device)):   # another flow, with a result
            trace = yield executor.call(Trace(...))     # the result of a task, or its error

To call a flow only makes it: `yield from` runs it and is its result, and `yield` waits for a
future. One thread drives any number of them (`Flows`, or `run` and `result_of`, which wait for
their ends), each from one future to the next, so that nothing that they share needs a lock. When
they are ended, what a future has found is not lost: that flow goes on until it waits again, and
only then, as the others at once, gets `Ended`.

A flow is a generator (PEP 342, PEP 380) and not a coroutine of asyncio: a notebook has a loop that
runs already, and a replay has a time of its own.
"""

import time
from collections.abc import Callable, Collection, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

Flow = Generator[Future[Any], Any, T]
"""Yields futures, is sent their results or has their errors thrown in, and returns a T."""

WaitForOne = Callable[[Collection[Future[Any]], float], None]
"""Waits until one of the futures is done, but at most so many seconds."""

POLL_SECONDS = 0.1
"""How often a wait looks whether it should end."""
SECONDS_TO_END = 6.0
"""How long flows may wait while they clean up; then they get `Ended` again."""


class Ended(BaseException):
    """Is thrown into a flow that waits when all are ended; a flow that catches it goes on."""


class Pause(Future[None]):
    """Is done after so many seconds of `clock`, or as soon as `unless` is."""

    def __init__(
        self,
        seconds: float,
        *,
        unless: Future[Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.until = clock() + seconds
        self.unless = unless
        self._clock = clock

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.until - self._clock())

    def done(self) -> bool:
        is_over = self.unless is not None and self.unless.done()
        if not super().done() and (is_over or self.seconds_left == 0.0):
            self.set_result(None)
        return super().done()


def wait_for_one(futures: Collection[Future[Any]], seconds: float) -> None:
    """Waits as a `WaitForOne`, in real time."""
    awaited = []
    for future in futures:
        if isinstance(future, Pause):
            seconds = min(seconds, future.seconds_left)
            if future.unless is not None:
                awaited.append(future.unless)
        else:
            awaited.append(future)
    if not any(future.done() for future in awaited):
        if awaited:
            wait(awaited, timeout=seconds, return_when=FIRST_COMPLETED)
        else:
            time.sleep(seconds)


class Flows:
    """Drives flows that run at the same time, in the thread that calls it."""

    def __init__(self, wait_for_one: WaitForOne = wait_for_one) -> None:
        self._wait_for_one = wait_for_one
        self._awaited: dict[Flow[None], Future[Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._awaited)

    def begin(self, flow: Flow[None]) -> None:
        """Runs a flow to its first future."""
        self._resume(flow, partial(flow.send, None))

    def wait(self, seconds: float) -> None:
        """Waits at most so long for the first future, and lets every flow go on whose is done.

        Raises what a flow raises; that one has ended, and the others wait as before.
        """
        self._wait_for_one(self._awaited.values(), seconds)
        for flow in [flow for flow, future in self._awaited.items() if future.done()]:
            self._go_on(flow)

    def settle(self, future: Future[T], result: T) -> None:
        """Gives a future its result, and lets the flow go on that waits for it, at once."""
        future.set_result(result)
        for flow in [flow for flow, awaited in self._awaited.items() if awaited is future]:
            self._go_on(flow)

    def end(self) -> None:
        """Ends all flows: one whose future is done goes on, and `Ended` is thrown into the others.

        None is ever closed: it may wait while it cleans up, for `SECONDS_TO_END`. Raises what a
        flow raises otherwise, once all have ended.
        """
        raised: BaseException | None = None
        has_result = {flow for flow, future in self._awaited.items() if future.done()}
        told: set[Flow[None]] = set()
        ends_at = time.monotonic() + SECONDS_TO_END
        while self._awaited:
            for flow, future in list(self._awaited.items()):
                try:
                    if flow in has_result or (flow in told and future.done()):
                        has_result.discard(flow)
                        told.discard(flow)
                        self._go_on(flow)
                    elif flow not in told or time.monotonic() >= ends_at:
                        told.add(flow)
                        self._resume(flow, partial(flow.throw, Ended()))
                except Ended:
                    pass
                except BaseException as error:
                    raised = error
            if self._awaited:
                self._wait_for_one(self._awaited.values(), POLL_SECONDS)
        if raised is not None:
            raise raised

    def _go_on(self, flow: Flow[None]) -> None:
        future = self._awaited[flow]
        error = CancelledError() if future.cancelled() else future.exception()
        if error is not None:
            self._resume(flow, partial(flow.throw, error))
        else:
            self._resume(flow, partial(flow.send, future.result()))

    def _resume(self, flow: Flow[None], resume: Callable[[], Future[Any]]) -> None:
        self._awaited.pop(flow, None)
        try:
            self._awaited[flow] = resume()
        except StopIteration:
            pass


def run(works: Iterable[Flow[None]], *, each: Callable[[], None] = lambda: None) -> None:
    """Runs flows to their ends, and calls `each` while they wait. An error of one ends all."""
    flows = Flows()
    try:
        for work in works:
            flows.begin(work)
        while flows:
            each()
            flows.wait(POLL_SECONDS)
    except BaseException:
        flows.end()
        raise


def result_of(flow: Flow[T], *, each: Callable[[], None] = lambda: None) -> T:
    """Returns the result of one flow, as `run`."""
    found: list[T] = []

    def keep() -> Flow[None]:
        found.append((yield from flow))

    run([keep()], each=each)
    return found[0]
