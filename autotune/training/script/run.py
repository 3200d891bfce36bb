"""Runs a user's training script in this process, and records its first steps for parity."""

import functools
import inspect
import math
import os
import random
import runpy
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from numbers import Integral
from typing import Any, ClassVar

import numpy
import torch
import torch._inductor.config
from torch import nn
from torch.optim import lr_scheduler

from autotune.errors import StudyMismatch
from autotune.shipped.changed_method import Method, change_method
from autotune.shipped.seeds import seed_generators
from autotune.spec.file_watch import files_until_apply, watch_files
from autotune.spec.parity import PARITY_STEPS, ParityTrace
from autotune.spec.script_files import check_files_of_trial
from autotune.spec.training_request import ReportsStage, TrainingRequest, unwatched
from autotune.spec.user_code import (
    changed_since,
    is_script_module,
    script_file,
    script_folder,
    script_sha256,
)
from autotune.spec.workload import Workload
from autotune.techniques import before_the_device
from autotune.techniques.own_precision import own_precision
from autotune.techniques.pinned_memory import bound_pinned_memory
from autotune.techniques.precision import weights_dtype
from autotune.techniques.user_optimizer import all_optimizers
from autotune.techniques.user_training import (
    Optimizers,
    apply_to_user_training,
    parts_of_user_model,
)
from autotune.training.parity import ParityFailed, ParityWatch
from autotune.training.script.injection import inject_into_trainers
from autotune.training.script.interface import Learner, Run, begin

RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""The variables by which torchrun tells a script which of its processes it is."""


class ScriptEnd(BaseException):
    """Ends the script. A BaseException, so that the script's `except Exception` does not catch it.

    `reason` is the error that ends the script; None at its regular end.
    """

    raised: ClassVar[list["ScriptEnd"]] = []
    """Those of the script that runs, in order. A bare `except:` may have caught them."""

    def __init__(self, reason: Exception | None = None) -> None:
        super().__init__()
        self.reason = reason
        ScriptEnd.raised.append(self)


def seed_everything(seed: int) -> None:
    """Seeds the global random number generators of Python, numpy and torch.

    Most scripts seed them again, always alike. So `seed` is added to each seed that the script
    sets: with 0 it trains as by itself, and another seed is another training. Must be called before
    the script imports the functions.
    """
    seed_generators(seed)
    if seed == 0:
        return
    shifted = _ShiftedSeed(by=seed)
    for module, name in (
        (random, "seed"),
        (numpy.random, "seed"),
        (torch, "manual_seed"),
        (torch.random, "manual_seed"),
        (torch.cuda, "manual_seed"),
        (torch.cuda, "manual_seed_all"),
    ):
        setattr(module, name, shifted.function(getattr(module, name)))


class _ShiftedSeed:
    """Adds `by` to each seed that is set by functions that it has made.

    One of them may call another: `torch.manual_seed` seeds CUDA's generators by
    `torch.cuda.manual_seed_all`. The inner call gets a seed to which `by` has been added.
    """

    def __init__(self, by: int) -> None:
        self._by = by
        self._is_inside = False

    def function(self, set_seed: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `set_seed`, which adds `by` to a seed that is a number."""
        signature = inspect.signature(set_seed)

        @functools.wraps(set_seed)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return set_seed(*args, **kwargs)
            arguments = signature.bind(*args, **kwargs).arguments
            for name in ("seed", "a"):  # Python's own calls it `a`
                if isinstance(arguments.get(name), Integral):  # numpy's integers, too
                    # What all of them take.
                    arguments[name] = (int(arguments[name]) + self._by) % 2**32
            self._is_inside = True
            try:
                return set_seed(**arguments)
            finally:
                self._is_inside = False

        return call


def choose_device(device: torch.device) -> None:
    """Hides GPUs from a script that has to run on the CPU.

    Must be called before the process touches any device.
    """
    if device.type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a script takes a GPU where it sees one


def prepare_process(request: TrainingRequest) -> torch.device:
    """Makes the settings of a trial in this process, before anything touches its device.

    Returns the device.
    """
    before_the_device(request.config)
    device = torch.device(request.device)
    choose_device(device)
    if device.type == "cuda" and request.config.activation_offload != "none":
        bound_pinned_memory()
    seed_everything(request.workload.seed)
    return device


