"""Runs a few steps of a trial's training under torch's profiler, and writes what it shows.

    trace.json.gz      the profiler's trace: ui.perfetto.dev opens it
    snapshot.pickle    torch's allocation history of one step, on CUDA: pytorch.org/memory_viz
    code/graph-0.py    what inductor generated, a file for each graph, with torch.compile

This run measures nothing else: the profiler slows the steps, and compiled code is generated anew.
Source: https://docs.pytorch.org/docs/stable/profiler.html
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo.utils
import torch._inductor.config
from torch import nn
from torch._C._autograd import DeviceType
from torch._inductor.graph import GraphLowering
from torch.autograd.profiler_util import FunctionEventAvg
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from autotune.memory.attribution import bytes_by_category, find_peak, largest_holders, make_timeline
from autotune.memory.history import Change, changes_of_profile, distinct, read_changes
from autotune.memory.recording import Block, Recording
from autotune.shipped.quantized import tensors_behind
from autotune.shipped.tensors import held_tensors
from autotune.spec.prediction import Category
from autotune.spec.profile import Compilation, CompiledGraph, OperatorUse, Profile
from autotune.spec.training_request import ReportsStage, TrainingRequest, unwatched
from autotune.techniques import before_the_device
from autotune.training.trainer import Trainer

MOST_OPERATORS = 40
"""Operators of a profile by time, and as many by memory; the trace has all."""
_UNPROFILED_STEPS = 5
"""Steps that are timed without the profiler, to say how much it slows them."""
PHASE_PREFIX = "autotune::"
_PHASES = ("forward", "backward", "step")
_WHOLE_STEP = PHASE_PREFIX + "whole step"
_RECOMPUTATION = PHASE_PREFIX + "recomputation"
_GRADIENTS = PHASE_PREFIX + "gradients "


def profile_training(
    request: TrainingRequest, *, folder: Path, steps: int, progress: ReportsStage = unwatched
) -> Profile:
    """Profiles `steps` steady steps of a training; writes its files to `folder`, which exists.

    Raises OSError where they cannot be written, and what a training raises.
    """
    before_the_device(request.config)
    is_compiled = request.config.compile != "none"
    # Code that is found in a cache is not generated, so that there would be nothing to show.
    torch._inductor.config.force_disable_caches = is_compiled
    with _generated_code(folder / "code") as code_files:
        run = _ProfiledTraining(request, folder=folder, progress=progress)
        run.warm_up()
        found = run.take_profile(steps)
        recording = run.record_memory(found)
    files = [*code_files, *(name for name in _FILES if (folder / name).exists())]
    peak = find_peak(recording)
    return Profile(
        device=run.device.type,
        steps=steps,
        step_seconds=run.step_seconds,
        peak_memory_bytes=peak.size_bytes,
        peak_phase=peak.phase,
        bytes_by_category=bytes_by_category(peak.blocks),
        holders=largest_holders(peak.blocks),
        timeline=make_timeline(recording, peak),
        compilation=_compilation(code_files) if is_compiled else None,
        files=tuple(files),
        torch_version=torch.__version__,
        **_times(found, recording, run, steps=steps),
    )


_TRACE = "trace.json.gz"
_SNAPSHOT = "snapshot.pickle"
_FILES = (_TRACE, _SNAPSHOT)


class _NamedPhases:
    """A `PhaseMarker` that gives each phase a range of the profile."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with record_function(PHASE_PREFIX + name):
            yield


