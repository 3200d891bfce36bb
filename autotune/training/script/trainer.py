"""Runs a user's training script as a trial in this process, and measures it from its reports.

The script has the training loop. Its first `warmup_steps` reports warm up, the next ones delimit
the steps whose memory is measured, the others are timed. The report of the workload's last step
ends the script. Where the perplexity is reused from another trial, the script is ended after a few
timed steps on a CPU; on CUDA its evaluation may set the peak of the device, so it runs to the end.

The script also evaluates. The perplexity is that of the evaluation loss in the last report. If
there is none, or if the model was last put in evaluation mode before the update of that step, it is
that of the last training losses, and its source says so. The evaluation loss of a script that never
calls `model.eval()` is used as reported.
"""

import math
import multiprocessing
import os
import re
import shlex
import statistics
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autotune.errors import InvalidInput, class_and_first_line_of
from autotune.memory.meter import resident_bytes
from autotune.memory.whole_run import make_whole_run_meter
from autotune.shipped.quantized import tensors_behind
from autotune.spec.cap import is_over_cap
from autotune.spec.config import OptimizerFusion, Precision, TrainingConfig
from autotune.spec.early_stopping import SETTLED_STEPS, PruningBound, dominated_by
from autotune.spec.examined import Examined
from autotune.spec.file_watch import FileWatch, files_until_apply, watch_files
from autotune.spec.limits import LARGEST_LOSS
from autotune.spec.provenance import PerplexitySource
from autotune.spec.result import Measurement
from autotune.spec.training_request import ReportsStage, TrainingRequest, unwatched
from autotune.spec.workload import MEMORY_STEPS, SHORT_TIMED_STEPS, Workload
from autotune.techniques.own_precision import own_precision, why_not_cast
from autotune.techniques.pinned_memory import offloaded_bytes
from autotune.techniques.user_optimizer import all_optimizers, held_optimizers, own_fusion
from autotune.techniques.user_training import (
    Optimizers,
    missing_in_user_model,
    parts_of_user_model,
    with_sparse_gradients,
)
from autotune.training.script.interface import begin, functions_called
from autotune.training.script.lines_to_add import lines_to_add, trainer_place
from autotune.training.script.loop_watch import FIRST_STEPS, LoopWatch
from autotune.training.script.model_calls import ModelCalls
from autotune.training.script.run import (
    RANK_VARIABLES,
    ScriptEnd,
    prepare_process,
    run_script,
    try_script,
)
from autotune.training.script.timed_run import Step, TimedRun
from autotune.training.speed import measured_speed
from autotune.training.step import Diverged
from autotune.training.verdict import judged


def train_script(request: TrainingRequest, *, progress: ReportsStage = unwatched) -> Measurement:
    """Runs the workload's script as one trial and returns its measurement.

    Raises Diverged, ParityFailed, whatever the script raises, and StudyMismatch if it ends too
    early without any technique.
    """
    device = prepare_process(request)
    trial = _ScriptTrial(request, device, progress=progress)
    begin(trial)
    ended = run_script(request.workload, expected_sha256=request.workload.model_sha256)
    if ended:
        return trial.measurement()
    if request.is_baseline:
        raise trial.mismatch_of_early_end()
    return trial.measurement_of_early_end()


def examine_script(
    workload: Workload,
    choices: Mapping[str, Sequence[Any]],
    *,
    device: torch.device,
    learns_global_batch: bool = False,
) -> Examined:
    """Runs the script up to `autotune.apply`, and on to its model; returns what that has shown.

    With `learns_global_batch` also its global batch, where it says it, whatever the workload has.

    Raises InvalidInput for a script that fails before `autotune.apply` or does not call it: that
    is ended after its first steps, and the error has the lines to add.
    """
    files = watch_files(workload)
    examination = _Examination(workload, choices, learns_global_batch=learns_global_batch)
    loop = LoopWatch(files.is_users)
    loop.step_ended = lambda: _end_unchanged(loop, files)
    examination.loop = loop
    started = _note_processes()
    try:
        try_script(examination, workload, device=device, learner=examination)
    except InvalidInput:  # by a callback, which says what the script has to change
        raise
    except Exception as error:
        if examination.missing is not None:  # its trials report the error
            return examination.result()
        variable = _missing_variable(error)
        if variable and not workload.one_rank:
            return Examined(missing_variable=variable)
        raise InvalidInput(
            f"script {workload.script} fails before its first step: "
            f"{class_and_first_line_of(error)}",
            hint=f"it must run by itself: python {shlex.join(workload.script_command())}",
        ) from error
    if examination.missing is None:
        raise InvalidInput(
            f"script {workload.script} does not call autotune.apply"
            + ("" if loop.steps else " before its first report or its end"),
            hint=_name_the_other_script(started[0])
            if started
            else _how_to_call(loop, files.user_code(), called=examination.called()),
        )
    return examination.result()


