"""A user's training script as a trial: run in this process, measured from its reports.

The script keeps its loop. Its first `warmup_steps` reports warm up, the next ones bound the steps
whose memory is measured, the others are timed; with the report of the workload's last step the
script is ended. On a CPU it is ended after a few timed steps where its perplexity is shared; on
CUDA its own evaluation may set the peak of the device, so that it goes on to the end.

Evaluation belongs to the script, too. The perplexity is that of the evaluation loss that it reports
with its last step. Where there is none, or the model was put in evaluation mode last before that
step's update, it is that of the last training losses, and its source says so. A script that
evaluates without `model.eval()` is taken at its word.
"""

import functools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autotune.errors import InvalidInput
from autotune.memory.meter import resident_bytes
from autotune.memory.whole_run import make_whole_run_meter
from autotune.spec.config import TrainingConfig
from autotune.spec.early_stopping import SETTLED_STEPS, PruningBound, dominated_by
from autotune.spec.result import AFTER_STEP, NOT_AFTER_THE_LAST_STEP, Measurement, Outcome
from autotune.spec.training_request import Progress, TrainingRequest, unwatched
from autotune.spec.workload import MEMORY_STEPS, SHORT_TIMED_STEPS, Workload
from autotune.techniques import before_the_device
from autotune.techniques.pinned_memory import bound_pinned_memory, offloaded_bytes
from autotune.techniques.user_training import missing_in_user_model
from autotune.training.script.interface import begin
from autotune.training.script.run import (
    ScriptEnd,
    WatchedRun,
    choose_device,
    run_script,
    seed_everything,
)
from autotune.training.speed import StepEnd, TimedStep, copied_to_host, make_clock, measured_speed
from autotune.training.step import Diverged
from autotune.training.trainer import LARGEST_LOSS
from autotune.units import format_size

_HOW_TO_REPORT = "after each optimizer step it must call autotune.report(tokens=..., loss=...)"


@dataclass(frozen=True, kw_only=True)
class _Step(TimedStep):
    """One optimizer step as it was reported."""

    evaluation_loss: float | None
    is_evaluated_after_update: bool
    """Whether the evaluation was of the weights that this step has left."""


def train_script(request: TrainingRequest, *, progress: Progress = unwatched) -> Measurement:
    """Runs the workload's script as one trial. Raises Diverged and whatever the script raises."""
    before_the_device(request.config)
    device = torch.device(request.device)
    choose_device(device)
    if device.type == "cuda" and request.config.activation_offload != "none":
        bound_pinned_memory()
    seed_everything(request.workload.seed)
    trial = _ScriptTrial(request, device, progress=progress)
    begin(trial)
    ended = run_script(request.workload, expected_sha256=request.workload.model_sha256)
    return trial.measurement() if ended else trial.premature()


def examine_script(
    workload: Workload, choices: Mapping[str, Sequence[Any]], *, device: torch.device
) -> dict[str, dict[str, str]]:
    """Runs the script up to `autotune.apply`; returns what its model and optimizer cannot take.

    {technique: {value: reason}}. Raises InvalidInput for a script that does not get there.
    """
    choose_device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    examination = _Examination(workload, choices)
    begin(examination)
    try:
        run_script(workload, expected_sha256="")
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise InvalidInput(
            f"script {workload.script} fails before its first step: "
            f"{type(error).__name__}{': ' + lines[0] if lines else ''}",
            hint=f"it must run by itself: python {workload.script}",
        ) from error
    if examination.missing is None:
        raise InvalidInput(
            f"script {workload.script} does not call autotune.apply before its first report or its end",
            hint="add `model, optimizer = autotune.apply(model, optimizer)` after both are made",
        )
    return examination.missing


