"""Places in virtual time: the recorded table searched as by many devices at once.

A work runs as soon as it begins, at the cost that was recorded, and ends when the clock has reached
that moment: until then nobody sees its result. What places share of the disk, compiled programs and
the first steps of plain trainings, is there for the works that begin after it was written.
"""

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from autotune.spec.config import TrainingConfig
from autotune.spec.parity import ParityTrace
from autotune.spec.prediction import Forecast
from autotune.spec.result import DeviceInfo
from autotune.study.running.places import EndedWork, TrialPlace
from studies.search_efficiency.table import ReplayExecutor, Table


class VirtualDevice(Protocol):
    """One device: an executor with a clock of its own."""

    seconds: float
    compiled: set[Any]
    """The programs that are compiled."""
    traced_at: Mapping[str, float]
    """When it ended each trace, by the configuration's fingerprint."""

    def forecast(self, config: TrainingConfig) -> Forecast:
        """Predict a configuration."""


class RecordedDevice(ReplayExecutor):
    """A device that replays a recorded table."""

    def __init__(self, table: Table, *, seed: int) -> None:
        super().__init__(table, seed=seed)
        self.traced_at: dict[str, float] = {}

    def trace(self, config: TrainingConfig) -> ParityTrace:
        trace = super().trace(config)
        self.traced_at[config.fingerprint] = self.seconds
        return trace


def recorded_places(table: Table, *, count: int, seed: int, folder: Path) -> "VirtualPlaces":
    """Returns `count` devices that replay `table`; `folder` is the study's."""

    def seconds_of_cache(program: Any) -> float:
        first, from_cache = table.program_seconds[program]
        return first - from_cache

    return VirtualPlaces(
        [RecordedDevice(table, seed=seed) for _ in range(count)],
        device=table.device,
        seconds_of_cache=seconds_of_cache,
        folder=folder,
    )


class VirtualPlaces:
    """The places of a search; `folder` is the study's.

    `seconds_of_cache` is what a program spares that is compiled already.
    """

    def __init__(
        self,
        executors: Sequence[Any],  # of VirtualDevice and LocalExecutor at once
        *,
        device: DeviceInfo,
        seconds_of_cache: Callable[[Any], float],
        folder: Path,
    ) -> None:
        self.seconds = 0.0
        """The time on the clock of all devices."""
        self.seconds_at_work = 0.0
        """Summed over the devices."""
        self._count = len(executors)
        self.usable = self._count
        """At most so many devices begin works."""
        self.seconds_compiling_again = 0.0
        """Summed over the devices: spent on programs that another device was compiling."""
        self.executors = executors
        self._free = []
        for executor in self.executors:
            self._free.append(
                TrialPlace(
                    executor=executor,
                    device=device,
                    predict=executor.forecast,
                    clock=partial(getattr, executor, "seconds"),
                )
            )
        self.first = self._free[0]
        self.can_lose_one = self._count > 1
        self.can_take = False
        self._folder = folder / "parity"
        self._running: list[tuple[float, int, EndedWork]] = []
        self._order = itertools.count()
        self._seconds_of_cache = seconds_of_cache
        self._programs: dict[Any, float] = {}
        """When each program was compiled first."""
        self._traces: dict[str, tuple[float, bytes]] = {}
        """When each file of a trace was written first, and its content."""

    def clock(self) -> float:
        return self.seconds

    def take(self) -> TrialPlace | None:
        is_usable = self._count - len(self._free) < self.usable
        return self._free.pop(0) if self._free and is_usable else None

    def leave(self, place: TrialPlace) -> None:
        self._free.append(place)

    def begin(self, place: TrialPlace, work: Callable[[], Any]) -> None:
        executor: Any = place.executor
        executor.seconds = self.seconds
        known = {name for name, at in self._programs.items() if at <= self.seconds}
        executor.compiled = set(known)
        self._show_traces()
        future: Future[Any] = Future()
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        for program in executor.compiled - known:
            if program in self._programs:
                self.seconds_compiling_again += self._seconds_of_cache(program)
            at = self._programs.get(program, executor.seconds)
            self._programs[program] = min(at, executor.seconds)
        self._note_traces(executor)
        self.seconds_at_work += executor.seconds - self.seconds
        ended = EndedWork(place=place, future=future)
        heapq.heappush(self._running, (executor.seconds, next(self._order), ended))

    def _show_traces(self) -> None:
        """Leave the traces in the folder that were written by now, and no others."""
        for name, (at, content) in self._traces.items():
            if at <= self.seconds:
                (self._folder / name).write_bytes(content)
            else:
                (self._folder / name).unlink(missing_ok=True)

    def _note_traces(self, executor: VirtualDevice) -> None:
        for file in self._folder.glob("*.json"):
            at = executor.traced_at.get(file.stem)
            if at is not None:
                earlier = self._traces.get(file.name, (at, b""))[0]
                self._traces[file.name] = min(at, earlier), file.read_bytes()

    def wait(self, seconds: float) -> list[EndedWork]:
        """Let time pass until the next work ends; none where `seconds` is 0."""
        if self._running and seconds > 0:
            self.seconds = max(self.seconds, self._running[0][0])
        elif not self._running:
            self.seconds += seconds
        ended = []
        while self._running and self._running[0][0] <= self.seconds:
            ended.append(heapq.heappop(self._running)[2])
        return ended

    def drop(self, place: TrialPlace) -> None:
        raise AssertionError("no device is lost in a replay")

    def end_all(self) -> list[EndedWork]:
        for ends_at, _, _ in self._running:
            self.seconds_at_work -= ends_at - self.seconds
        self._running = []
        return []