_LAUNCHERS = ("python", "torchrun", "accelerate", "deepspeed", "lightning", "spawn")
"""How the names of programs begin that run a training in other processes."""


def _note_processes() -> list[str]:
    """Returns a list to which each process that may train is added from now on, as its command."""
    started: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            words = arguments[1]
            command = words if isinstance(words, str) else shlex.join(map(os.fsdecode, words))
            if Path(command.split(" ")[0]).name.startswith(_LAUNCHERS):
                started.append(command)

    sys.addaudithook(note)
    start = multiprocessing.process.BaseProcess.start

    def started_by_python(self: multiprocessing.process.BaseProcess) -> None:
        if not type(self).__module__.endswith("fork"):
            started.append(f"{type(self).__name__} of multiprocessing")
        start(self)

    multiprocessing.process.BaseProcess.start = started_by_python  # type: ignore[method-assign]
    return started


def _name_the_other_script(command: str) -> str:
    """Returns what to do where the script trains in another process that it starts."""
    return (
        f"it started another process ({command:.80}), where autotune sees and changes nothing: if "
        "that trains, name what runs there, as --script train.py -- its arguments, which then "
        "trains in one process"
    )


_MOST_STEPS_BEFORE = 100
"""Updates before a script with a line of ours must have come to `autotune.apply`."""


def _end_unchanged(loop: LoopWatch, files: FileWatch) -> None:
    """Ends a script that trains, where none of its files names us, or where it goes on and on."""
    counts = [steps.count for steps in loop.steps.values()]
    if min(counts) >= FIRST_STEPS or max(counts) >= _MOST_STEPS_BEFORE:
        named = any("autotune" in _text(file) for file in files.user_code())
        if not named or max(counts) >= _MOST_STEPS_BEFORE:
            raise ScriptEnd


def _text(file: str) -> str:
    try:
        return Path(file).read_text(errors="replace")
    except OSError:
        return ""


def _how_to_call(loop: LoopWatch, files: Sequence[str], *, called: Collection[str]) -> str:
    """Returns what to add to the script that has run in this process, to search it."""
    if not loop.has_trainer and (lines := lines_to_add(loop, files, called=called)):
        return lines
    by_hand = "add `model, optimizer = autotune.apply(model, optimizer)` after both are made"
    if "transformers.trainer" in sys.modules:
        callback = "args=args, callbacks=[autotune.TrainerCallback(args)]"
    elif "lightning.pytorch" in sys.modules or "pytorch_lightning" in sys.modules:
        callback = "callbacks=[autotune.LightningCallback(global_batch=...)]"
    else:
        return by_hand
    place = trainer_place(files)
    where = f"in {place} " if place else ""
    return (
        f"{where}write Trainer(..., {callback}) or, in a training loop without Trainer, {by_hand}"
    )


def _missing_variable(error: Exception) -> str:
    """Returns the variable of torchrun whose absence is the reason of `error`, else "".

    torch.distributed raises a ValueError that names it.
    """
    name = str(error.args[0]) if isinstance(error, KeyError) and error.args else ""
    if isinstance(error, ValueError):
        found = re.search(r"environment variable (\w+) expected", str(error))
        name = found[1] if found else ""
    return name if name in RANK_VARIABLES else ""


