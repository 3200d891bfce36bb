"""Places in virtual time: a recorded table searched as by many devices at once.

What a device does is computed when it begins, at the cost that was recorded, and ends when the
clock has reached that moment: until then nobody sees its result. Programs that another device has
compiled are there for what begins after it.
"""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from autotune.execution.flow import Flow, Pause
from autotune.spec.result import DeviceInfo
from autotune.study.events import Listener
from autotune.study.running.places import Places, ThreadedListener, TrialPlace
from studies.search_efficiency.table import ReplayExecutor, Table

T = TypeVar("T")


class _Work(Future[Any]):
    """Ends at a moment in virtual time."""

    ends_at: float

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.at_end = result


class _OnDevice(_Work):
    """What a device does."""

    def __init__(self, ends_at: float, result: Any) -> None:
        super().__init__(result)
        self.ends_at = ends_at


class _Beside(_Work):
    """What a host does beside its device, except while a training on the device is timed.

    When it ends is known as far as it is known what the device will do.
    """

    def __init__(self, began_at: float, seconds: float, result: Any, *, device: Any) -> None:
        super().__init__(result)
        self._began_at = began_at
        self._seconds = seconds
        self._device = device

    @property
    def ends_at(self) -> float:
        ends_at = self._began_at + self._seconds
        for timed_from, until in self._device.timed:
            if until > self._began_at and timed_from < ends_at:
                ends_at += until - max(timed_from, self._began_at)
        return ends_at


def recorded_devices(
    table: Table, *, count: int, seed: int, predictions_beside: int = 0
) -> "VirtualTime":
    """Returns `count` devices that replay `table`."""

    def seconds_of_cache(program: Any) -> float:
        first, from_cache = table.program_seconds[program]
        return first - from_cache

    executors = [ReplayExecutor(table, seed=seed) for _ in range(count)]
    return VirtualTime(
        executors, seconds_of_cache=seconds_of_cache, predictions_beside=predictions_beside
    )


class VirtualTime:
    """The clock of devices; each has `seconds` of its own, and the programs that are `compiled`.

    `seconds_of_cache` is what a program spares that is compiled already.
    """

    def __init__(
        self,
        executors: Sequence[Any],  # VirtualDevices
        *,
        seconds_of_cache: Callable[[Any], float],
        predictions_beside: int = 0,
    ) -> None:
        self._predictions_beside = predictions_beside
        self.seconds = 0.0
        """The time on the clock of all devices."""
        self.seconds_at_work = 0.0
        """Summed over the devices; a prediction counts where its device has nothing else to do."""
        self.usable = len(executors)
        """At most so many devices have a slot at a time."""
        self.seconds_compiling_again = 0.0
        """Summed over the devices: spent on programs that another device was compiling."""
        self.executors = executors
        self._taken = 0
        self._seconds_of_cache = seconds_of_cache
        self._programs: dict[Any, float] = {}
        """When each program was compiled first."""

    def clock(self) -> float:
        return self.seconds

    def places(self, device: DeviceInfo, *, listener: Listener) -> Places:
        """Returns a place for each device."""
        places = []
        for executor in self.executors:
            executor.takes_time = self._work
            executor.take_slot = self._take_slot
            places.append(
                TrialPlace(
                    executor=executor,
                    device=device,
                    predict=executor.predict,
                    predictions_beside=self._predictions_beside,
                    clock=partial(self._clock_at, executor),
                )
            )
        return Places(places, listener=ThreadedListener(listener), wait_for_one=self.wait_for_one)

    def _clock_at(self, executor: Any) -> float:
        """Returns the time at a place, whose device may be ahead of what the others know."""
        return max(self.seconds, executor.seconds)

    def _take_slot(self, device: object, **_: Any) -> Flow[ExitStack]:
        while self._taken >= self.usable:
            yield Pause(1.0, clock=self.clock)
        self._taken += 1
        with ExitStack() as slot:
            slot.callback(self._leave_slot)
            return slot.pop_all()

    def _leave_slot(self) -> None:
        self._taken -= 1

    def _work(self, executor: Any, work: Callable[[], T], *, rests: bool = False) -> Flow[T]:
        if rests:
            return (yield self._beside(executor, work))
        executor.seconds = self.seconds
        known = {name for name, at in self._programs.items() if at <= self.seconds}
        executor.compiled = set(known)
        result = work()
        for program in executor.compiled - known:
            if program in self._programs:
                self.seconds_compiling_again += self._seconds_of_cache(program)
            at = self._programs.get(program, executor.seconds)
            self._programs[program] = min(at, executor.seconds)
        self.seconds_at_work += executor.seconds - self.seconds
        ended = _OnDevice(executor.seconds, result)
        try:
            return (yield ended)
        except BaseException:
            self.seconds_at_work -= executor.seconds - self.seconds
            raise

    def _beside(self, executor: Any, work: Callable[[], Any]) -> Future[Any]:
        device_ends_at = executor.seconds
        result = work()
        seconds = executor.seconds - device_ends_at
        executor.seconds = device_ends_at
        if device_ends_at <= self.seconds:
            self.seconds_at_work += seconds
        return _Beside(self.seconds, seconds, result, device=executor)

    def wait_for_one(self, futures: Collection[Future[Any]], seconds: float) -> None:
        """Let time pass until the next work ends; none where `seconds` is 0."""
        ends = [future.ends_at for future in futures if isinstance(future, _Work)]
        ends += [future.until for future in futures if isinstance(future, Pause)]
        if seconds > 0 and not any(future.done() for future in futures):
            self.seconds = max(self.seconds, min(ends, default=self.seconds + seconds))
        for future in futures:
            if isinstance(future, _Work) and future.ends_at <= self.seconds:
                future.set_result(future.at_end)
