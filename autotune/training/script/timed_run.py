"""Times the steps of a user's training script, from one report to the next."""

import functools
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from autotune.errors import StudyMismatch
from autotune.spec.result import Measurement
from autotune.spec.terms import Counted
from autotune.spec.training_request import ReportsStage, TrainingRequest
from autotune.techniques.user_optimizer import all_optimizers, held_optimizers
from autotune.techniques.user_training import Optimizers
from autotune.training.script.run import ScriptEnd, WatchedRun
from autotune.training.speed import StepEnd, TimedStep, copied_to_host, make_clock
from autotune.training.step import Diverged

_HOW_TO_REPORT = (
    "after each optimizer step it must call autotune.report(tokens=..., loss=...), or rows=..."
)


@dataclass(frozen=True, kw_only=True)
class Step(TimedStep):
    """One optimizer step as it was reported."""

    number: int
    """Counted from 1."""
    evaluation_loss: float | None
    is_evaluated_after_update: bool
    """Whether the evaluation used the weights after this step's update."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report of a step that a CUDA device may not have finished."""

    number: int
    tokens: int
    wait: StepEnd
    evaluation_loss: Tensor | float | None
    is_evaluated_after_update: bool
    parity_seconds: float
    """Time spent in the step on reading for the parity check."""


class TimedRun(WatchedRun, ABC):
    """A run of the script that is told of each step, with the time that it took.

    On CUDA the device must have its context before.
    """

    def __init__(self, request: TrainingRequest, *, progress: ReportsStage) -> None:
        super().__init__(request, progress=progress)
        self.counted: Counted = "tokens"
        """What the reports count."""
        self._has_ended = False
        self._updates = 0
        self._updates_evaluated: int | None = None
        """Number of updates before the model last changed to evaluation mode; None: never."""
        self._model: nn.Module | None = None
        self._optimizers: tuple[Optimizer, ...] = ()
        self._stepping: set[Optimizer] = set()
        """These and the optimizers that they hold."""
        self._startup_seconds = 0.0
        self._clock = make_clock(self._device)
        self._reports = 0
        self._last_step = 0
        """How many steps the run has; 0 where that is not known."""
        self._unfinished: deque[Report] = deque()
        """Reports of steps that the device may not have finished."""
        self._parity_seconds = 0.0
        """Time spent on reading for the parity check until the clock was last restarted or a step
        ended."""

    # -- what the script calls ---------------------------------------------------------------------

    def apply(self, model: nn.Module, optimizer: Optimizers) -> tuple[nn.Module, Optimizers]:
        try:
            self._model, optimizer = self.apply_and_watch(model, optimizer)
        except ScriptEnd:
            self._has_ended = True
            raise
        self._optimizers = all_optimizers(optimizer)
        for one in self._optimizers:
            self._stepping.update([one, *held_optimizers(one)])
        register_optimizer_step_post_hook(self._count_update)
        _watch_mode(self._model, self._note_mode)
        self._startup_seconds = time.monotonic() - self._request.requested_at
        self._restart_clock()
        return self._model, optimizer

    def report(
        self, *, tokens: int | None, rows: int | None, loss: Any, evaluation_loss: Any
    ) -> None:
        if self._has_ended:  # the script goes on in a `finally`, or has caught its end
            raise ScriptEnd
        try:
            self.counted, count = self._counted_in(tokens=tokens, rows=rows)
            self._process(tokens=count, loss=loss, evaluation_loss=evaluation_loss)
        except ScriptEnd:
            self._has_ended = True
            raise
        except Exception as error:  # not an error of the script: its handlers must not see it
            self._has_ended = True
            raise ScriptEnd(error) from None

    def _process(self, *, tokens: int, loss: Any, evaluation_loss: Any) -> None:
        self._unfinished.append(self._make_report(tokens, loss, evaluation_loss))
        self.watch_next_step()
        self._progress("step", self._reports, self._last_step)
        self._step_ended()
        if not self._unfinished:
            self._restart_clock()  # the time spent here does not belong to the next step

    def _restart_clock(self) -> None:
        """Times the next step from now on: what was read before it is no part of it."""
        self._clock.restart()
        self._parity_seconds = 0.0 if self.parity is None else self.parity.seconds

    @abstractmethod
    def _step_ended(self) -> None:
        """Is called at every report.

        Raises ScriptEnd after the last step, and also any error that ends the run.
        """

    def _end(self) -> None:
        self._has_ended = True
        raise ScriptEnd

    def _count_update(self, stepping: Optimizer, *_: Any) -> None:
        if stepping in self._stepping:
            self._updates += 1

    def _note_mode(self, is_training: bool) -> None:
        if not is_training:
            self._updates_evaluated = self._updates

    # -- its steps ---------------------------------------------------------------------------------

    def _counted_in(self, *, tokens: int | None, rows: int | None) -> tuple[Counted, int]:
        """Returns what a report counts, and how many. Raises ValueError unless it is one of both.

        All reports of a run must count the same.
        """
        if (tokens is None) == (rows is None):
            raise ValueError(
                f"Invalid tokens={tokens!r}, rows={rows!r} in autotune.report. Give one of both: "
                "the tokens of the step or, for a model without tokens, its rows."
            )
        counted: Counted = "tokens" if rows is None else "rows"
        count = tokens if rows is None else rows
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(
                f"Invalid {counted}={count!r} in autotune.report. Give the number of {counted} of "
                "the step, a whole number of at least 1."
            )
        if self._reports and counted != self.counted:
            raise ValueError(
                f"Invalid {counted}={count!r} in autotune.report. The reports before have counted "
                f"{self.counted}: count the same in every step."
            )
        return counted, count

    def _make_report(self, tokens: int, loss: Any, evaluation_loss: Any) -> Report:
        wait = self._clock.step_ended(loss)
        self._reports += 1
        parity_seconds_before = self._parity_seconds
        self._parity_seconds = 0.0 if self.parity is None else self.parity.seconds
        return Report(
            number=self._reports,
            tokens=tokens,
            wait=wait,
            evaluation_loss=None if evaluation_loss is None else copied_to_host(evaluation_loss),
            is_evaluated_after_update=self._updates_evaluated in (None, self._updates),
            parity_seconds=self._parity_seconds - parity_seconds_before,
        )

    def _finished_steps(self, *, may_run_ahead: bool) -> Iterator[Step]:
        """Waits for the reported steps and yields those that were not yielded before.

        A CUDA device may run ahead: the last step is then not waited for, because after a wait the
        device is idle until the next step's first kernel arrives. With offloaded activations every
        step is waited for nevertheless: running a step ahead would pin their host memory again.
        """
        is_waited_for = self._device.type == "cpu" or self.config.activation_offload != "none"
        most_unfinished = 1 if may_run_ahead and not is_waited_for else 0
        while len(self._unfinished) > most_unfinished:
            step = self._wait_for_step(self._unfinished.popleft())
            # First: what only this configuration makes of a loss is not divergence.
            self.note(step.loss, tokens=step.tokens)
            if not math.isfinite(step.loss) or not math.isfinite(step.evaluation_loss or 0.0):
                raise ScriptEnd(Diverged(f"the loss became {step.loss} at step {step.number}"))
            yield step

    def _wait_for_step(self, report: Report) -> Step:
        seconds, loss = report.wait()
        evaluation_loss = None
        if report.evaluation_loss is not None:
            evaluation_loss = float(report.evaluation_loss)
        return Step(
            number=report.number,
            seconds=seconds - report.parity_seconds,
            tokens=report.tokens,
            loss=loss,
            evaluation_loss=evaluation_loss,
            is_evaluated_after_update=report.is_evaluated_after_update,
        )

    def measurement_of_early_end(self) -> Measurement:
        """Returns the measurement of a script that ended before its last step."""
        mismatch = self.mismatch_of_early_end()
        return Measurement(outcome="crashed", message=f"{mismatch.message}: {mismatch.hint}")

    def mismatch_of_early_end(self) -> StudyMismatch:
        """Returns the error for a script that ended before the last step of its study."""
        hint = f"let it go on, or search with --steps {self._reports}"
        if self._reports < self.workload.fewest_steps:
            hint = f"let it go on for at least {self.workload.fewest_steps} steps"
        if self._reports == 0:
            hint = _HOW_TO_REPORT
        return StudyMismatch(
            f"the script ended after {self._reports} of {self.workload.steps} steps", hint=hint
        )


def _watch_mode(model: nn.Module, note: Callable[[bool], None]) -> None:
    """Calls `note` at every `model.train()` and `model.eval()`.

    Patches the method of all modules, so that the model itself, which the script may copy, save and
    compile, is unchanged.
    """
    set_mode = nn.Module.train

    @functools.wraps(set_mode)
    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        if self is model:
            note(mode)
        return set_mode(self, mode)

    nn.Module.train = train  # type: ignore[assignment, method-assign]