class _Examination:
    """A run that ends after the first forward pass of the model that `autotune.apply` has got.

    Whether that is under autocast, and what of the model is called, is known only there.
    """

    def __init__(
        self,
        workload: Workload,
        choices: Mapping[str, Sequence[Any]],
        *,
        learns_global_batch: bool = False,
    ) -> None:
        self.config = TrainingConfig(micro_batch_size=workload.global_batch)
        self.workload = workload
        self.missing: dict[str, dict[str, str]] | None = None
        self.loop: LoopWatch | None = None
        self._has_reported = False
        self._choices = choices
        self._learns_global_batch = learns_global_batch
        self._files: Mapping[str, str] = {}
        self._own_precision: Precision = "fp32"
        self._own_fusion: OptimizerFusion = "none"
        self._why_as_is = ""
        self._own_choices: dict[str, Any] = {}
        self._injected = ""
        self._goes_on_until_update = False

    def apply(self, model: nn.Module, optimizer: Optimizers) -> tuple[nn.Module, Optimizers]:
        self._files = files_until_apply()  # what is read from here on is not part of them
        if self.loop is not None:
            self.loop.close()
        missing = missing_in_user_model(model, optimizer, self._choices)
        self._own_fusion = own_fusion(
            all_optimizers(optimizer), sparse=with_sparse_gradients(model)
        )
        self._own_precision = own_precision(model)
        if self._own_precision == "as-is":
            self._why_as_is = why_not_cast(model)
        self._model = model
        self._calls = ModelCalls(model, at_end=self._first_pass_ended)
        self.missing = missing
        for stepped in all_optimizers(optimizer):  # where no product was seen
            stepped.register_step_pre_hook(self._end)
        return model, optimizer

    def learn_global_batch(self, sequences: int) -> None:
        if self._learns_global_batch:
            self.workload = replace(self.workload, global_batch=sequences)
            self.config = TrainingConfig(micro_batch_size=sequences)

    def note_injected(self, what: str, *, is_checked_until_update: bool = False) -> None:
        self._injected = what
        self._goes_on_until_update = is_checked_until_update

    def note_own_choices(self, **choices: Any) -> None:
        self._own_choices.update(choices)

    def note_unknown_global_batch(self, reason: str) -> None:
        """Raises InvalidInput unless the search says how many sequences a step has."""
        if self._learns_global_batch:
            raise InvalidInput(
                f"nothing says how many sequences an optimizer step of the script has: {reason}",
                hint="say it: --global-batch N",
            )

    def note_whole_batches(self, reason: str) -> None:
        """Does nothing: a rehearsal with a smaller micro batch asks for the reason."""

    def _first_pass_ended(self) -> None:
        if not self._goes_on_until_update:
            raise ScriptEnd

    def _end(self, *_: Any) -> None:
        raise ScriptEnd

    def report(self, **_: Any) -> None:
        self._has_reported = True
        raise ScriptEnd

    def called(self) -> frozenset[str]:
        """Returns the names of the functions of ours that the script has called."""
        return functions_called() | {"report"} if self._has_reported else functions_called()

    def result(self) -> Examined:
        """Returns what is known of the script, which has ended."""
        assert self.missing is not None
        self._calls.close()
        to_format = self._calls.autocast_format
        if to_format:
            self._own_precision = "as-is"
            self._why_as_is = (
                f"the script itself runs its model under autocast to {to_format}: turn that off, "
                "so that precision can be searched"
            )
        if self._own_precision == "as-is":
            others = [value for value in self._choices.get("precision", ()) if value != "as-is"]
            self.missing["precision"] = dict.fromkeys(others, self._why_as_is)
        if to_format is not None:  # otherwise it has ended before its model was called
            parts = parts_of_user_model(self._model)
            by_calls = self._calls.missing(parts, self._choices, own_precision=self._own_precision)
            for technique, reasons in by_calls.items():
                self.missing[technique] = {**reasons, **self.missing.get(technique, {})}
        return Examined(
            unavailable=self.missing,
            files=self._files,
            own_precision=self._own_precision,
            own_fusion=self._own_fusion,
            own_choices=self._own_choices,
            global_batch=self.workload.global_batch,
            injected=self._injected,
        )


