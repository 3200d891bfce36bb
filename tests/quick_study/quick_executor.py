"""An executor without processes: every trial ends at once with what `stand_in.py` measures of it.

For proofs about the study itself, a hundred times quicker: it opens, prepares, claims, keeps and
ends as always.
"""

import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError, PredictionImpossible, TrialLost
from autotune.execution.in_turn import TimedInTurn, TrainingInTurn
from autotune.execution.local import LocalExecutor
from autotune.execution.server.limits import TimeLimits
from autotune.execution.tasks import (
    Examine,
    Identify,
    ModelSha256,
    Predict,
    Prepare,
    Prepared,
    Probe,
    Probed,
    Task,
    Trace,
    Train,
)
from autotune.shipped.device_name import cpu_name
from autotune.spec.attempt import FinishedTrial
from autotune.spec.config import TrainingConfig
from autotune.spec.confirmation import TimedBlock, TurnResult
from autotune.spec.examined import Examined
from autotune.spec.parity import NoTrace
from autotune.spec.result import DeviceInfo, Measurement
from autotune.spec.study import StudyDefinition
from tests.quick_study.stand_in import measurement_of

CPU = DeviceInfo(
    device="cpu",
    name=f"{cpu_name()}, a stand-in",
    total_memory_bytes=2**40,
    versions={"torch": "2"},
)


class QuickExecutor(LocalExecutor):
    """`lost`: so many of its first trials are lost by the machine's fault.

    `hangs`: trials end when cancelled only. `seconds`: what a trial takes on average.
    """

    def __init__(
        self,
        folder: Path,
        *,
        lost: int = 0,
        hangs: bool = False,
        seconds: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(folder, **options)
        self._lost, self._hangs, self._seconds = lost, hangs, seconds

    def probe(
        self, device: str | None, choices: object
    ) -> tuple[DeviceInfo, dict[str, dict[str, str]]]:
        return CPU, {}

    def measure_peaks(self, device: DeviceInfo, precisions: object, shape: object) -> DeviceInfo:
        return device

    def call(
        self, task: Task[Any], *, log_name: str | None = None, limits: TimeLimits | None = None
    ) -> "Future[Any]":
        match task:
            case Train():
                return self._train(task.training.config)
            case Predict():
                return _failed(PredictionImpossible("a stand-in has no model"))
            case Trace():
                return _done(
                    NoTrace(outcome="out_of_memory", message="a stand-in has no first steps")
                )
            case Prepare():
                task.folder.mkdir(parents=True)
                return _done(
                    Prepared(
                        text_sha256="0" * 64,
                        model_sha256="",
                        chat_column=None,
                        prompt_format=None,
                        parameters=1,
                    )
                )
            case Identify():
                return _done(CPU)
            case Probe():
                return _done(Probed(device=CPU, unavailable={}))
            case Examine():
                return _done(Examined(unavailable={}))
            case ModelSha256():
                return _done("")
        return _done(None)

    def _train(self, config: TrainingConfig) -> "Future[FinishedTrial]":
        finished: Future[FinishedTrial] = Future()
        if self._lost > 0:
            self._lost -= 1
            finished.set_exception(TrialLost("the trial's process was killed"))
        elif not self._hangs:
            end = FinishedTrial(measurement=measurement_of(config), seconds=self._seconds or 0.01)
            if self._seconds:
                pause = random.expovariate(1 / self._seconds)
                timer = threading.Timer(pause, _end, (finished, end))
                timer.daemon = True
                timer.start()
            else:
                finished.set_result(end)
        return finished

    def time_in_turn(
        self, definition: StudyDefinition, trainings: Sequence[TrainingInTurn], **options: Any
    ) -> TimedInTurn:
        results = []
        for training in trainings:
            measured = measurement_of(training.config)
            blocks: tuple[TimedBlock, ...] = ()
            if measured.tokens_per_second is not None:
                block = TimedBlock(seconds=1.0 / measured.tokens_per_second, tokens=1)
                blocks = (block,) * options["rounds"]
            results.append(
                TurnResult(
                    config=training.config,
                    outcome=measured.outcome,
                    message=measured.message or "",
                    blocks=blocks,
                )
            )
        return TimedInTurn(schedule="in turn", results=tuple(results))

    def cancel(self, future: "Future[Any]") -> None:
        _end(future, FinishedTrial(measurement=Measurement(outcome="interrupted"), seconds=0.01))


def _done(value: Any) -> "Future[Any]":
    done: Future[Any] = Future()
    done.set_result(value)
    return done


def _failed(error: AutotuneError) -> "Future[Any]":
    failed: Future[Any] = Future()
    failed.set_exception(error)
    return failed


def _end(future: "Future[FinishedTrial]", finished: FinishedTrial) -> None:
    with suppress(InvalidStateError):  # it has ended, or was cancelled, just now
        future.set_result(finished)