def try_script(
    run: Run,
    workload: Workload,
    *,
    device: torch.device,
    learner: Learner | None = None,
) -> None:
    """Runs the script, as it is now, with its calls delegated to `run`. Raises what it raises."""
    choose_device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    seed_everything(workload.seed)
    begin(run, learner=learner)
    run_script(workload, expected_sha256="")


def run_script(workload: Workload, *, expected_sha256: str) -> bool:
    """Runs the script as `python script.py` would; returns whether ScriptEnd ended it.

    A trainer in it gets what it needs to be searched, if the script has no line of ours.

    A module runs as `python -m` would run it. How a script ends that has caught a ScriptEnd does
    not count. Raises the reason of a ScriptEnd, RuntimeError for an exit code other than 0,
    StudyMismatch if the script has changed since `expected_sha256` or its files are not those of
    the workload, and whatever the script raises.
    """
    script = workload.script
    assert script is not None
    file = script_file(script)
    if expected_sha256 and script_sha256(script) != expected_sha256:
        raise changed_since(str(file))
    if workload.one_rank:
        os.environ.update(_one_rank())
    sys.argv = [str(file), *workload.script_arguments]
    sys.path.insert(0, str(script_folder(script)))
    watch = watch_files(workload)
    if workload.callback:
        inject_into_trainers()
    ScriptEnd.raised.clear()
    try:
        if is_script_module(script):
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(file), run_name="__main__")
    except ScriptEnd:
        pass
    except (Exception, SystemExit) as error:
        if not ScriptEnd.raised:
            if not watch.has_applied:  # it may fail because of an edit
                check_files_of_trial(workload, watch.found(), has_read_all=False)
            if not isinstance(error, SystemExit):
                raise
            if error.code:
                raise RuntimeError(f"the script ended with exit code {error.code}") from error
    if not ScriptEnd.raised:
        return False
    reason = ScriptEnd.raised[0].reason
    if reason is not None:
        raise reason from None
    return True


def _one_rank() -> dict[str, str]:
    """Returns the variables that torchrun sets for the only process of a training.

    The port is a free one for each process, because several trials may run on this machine.
    """
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    values = ("0", "0", "1", "1", "127.0.0.1", str(port))
    return dict(zip(RANK_VARIABLES, values, strict=True))


CALLS_APPLY_TWICE = (
    "the script calls autotune.apply twice, and a search changes one model, with all its optimizers"
)
HOW_TO_APPLY_ONCE = "pass the optimizers in one call: autotune.apply(model, [muon, adam])"


class WatchedRun:
    """A run of the script whose first steps are recorded for the parity check."""

    is_trace = False

    def __init__(self, request: TrainingRequest, *, progress: ReportsStage) -> None:
        self.config = request.config
        self._progress = progress
        self._request = request
        self.workload = request.workload
        self._device = torch.device(request.device)
        self.parity: ParityWatch | None = None
        self._watched_step = ExitStack()
        if self.config.optimizer_fusion == "backward":
            _end_where_gradients_are_clipped()

    def apply_and_watch(
        self, model: nn.Module, optimizer: Optimizers
    ) -> tuple[nn.Module, Optimizers]:
        """Applies the configuration and starts recording steps.

        Raises ScriptEnd with StudyMismatch at a second call, and where the script has read other
        files than its study.
        """
        if self.parity is not None:
            raise ScriptEnd(StudyMismatch(CALLS_APPLY_TWICE, hint=HOW_TO_APPLY_ONCE))
        try:
            check_files_of_trial(self.workload, files_until_apply())
        except StudyMismatch as error:
            raise ScriptEnd(error) from None
        own = own_precision(model)
        expected = self.workload.own_precision
        if "as-is" not in (own, expected) and weights_dtype(own) != weights_dtype(expected):
            raise ScriptEnd(
                StudyMismatch(
                    f"the script's weights are those of precision {own}, and when its study began "
                    f"they were those of {expected}",
                    hint="begin another study: --name NAME",
                )
            )
        # Before techniques wrap the model's parts.
        parts = parts_of_user_model(model)
        parity = self.parity = ParityWatch(
            parts.parameters_by_block(),
            device=self._device,
            precision=self.config.precision,
            reference=self._request.reference,
            is_trace=self.is_trace,
            progress=self._progress,
            buffers=parts.buffers(),
            watches_averages=self.is_trace,
        )
        watch_schedules(parity.note_schedule_step)
        model, optimizer = apply_to_user_training(self.config, model, optimizer)
        self.parity.follow(*all_optimizers(optimizer))
        self._watched_step.enter_context(self.parity.step())
        self._progress("step")
        return model, optimizer

    def watch_next_step(self) -> None:
        """Must be called where one step ends and the next one begins."""
        if self.parity is not None:
            self._watched_step.close()
            self._watched_step.enter_context(self.parity.step())

    def note(self, loss: float, *, tokens: int) -> None:
        """Records the loss of the next step that the device has finished, in order.

        Raises ScriptEnd with ParityFailed where the first steps differ from the reference's.
        """
        self._progress("step")
        if self.parity is None:
            return
        try:
            self.parity.note(loss, tokens=tokens)
        except ParityFailed as error:
            raise ScriptEnd(error) from None