class _ScriptTrial(TimedRun):
    """Measures one configuration during the steps of the script."""

    def __init__(
        self, request: TrainingRequest, device: torch.device, *, progress: ReportsStage
    ) -> None:
        began = time.monotonic()
        self._meter = make_whole_run_meter(  # before anything touches the device
            device,
            uuid=request.device_uuid,
            cap_bytes=request.cap_bytes if request.enforce_cap else None,
            new_context_bytes=request.new_context_bytes,
            shares_device=request.shares_device,
        )
        self._device_startup_seconds = time.monotonic() - began
        super().__init__(request, progress=progress)
        self._steps: list[Step] = []
        self._last_step = request.workload.steps
        if request.shares_perplexity and device.type == "cpu":
            short = request.workload.warmup_steps + MEMORY_STEPS + SHORT_TIMED_STEPS
            self._last_step = min(self._last_step, short)
        self._dominating: PruningBound | None = None

    def _step_ended(self) -> None:
        done = self._reports
        is_timed = self.workload.warmup_steps + MEMORY_STEPS < done < self._last_step
        for step in self._finished_steps(may_run_ahead=is_timed):
            self._steps.append(step)
            if self._is_dominated():
                self._end()
        steady_from = self.workload.warmup_steps
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

    def _is_dominated(self) -> bool:
        """Returns whether an earlier trial of the same numerics is faster in no more memory.

        Checked only once, after the number of timed steps at which the speed has settled.
        """
        timed = self._timed_steps()
        if self._request.pruning_bounds and len(timed) == SETTLED_STEPS:
            speed = statistics.median(step.tokens / step.seconds for step in timed)
            peak_bytes = self._meter.reading().peak_memory_bytes
            self._dominating = dominated_by(
                self._request.pruning_bounds, peak_memory_bytes=peak_bytes, tokens_per_second=speed
            )
        return self._dominating is not None

    @property
    def _is_over_cap(self) -> bool:
        return self._request.enforce_cap and is_over_cap(
            self._meter.reading().device_bytes, self._request.cap_bytes
        )

    # -- the result --------------------------------------------------------------------------------

    def measurement(self) -> Measurement:
        """Returns the measurement of a script that ran to its last step."""
        memory = self._meter.reading()
        return replace(
            judged(memory, cap_bytes=self._request.cap_bytes, dominating=self._dominating),
            bytes_by_kind=self._bytes_by_kind(),
            **({} if self.parity is None else self.parity.verdict()),
            counted=self.counted,
            startup_seconds=self._startup_seconds,
            device_startup_seconds=self._device_startup_seconds,
            **self._speed(),
            **self._perplexity(),
        )

    def _bytes_by_kind(self) -> dict[str, int] | None:
        if self._model is None:
            return None
        state: list[Tensor] = []
        for optimizer in self._optimizers:
            for part in (optimizer, *held_optimizers(optimizer)):
                for value in tree_leaves(list(part.state.values())):
                    if isinstance(value, Tensor):
                        state += tensors_behind(value)
        return {
            "parameters": resident_bytes(self._model.parameters()),
            "buffers": resident_bytes(self._model.buffers()),
            "optimizer_state": resident_bytes(state),
            **offloaded_bytes(self.config),
        }

    def _timed_steps(self) -> list[Step]:
        """Returns the steps after the warm-up and after those whose memory was measured.

        Steps with an evaluation are left out, if at least two others remain.
        """
        timed = self._steps[self.workload.warmup_steps + MEMORY_STEPS :]
        plain = [step for step in timed if step.evaluation_loss is None]
        return plain if len(plain) > 1 else timed

    def _speed(self) -> dict[str, Any]:
        """Returns the fields for speed, empty where the script was ended for exceeding the cap."""
        if len(self._steps) < self._last_step and self._dominating is None:
            return {}
        warmup = self._steps[: self.workload.warmup_steps]
        return measured_speed(warmup, self._timed_steps(), compiled=self.config.compile != "none")

    def _perplexity(self) -> dict[str, Any]:
        """Returns the fields for perplexity.

        Empty where perplexity is reused from another trial, or the script was ended early. Raises
        Diverged for a loss that is too large, or too far below zero.
        """
        if self._request.shares_perplexity or len(self._steps) < self.workload.steps:
            return {}
        last = self._steps[-1]
        last_quarter = self._steps[-max(1, len(self._steps) // 4) :]
        if last.evaluation_loss is not None and last.is_evaluated_after_update:
            loss = last.evaluation_loss
            source = PerplexitySource(kind="evaluation", step=len(self._steps))
        else:
            loss = statistics.fmean(step.loss for step in last_quarter)
            has_evaluation = any(step.evaluation_loss is not None for step in self._steps)
            source = PerplexitySource(
                kind="training_loss",
                last_steps=len(last_quarter),
                unused_evaluation="unseen" if has_evaluation else None,
            )
        if not -LARGEST_LOSS < loss < LARGEST_LOSS:
            is_sum = f"; is it a sum? report the mean over the {self.counted}" if loss > 0 else ""
            raise Diverged(f"the loss is {loss} after {self.workload.steps} steps{is_sum}")
        return {"perplexity": math.exp(loss), "perplexity_source": source, "final_loss": last.loss}
