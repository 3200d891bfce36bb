"""The executor of a study whose trainings are looked up or drawn, and never run."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TypeVar

from autotune.execution.flow import Flow
from autotune.execution.tasks import Task, Trace, Train
from autotune.spec.attempt import FinishedTrial
from autotune.spec.config import TrainingConfig
from autotune.spec.parity import ParityTrace
from autotune.spec.prediction import Forecast
from autotune.spec.result import DeviceInfo
from autotune.spec.study import StudyDefinition
from autotune.spec.training_request import TrainingRequest

T = TypeVar("T")

TIMED_PARTS = ("training", "evaluation")
"""Parts of a training, while which what needs the host only stands still."""


class TakesTime(Protocol):
    """Has what an executor does take its time on a clock that it shares with others."""

    def __call__(self, executor: Any, work: Callable[[], T], *, rests: bool = False) -> Flow[T]:
        """Returns what a work returns, once it has ended.

        One that `rests` needs the host only, and stands still while a training is timed.
        """


def at_once(executor: Any, work: Callable[[], T], *, rests: bool = False) -> Flow[T]:
    """Returns what a work returns; the executor's own clock is the only one."""
    return work()
    yield


def training_of(
    definition: StudyDefinition, config: TrainingConfig, **options: Any
) -> TrainingRequest:
    """Returns what a training of `config` is to do; `options` are further fields."""
    return TrainingRequest(
        workload=definition.workload,
        config=config,
        folder=Path("prepared"),
        device=definition.device.device,
        cap_bytes=definition.cap_bytes,
        **options,
    )


class StandInExecutor:
    """What `LocalExecutor` is to a study; a subclass has `train`, `trace` and `forecast`."""

    other_devices: tuple[DeviceInfo, ...] = ()
    takes_time: TakesTime = staticmethod(at_once)

    def train(self, training: TrainingRequest) -> FinishedTrial:
        raise NotImplementedError

    def trace(self, config: TrainingConfig) -> ParityTrace:
        raise NotImplementedError

    def forecast(self, config: TrainingConfig) -> Forecast:
        raise NotImplementedError

    def training(
        self, definition: StudyDefinition, config: TrainingConfig, *, enforce_cap: bool, **_: Any
    ) -> TrainingRequest:
        return training_of(definition, config, enforce_cap=enforce_cap)

    def perform(self, task: Task[Any], **_: Any) -> Flow[Any]:
        match task:
            case Train():
                return self.takes_time(self, lambda: self.train(task.training))
            case Trace():
                return self.takes_time(self, lambda: self.trace(task.training.config))
        raise AssertionError(f"a study does not ask for {task}")

    def predict(self, config: TrainingConfig) -> Flow[Forecast]:
        return self.takes_time(self, lambda: self.forecast(config), rests=True)

    def take_slot(self, device: object, **_: Any) -> Flow[ExitStack]:
        """There is no device to share."""
        return ExitStack()
        yield

    def checking_device(self, device: str) -> Flow[None]:
        """After a crash: the device works."""
        return
        yield

    def shutdown(self) -> None:
        """There is nothing to end."""


class VirtualDevice(StandInExecutor):
    """A device on which no time passes but what it says that it spends."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """The time on its clock."""
        self.seconds_by_part: dict[str, float] = defaultdict(float)
        self.timed: list[tuple[float, float]] = []
        """When a training was timed, from and until, in order."""

    def clock(self) -> float:
        return self.seconds

    def spend(self, part: str, seconds: float) -> None:
        """Let the device, and with it the search, be busy for so long."""
        if part in TIMED_PARTS:
            self.timed.append((self.seconds, self.seconds + seconds))
        self.seconds += seconds
        self.seconds_by_part[part] += seconds