def _end_where_gradients_are_clipped() -> None:
    """Ends a script at its first call of torch's gradient clipping.

    The gradients have been used and freed by then, so clipping would do nothing. Must be called
    before the script imports the functions.
    """

    def end() -> None:
        raise ScriptEnd(ParityFailed(CLIPS_GRADIENTS))

    watch_clipping(before_clipping=end)


def watch_clipping(
    *, before_clipping: Callable[[], None], after_norm: Callable[[], None] = lambda: None
) -> None:
    """Calls `before_clipping` at each call of torch's gradient clipping from now on.

    With a limit of infinity the functions only compute the norm; `after_norm` is called then. Must
    be called before the script imports the functions.
    """

    def guarded(clip: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(clip)

        @functools.wraps(clip)
        def call(*args: Any, **kwargs: Any) -> Any:
            _, limit, *_ = signature.bind(*args, **kwargs).arguments.values()
            if math.isfinite(limit):
                before_clipping()
                return clip(*args, **kwargs)
            result = clip(*args, **kwargs)
            after_norm()
            return result

        return call

    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
        guard = guarded(getattr(nn.utils, name))
        setattr(nn.utils, name, guard)
        setattr(nn.utils.clip_grad, name, guard)


def watch_schedules(note_step: Callable[[], None]) -> None:
    """Calls `note_step` at each step of one of torch's learning-rate schedules from now on."""

    def noting(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def call(*args: Any, **kwargs: Any) -> Any:
            note_step()
            return step(*args, **kwargs)

        return call

    for kind in vars(lr_scheduler).values():
        is_schedule = isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)
        if is_schedule and "step" in vars(kind):
            kind.step = noting(kind.step)


CLIPS_GRADIENTS = (
    "the script clips gradients, which optimizer_fusion backward has used and freed before"
)


class _ScriptTrace(WatchedRun):
    """A run that ends after the steps that the parity check compares."""

    is_trace = True

    def __init__(self, request: TrainingRequest, *, dropout: bool, progress: ReportsStage) -> None:
        super().__init__(request, progress=progress)
        self._dropout = dropout
        self._steps = 0

    def apply(self, model: nn.Module, optimizer: Optimizers) -> tuple[nn.Module, Optimizers]:
        if not self._dropout:
            model.eval()
            change_method(model, "train", _staying)  # the script would turn training mode on again
        return self.apply_and_watch(model, optimizer)

    def report(
        self, *, tokens: int | None, rows: int | None, loss: Any, evaluation_loss: Any
    ) -> None:
        self.watch_next_step()
        self.note(float(loss), tokens=rows or tokens or 0)
        self._steps += 1
        if self._steps == PARITY_STEPS:
            raise ScriptEnd


def _staying(_train: Method) -> Method:
    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        return self

    return train


def trace_script(
    request: TrainingRequest, *, dropout: bool, progress: ReportsStage = unwatched
) -> ParityTrace:
    """Returns the trace of the script's first steps, to compare with another configuration.

    Without `dropout` the model is in evaluation mode. Raises RuntimeError for a script that ends
    before these steps, and whatever the script raises.
    """
    torch._inductor.config.fallback_random = True
    device = prepare_process(request)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # as a trial's meter does
    trial = _ScriptTrace(request, dropout=dropout, progress=progress)
    begin(trial)
    was_ended = run_script(request.workload, expected_sha256=request.workload.model_sha256)
    if not was_ended or trial.parity is None:
        raise RuntimeError(f"the script ended before {PARITY_STEPS} steps")
    return trial.parity.trace()
