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

from autotune.errors import PredictionImpossible, TrialLost
from autotune.execution.in_turn import TimedInTurn, TrainingInTurn
from autotune.execution.local import LocalExecutor
from autotune.execution.server.client import Reply
from autotune.spec.attempt import FinishedTrial
from autotune.spec.config import TrainingConfig
from autotune.spec.confirmation import TimedBlock, TurnResult
from autotune.spec.parity import NoTrace
from autotune.spec.result import DeviceInfo, Measurement
from autotune.spec.study import StudyDefinition
from tests.quick_study.stand_in import measurement_of

CPU = DeviceInfo(device="cpu", name="a stand-in", total_memory_bytes=2**40, versions={"torch": "2"})


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

    def submit(
        self, definition: StudyDefinition, config: TrainingConfig, **_: Any
    ) -> "Future[FinishedTrial]":
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

    def cancel(self, future: "Future[FinishedTrial]") -> None:
        _end(future, FinishedTrial(measurement=Measurement(outcome="interrupted"), seconds=0.01))

    def submit_prediction(self, *_: Any, **__: Any) -> "Future[Reply]":
        impossible: Future[Reply] = Future()
        impossible.set_exception(PredictionImpossible("a stand-in has no model"))
        return impossible

    def trace(self, *_: Any, **__: Any) -> NoTrace:
        return NoTrace(outcome="out_of_memory", message="a stand-in has no first steps")

    def _call(
        self, task: str, payload: dict[str, Any], *, environment: dict[str, str] | None = None
    ) -> Any:
        if task == "prepare":
            Path(payload["folder"]).mkdir(parents=True)
            return {
                "text_sha256": "0" * 64,
                "model_sha256": "",
                "chat_column": None,
                "parameters": 1,
            }
        return {"examine": {"unavailable": {}}, "model_sha256": ""}.get(task)


def _end(future: "Future[FinishedTrial]", finished: FinishedTrial) -> None:
    with suppress(InvalidStateError):  # it has ended, or was cancelled, just now
        future.set_result(finished)