class _ProfiledTraining:
    """The training of a trial, with what a profile needs to know about its steps."""

    def __init__(self, request: TrainingRequest, *, folder: Path, progress: ReportsStage) -> None:
        self._request, self._folder, self._progress = request, folder, progress
        self._trainer = Trainer(request, progress=progress, phase_marker=_NamedPhases())
        self._batches = self._trainer.batches()
        self._next_step = 0
        self._optimizer_steps: list[list[int]] = []
        """Addresses of the gradients that each call of an optimizer used."""
        self.device = torch.device(request.device)
        self.step_seconds = 0.0

    def warm_up(self) -> None:
        """Takes the warm-up steps of the workload, then some that are timed."""
        self._progress("step")
        for _ in range(max(2, self._request.workload.warmup_steps)):
            self._take_step()
        seconds = []
        for _ in range(_UNPROFILED_STEPS):
            began = time.perf_counter()
            self._take_step()
            seconds.append(time.perf_counter() - began)
        self.step_seconds = statistics.median(seconds)

    def take_profile(self, steps: int) -> profile:
        """Takes `steps` steps under the profiler, writes their trace and returns the profile."""
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with (
            self._marked_recomputation(),
            self._marked_gradients(),
            profile(activities=activities, profile_memory=True) as recording,
        ):
            for _ in range(steps):
                with record_function(_WHOLE_STEP):
                    self._take_step()
        found: profile = recording
        found.export_chrome_trace(str(self._folder / _TRACE))
        return found

    def record_memory(self, found: profile) -> Recording:
        """Returns what the last profiled step allocated; on CUDA, what one more step does."""
        if self.device.type != "cuda":
            return self._recording_of(found)
        history = self._trainer.history
        with history.recorded(self.device, snapshot_file=self._folder / _SNAPSHOT):
            self._take_step()
        recording = history.recording(dict(self._resident()))
        _add_workspaces(recording, allocated_bytes=torch.cuda.memory_allocated(self.device))
        return recording

    def _take_step(self) -> None:
        self._trainer.take_step(self._next_step, next(self._batches))
        self._next_step += 1

    def _resident(self) -> Iterator[tuple[Category, Sequence[torch.Tensor]]]:
        """Yields what stays on the device from step to step."""
        training = self._trainer.training
        model = training.parts.model
        groups: dict[Category, list[torch.Tensor]] = {
            "parameters": [part for one in model.parameters() for part in tensors_behind(one)],
            "buffers": [held for module in model.modules() for _, held in held_tensors(module)],
            "gradients": list(training.devices.held()),
            "optimizer_state": list(training.updater.state()),
        }
        for category, tensors in groups.items():
            yield category, [one for one in tensors if one.device.type == self.device.type]

    def _recording_of(self, found: profile) -> Recording:
        """Returns the recording of the last step of a profile on a CPU."""
        assert found.profiler is not None
        results = found.profiler.kineto_results
        assert results is not None
        ranges = [
            (event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
            for event in results.events()
            if event.name().startswith(PHASE_PREFIX)
        ]
        _, began, ended = max(
            (one for one in ranges if one[0] == _WHOLE_STEP), key=lambda one: one[1]
        )
        inside = [one for one in ranges if began <= one[1] and one[2] <= ended]
        gradients = []
        for name, at, _ in inside:
            if name.startswith(_GRADIENTS):
                used = self._optimizer_steps[int(name.removeprefix(_GRADIENTS))]
                gradients += [(address, at) for address in used]
        resident = {
            category: [
                (one.untyped_storage().data_ptr(), one.untyped_storage().nbytes())
                for one in distinct(tensors)
            ]
            for category, tensors in self._resident()
        }
        changes = [one for one in changes_of_profile(results) if began <= one.at <= ended]
        return read_changes(
            changes,
            resident=resident,
            phases=[
                (name.removeprefix(PHASE_PREFIX), first, last)
                for name, first, last in sorted(inside, key=lambda one: one[1])
                if name.removeprefix(PHASE_PREFIX) in _PHASES
            ],
            gradients=gradients,
            recomputations=[
                (first, last) for name, first, last in inside if name == _RECOMPUTATION
            ],
        )

    @contextmanager
    def _marked_gradients(self) -> Iterator[None]:
        """Notes the addresses of the gradients that an optimizer uses, and when."""

        def note(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            addresses = [
                part.untyped_storage().data_ptr()
                for one in parameters
                if one.grad is not None
                for part in tensors_behind(one.grad)
            ]
            with record_function(f"{_GRADIENTS}{len(self._optimizer_steps)}"):
                self._optimizer_steps.append(addresses)

        with register_optimizer_step_pre_hook(note):
            yield

    @contextmanager
    def _marked_recomputation(self) -> Iterator[None]:
        """Gives each forward pass that runs within a backward pass a range of the profile.

        Forward passes within compiled code have no hooks.
        """
        model = self._trainer.training.parts.model
        running: list[Any] = []
        depth = 0

        def enter(*_: object) -> None:
            nonlocal depth
            if depth == 0 and torch._C._current_graph_task_id() != -1:
                running.append(record_function(_RECOMPUTATION))
                running[-1].__enter__()
            depth += 1

        def leave(*_: object) -> None:
            nonlocal depth
            depth -= 1
            if depth == 0 and running:
                running.pop().__exit__(None, None, None)

        handles = []
        for module in _outside_compiled_code(model):
            handles.append(module.register_forward_pre_hook(enter, prepend=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _add_workspaces(recording: Recording, *, allocated_bytes: int) -> None:
    """Adds what is allocated at the end of the step and was neither seen nor is known as resident.

    These are mostly the workspaces of cuBLAS, which stay from the first step on.
    """
    known_bytes = sum(block.size_bytes for block in recording.resident)
    known_bytes += sum(sign * block.size_bytes for sign, block in recording.events)
    if allocated_bytes > known_bytes:
        recording.resident.append(
            Block(
                size_bytes=allocated_bytes - known_bytes,
                module="",
                operator="workspaces",
                born=-1,
                resident="workspace",
            )
        )


def _outside_compiled_code(model: nn.Module) -> Iterator[nn.Module]:
    if model._compiled_call_impl is not None:
        return
    yield model
    for child in model.children():
        yield from _outside_compiled_code(child)


# -- times -----------------------------------------------------------------------------------------


def _times(
    found: profile, recording: Recording, run: _ProfiledTraining, *, steps: int
) -> dict[str, Any]:
    """Returns the fields of a profile that are times, of one step in the mean."""
    averages = {one.key: one for one in found.key_averages()}

    def seconds_of(name: str) -> float:
        one = averages.get(name)
        return 0.0 if one is None else one.cpu_time_total / 1e6 / steps

    phases = [name for name in _PHASES if PHASE_PREFIX + name in averages]
    operators = _operators(found, steps=steps)
    by_memory = sorted(operators, key=lambda one: -one.allocated_bytes)[:MOST_OPERATORS]
    operators.sort(key=lambda one: -one.seconds)
    shown = [
        one for index, one in enumerate(operators) if index < MOST_OPERATORS or one in by_memory
    ]
    config = run._request.config
    hides_recomputation = config.compile != "none" and config.checkpointing != "none"
    return {
        "profiled_step_seconds": seconds_of(_WHOLE_STEP),
        "phase_seconds": {name: seconds_of(PHASE_PREFIX + name) for name in phases},
        "recomputed_seconds": None if hides_recomputation else seconds_of(_RECOMPUTATION),
        "idle_seconds": _idle_seconds(found, steps=steps) if run.device.type == "cuda" else None,
        "operators": tuple(shown),
        "other_operators": len(operators) - len(shown),
    }


def _operators(found: profile, *, steps: int) -> list[OperatorUse]:
    assert found.profiler is not None
    allocated: dict[str, int] = {}
    for change in _allocations(found):
        allocated[change.made_by] = allocated.get(change.made_by, 0) + change.size_bytes
    return [
        OperatorUse(
            name=str(one.key),
            calls=one.count / steps,
            host_seconds=max(0.0, one.self_cpu_time_total / 1e6 / steps),
            device_seconds=max(0.0, one.self_device_time_total / 1e6 / steps),
            allocated_bytes=allocated.get(str(one.key), 0) // steps,
        )
        for one in found.key_averages()
        if _is_operator(one)
    ]


def _allocations(found: profile) -> Iterator[Change]:
    assert found.profiler is not None
    for change in changes_of_profile(found.profiler.kineto_results):
        if change.size_bytes > 0:
            yield change


def _is_operator(average: FunctionEventAvg) -> bool:
    """Whether an entry is an operator of the host, not a kernel, a range or autograd's frame."""
    if average.device_type != DeviceType.CPU or average.is_user_annotation:
        return False
    return not str(average.key).startswith(
        ("autograd::engine", PHASE_PREFIX, "cuda", "ProfilerStep")
    )


def _idle_seconds(found: profile, *, steps: int) -> float:
    """Returns how long no kernel runs in a step, from the first kernel to the last one."""
    assert found.profiler is not None
    results = found.profiler.kineto_results
    assert results is not None
    kernels = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in results.events()
        if event.device_type() == DeviceType.CUDA and not event.name().startswith(PHASE_PREFIX)
    )
    idle_ns = 0
    busy_until = kernels[0][1] if kernels else 0
    for began, ended in kernels:
        idle_ns += max(0, began - busy_until)
        busy_until = max(busy_until, ended)
    return idle_ns / 1e9 / steps


# -- compiled code ---------------------------------------------------------------------------------


@contextmanager
def _generated_code(folder: Path) -> Iterator[list[str]]:
    """Writes what inductor generates to a file for each graph; yields their names as they come."""
    files: list[str] = []

    def save(code: str) -> None:
        folder.mkdir(exist_ok=True)
        file = folder / f"graph-{len(files)}.py"
        file.write_text(code)
        files.append(f"{folder.name}/{file.name}")

    with patch.object(GraphLowering, "save_output_code", save):
        yield files


def _compilation(code_files: Sequence[str]) -> Compilation:
    seen: set[tuple[str | None, int | None]] = set()
    graphs = []
    for metrics in torch._dynamo.utils.get_compilation_metrics():
        if metrics.co_name is None:  # such as that of a backward pass, which has no code of its own
            continue
        place = (metrics.co_filename, metrics.co_firstlineno)
        file = Path(metrics.co_filename or "?").name
        again = "compiled again" if place in seen else ""
        seen.add(place)
        reason = getattr(metrics, "recompile_reason", None) or again
        graphs.append(
            CompiledGraph(
                name=f"{metrics.co_name} ({file}:{metrics.co_firstlineno})",
                operators=metrics.graph_op_count or 0,
                seconds=metrics.entire_frame_compile_time_s or 0.0,
                recompiled_because=str(reason).strip(),
            )
        )
    breaks = torch._dynamo.utils.counters["graph_break"]
    return Compilation(
        graphs=tuple(graphs),
        breaks=tuple((str(reason).strip(), count) for reason, count in breaks.items()),
        code_files=tuple(code_files),
    )
