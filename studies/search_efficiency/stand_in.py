"""The executor of a study whose trainings are looked up or drawn, and never run."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autotune.execution.tasks import Task, Trace, Train
from autotune.spec.attempt import FinishedTrial
from autotune.spec.config import TrainingConfig
from autotune.spec.parity import ParityTrace
from autotune.spec.study import StudyDefinition
from autotune.spec.training_request import TrainingRequest


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
    """What `LocalExecutor` is to a study; a subclass has `train` and `trace`."""

    def train(self, training: TrainingRequest) -> "Future[FinishedTrial]":
        raise NotImplementedError

    def trace(self, config: TrainingConfig) -> ParityTrace:
        raise NotImplementedError

    def training(
        self, definition: StudyDefinition, config: TrainingConfig, *, enforce_cap: bool, **_: Any
    ) -> TrainingRequest:
        return training_of(definition, config, enforce_cap=enforce_cap)

    def call(self, task: Task[Any], **_: Any) -> "Future[Any]":
        assert isinstance(task, Train)
        return self.train(task.training)

    def run(self, task: Task[Any], **_: Any) -> Any:
        assert isinstance(task, Trace)
        return self.trace(task.training.config)

    @contextmanager
    def slot(self, device: object, **_: Any) -> Iterator[None]:
        """There is no device to share."""
        yield

    def cancel(self, future: "Future[Any]") -> None:
        raise AssertionError("nothing runs in a replay")