class _Examination:
    """A run that ends where the script hands over its model and optimizer."""

    def __init__(self, workload: Workload, choices: Mapping[str, Sequence[Any]]) -> None:
        self.config = TrainingConfig(micro_batch_size=workload.global_batch)
        self.missing: dict[str, dict[str, str]] | None = None
        self._choices = choices

    def apply(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        self.missing = missing_in_user_model(model, optimizer, self._choices)
        raise ScriptEnd

    def report(self, *, tokens: int, loss: Any, evaluation_loss: Any) -> None:
        raise ScriptEnd


@dataclass(frozen=True, kw_only=True)
class _Report:
    """What the script has said of a step, which a CUDA device may not have finished."""

    number: int
    tokens: int
    wait: StepEnd
    evaluation_loss: Tensor | float | None
    is_evaluated_after_update: bool
    read_seconds: float
    """Spent in the step on reading gradients for the comparison of parity."""


class _ScriptTrial(WatchedRun):
    """One configuration, put to the test by the script's own steps."""

    def __init__(
        self, request: TrainingRequest, device: torch.device, *, progress: Progress
    ) -> None:
        super().__init__(request, progress=progress)
        self._steps: list[_Step] = []
        self._has_ended = False
        self._last_step = request.workload.steps
        if request.shares_perplexity and device.type == "cpu":
            short = request.workload.warmup_steps + MEMORY_STEPS + SHORT_TIMED_STEPS
            self._last_step = min(self._last_step, short)
        self._rival: PruningBound | None = None
        self._updates = 0
        self._updates_evaluated: int | None = None
        """After how many updates the model was put in evaluation mode last; None: it never was."""
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        began = time.monotonic()
        cap_bytes = request.cap_bytes if request.enforce_cap else None
        self._meter = make_whole_run_meter(
            device,
            uuid=request.device_uuid,
            cap_bytes=cap_bytes,
            new_context_bytes=request.new_context_bytes,
            shares_device=request.shares_device,
        )
        self._device_startup_seconds = time.monotonic() - began
        self._startup_seconds = 0.0
        self._clock = make_clock(device)
        self._reports = 0
        self._unfinished = deque[_Report]()
        """Of steps that the device may not have finished."""
        self._read_seconds = 0.0

    # -- what the script calls ---------------------------------------------------------------------

    def apply(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        self._model, self._optimizer = self.apply_and_watch(model, optimizer)
        self._optimizer.register_step_post_hook(self._count_update)
        _watch_mode(self._model, self._note_mode)
        self._startup_seconds = time.monotonic() - self._request.requested_at
        self._clock.restart()
        return self._model, self._optimizer

    def report(self, *, tokens: int, loss: Any, evaluation_loss: Any) -> None:
        if self._has_ended:  # the script reports from a `finally`, on its way out
            return
        try:
            self._take(tokens=tokens, loss=loss, evaluation_loss=evaluation_loss)
        except ScriptEnd:
            self._has_ended = True
            raise
        except Exception as error:  # no error of the script's, whose own handlers must not see it
            self._has_ended = True
            raise ScriptEnd(error) from None

    def _take(self, *, tokens: int, loss: Any, evaluation_loss: Any) -> None:
        """Takes the report of one step.

        Raises ScriptEnd with the last one, and what ends the trial as an error.
        """
        self._unfinished.append(self._report_of_step(tokens, loss, evaluation_loss))
        self.watch_next_step()
        self._progress("step")
        while len(self._unfinished) > self._most_unfinished:
            self._steps.append(self._finished(self._unfinished.popleft()))
            self.note(self._steps[-1].loss, tokens=self._steps[-1].tokens)
            if self._is_dominated():
                self._end()
        done, steady_from = self._reports, self._workload.warmup_steps
        if done == 1:
            self._meter.kernels_have_run()
        if done == steady_from:
            self._meter.begin()
        if done == steady_from + MEMORY_STEPS:
            self._meter.end()
            if self._is_over_cap:
                self._end()  # nothing that follows could bring it back under the cap
        if done == self._last_step:
            self._end()
        if not self._unfinished:
            self._clock.restart()  # what was done here is no part of the next step

    @property
    def _most_unfinished(self) -> int:
        """How many steps the script may go on without their having ended: one among the timed steps on CUDA.

        A device that is waited for after each step is idle until the next one's first kernel
        arrives. With offloaded activations it is waited for all the same: their memory of the host
        would be pinned once more for a step ahead.
        """
        is_timed = self._workload.warmup_steps + MEMORY_STEPS < self._reports < self._last_step
        is_waited_for = self._device.type == "cpu" or self.config.activation_offload != "none"
        return 1 if is_timed and not is_waited_for else 0

    def _count_update(self, *_: Any) -> None:
        self._updates += 1

    def _note_mode(self, is_training: bool) -> None:
        if not is_training:
            self._updates_evaluated = self._updates

    def _is_dominated(self) -> bool:
        """Whether a trial of the same numerics needs no more memory and is faster, asked once speed has settled."""
        timed = self._timed_steps()
        if self._request.pruning_bounds and len(timed) == SETTLED_STEPS:
            speed = statistics.median(step.tokens / step.seconds for step in timed)
            peak_bytes = self._meter.reading().peak_memory_bytes
            self._rival = dominated_by(
                self._request.pruning_bounds, peak_memory_bytes=peak_bytes, tokens_per_second=speed
            )
        return self._rival is not None

    def _end(self) -> None:
        self._has_ended = True
        raise ScriptEnd

    def _report_of_step(self, tokens: int, loss: Any, evaluation_loss: Any) -> _Report:
        wait = self._clock.step_ended(loss)
        self._reports += 1
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise ScriptEnd(
                ValueError(f"autotune.report got tokens={tokens!r}, which is no number of tokens")
            )
        read_before, self._read_seconds = (
            self._read_seconds,
            0.0 if self.parity is None else self.parity.seconds,
        )
        return _Report(
            number=self._reports,
            tokens=tokens,
            wait=wait,
            evaluation_loss=None if evaluation_loss is None else copied_to_host(evaluation_loss),
            is_evaluated_after_update=self._updates_evaluated in (None, self._updates),
            read_seconds=self._read_seconds - read_before,
        )

    def _finished(self, report: _Report) -> _Step:
        seconds, loss = report.wait()
        evaluated = None if report.evaluation_loss is None else float(report.evaluation_loss)
        if not math.isfinite(loss) or not math.isfinite(evaluated or 0.0):
            raise ScriptEnd(Diverged(f"the loss became {loss} at step {report.number}"))
        return _Step(
            seconds=seconds - report.read_seconds,
            tokens=report.tokens,
            loss=loss,
            evaluation_loss=evaluated,
            is_evaluated_after_update=report.is_evaluated_after_update,
        )

    @property
    def _is_over_cap(self) -> bool:
        return (
            self._request.enforce_cap
            and self._meter.reading().device_bytes > self._request.cap_bytes
        )

    # -- the result --------------------------------------------------------------------------------

    def premature(self) -> Measurement:
        done = self._reports
        return Measurement(
            outcome="crashed",
            message=f"the script ended after {done} of {self._workload.steps} steps; {_HOW_TO_REPORT}"
            if done == 0
            else f"the script ended after {done} of {self._workload.steps} steps: let it go on, or use fewer --steps",
        )

    def measurement(self) -> Measurement:
        memory, cap_bytes = self._meter.reading(), self._request.cap_bytes
        outcome: Outcome = "ok"
        message = ""
        if memory.device_bytes > cap_bytes:
            outcome, message = (
                "over_cap",
                f"needs {format_size(memory.device_bytes)} of {format_size(cap_bytes)}",
            )
        elif self._rival is not None:
            outcome = "dominated"
            message = f"trial {self._rival.number} trains the same faster in no more memory"
        return Measurement(
            outcome=outcome,
            message=message,
            peak_memory_bytes=memory.peak_memory_bytes,
            peak_reserved_bytes=memory.peak_reserved_bytes,
            device_bytes=memory.device_bytes,
            context_bytes=memory.context_bytes,
            alloc_retries=memory.alloc_retries,
            bytes_by_kind=self._bytes_by_kind(),
            **({} if self.parity is None else self.parity.verdict()),
            startup_seconds=self._startup_seconds,
            device_startup_seconds=self._device_startup_seconds,
            **self._speed(),
            **self._perplexity(),
        )

    def _bytes_by_kind(self) -> dict[str, int] | None:
        if self._model is None or self._optimizer is None:
            return None
        state = (value for one in self._optimizer.state.values() for value in one.values())
        return {
            "parameters": resident_bytes(self._model.parameters()),
            "buffers": resident_bytes(self._model.buffers()),
            "optimizer_state": resident_bytes(
                value for value in state if isinstance(value, torch.Tensor)
            ),
            **offloaded_bytes(self.config),
        }

    def _timed_steps(self) -> list[_Step]:
        """The steps after those of the warm-up and of memory; without those that evaluate, where two others remain."""
        timed = self._steps[self._workload.warmup_steps + MEMORY_STEPS :]
        plain = [step for step in timed if step.evaluation_loss is None]
        return plain if len(plain) > 1 else timed

    def _speed(self) -> dict[str, Any]:
        """Nothing where the script was ended for its memory."""
        if len(self._steps) < self._last_step and self._rival is None:
            return {}
        warmup = self._steps[: self._workload.warmup_steps]
        return measured_speed(warmup, self._timed_steps(), compiled=self.config.compile != "none")

    def _perplexity(self) -> dict[str, Any]:
        """Nothing where perplexity is shared, or the script did not come to its end."""
        if self._request.shares_perplexity or len(self._steps) < self._workload.steps:
            return {}
        last, latest = self._steps[-1], self._steps[-max(1, len(self._steps) // 4) :]
        if last.evaluation_loss is not None and last.is_evaluated_after_update:
            loss, source = last.evaluation_loss, f"{AFTER_STEP} {len(self._steps)}"
        else:
            loss = statistics.fmean(step.loss for step in latest)
            source = f"training loss of the last {len(latest)} steps"
            if any(step.evaluation_loss is not None for step in self._steps):
                source += f", {NOT_AFTER_THE_LAST_STEP}"
        if not loss < LARGEST_LOSS:
            raise Diverged(f"the loss is {loss} after {self._workload.steps} steps")
        return {"perplexity": math.exp(loss), "perplexity_source": source, "final_loss": last.loss}


def _watch_mode(model: nn.Module, note: Callable[[bool], None]) -> None:
    """Tells `note` of every `model.train()` and `model.eval()`.

    By the method of all modules: the model itself, which the script may copy, save and compile,
    stays as it is.
    """
    set_mode = nn.Module.train

    @functools.wraps(set_mode)
    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        if self is model:
            note(mode)
        return set_mode(self, mode)

    nn.Module.train = train  # type: ignore[assignment, method-assign]
