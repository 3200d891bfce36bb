"""Peak memory without running the model: the trial's own training step on fake tensors, every storage watched.

    fake_mode.py       fake tensors, and the birth and death of their storages
    generated_code.py  torch.compile: inductor's own program on fake tensors, without its kernels
    cpu.py             what kernels on a CPU hold while they run
    cuda.py            what a CUDA device would do and a fake CPU does not
    gpu.py             which GPU and which torch release that is
    attention.py       the kernel that torch chooses for attention there, and its own memory
    cublas.py          workspaces of matrix products there
    caching_allocator.py  the pieces that torch's allocator hands out on CUDA
    accuracy.py        how far predictions were from measurements

What was allocated and freed, and who holds the bytes at the peak, is in `autotune/memory/`.

Imported only in a trial's own process, which ends after one prediction: settings and patches die
with it.
"""

import gc
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autotune.data.batches import Batch
from autotune.errors import PredictionImpossible
from autotune.memory.attribution import bytes_by_category, find_peak, largest_holders, make_timeline
from autotune.memory.recording import Recording
from autotune.models.parts import held_tensors
from autotune.predictor import cpu, cuda
from autotune.predictor.accuracy import error_of
from autotune.predictor.caching_allocator import count_pieces, round_up
from autotune.predictor.fake_mode import StorageWatch
from autotune.predictor.generated_code import GeneratedPrograms, is_compiled
from autotune.predictor.gpu import gpu_of
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Category, Prediction
from autotune.spec.workload import Workload
from autotune.techniques import Training, apply_techniques
from autotune.techniques.checkpointing import Checkpointed
from autotune.training.step import TrainingStep

_FAKE_DEVICE = torch.device("cpu")
"""Of all fake tensors, whatever they stand for: no GPU has to be there, and none that is there is
touched."""

MICRO_BATCHES = 2
"""Micro batches run of a step: from the second on, which finds gradients and adds to them, all are
alike."""


@dataclass(frozen=True, kw_only=True)
class PredictionRequest:
    workload: Workload
    config: TrainingConfig
    device: str
    """The kind of device to predict for: cpu or cuda."""
    torch_version: str | None = None
    """The torch release whose CUDA kernels are meant, such as 2.8; None: the one that is installed.
    """
    compute_capability: str | None = None
    """Of the GPU that is meant, such as 9.0; None: that of an A100, and a note says so."""
    with_timeline: bool = False


def predict(request: PredictionRequest) -> Prediction:
    """The peak of a steady step.

    Raises PredictionImpossible where the model cannot run on fake tensors.
    """
    started = time.perf_counter()
    try:
        prediction = _Rehearsal(request).prediction()
    except Exception as error:
        traceback.print_exc()  # into the process's log
        raise _impossible(error) from error
    return replace(prediction, seconds=time.perf_counter() - started)


class _Rehearsal:
    """Two steps on fake tensors: one compiles and creates the optimizer's state, one is recorded."""

    def __init__(self, request: PredictionRequest) -> None:
        self._request = request
        self._is_cuda = request.device == "cuda"
        self._gpu = gpu_of(request.compute_capability, request.torch_version)
        self._kernels = cuda.CudaKernels(self._gpu)
        if self._is_cuda:
            self._watch = StorageWatch(round_up=round_up, scratch=self._kernels.scratch_bytes)
        else:
            self._watch = StorageWatch(scratch=cpu.scratch_bytes)
        self._programs = GeneratedPrograms(self._watch)
        self._parameters = 0

    def prediction(self) -> Prediction:
        request = self._request
        recording = self._record()
        workspace_bytes = self._as_allocated(recording)
        peak = find_peak(recording)
        sizes: dict[Category, int] = bytes_by_category(peak.blocks)
        sizes["workspace"] += workspace_bytes
        peak_bytes = peak.size_bytes + workspace_bytes
        error = error_of(
            request.config, device=request.device, estimated_bytes=self._kernels.cudnn_bytes
        )
        return Prediction(
            device=request.device,
            fake_device=_FAKE_DEVICE.type,
            peak_memory_bytes=peak_bytes,
            upper_bound_bytes=error.upper_bound(peak_bytes),
            lower_bound_bytes=error.lower_bound(peak_bytes),
            phase=peak.phase,
            module=peak.last_block.module if peak.last_block else "",
            operator=peak.last_block.operator if peak.last_block else "",
            bytes_by_category=sizes,
            parameters=self._parameters,
            holders=largest_holders(peak.blocks),
            plan=self._programs.plan,
            notes=tuple(self._notes()),
            timeline=make_timeline(recording, peak) if request.with_timeline else None,
        )

    def _as_allocated(self, recording: Recording) -> int:
        """Gives every block the size of the allocator's piece; returns the bytes of the workspaces beside them."""
        if not self._is_cuda:
            return 0
        workspaces = self._kernels.cublas.kept
        if self._request.config.allocator == "expandable":
            return sum(workspaces)  # every piece is split: what is asked for is what is handed out
        return count_pieces(recording, workspaces=workspaces)

    def _record(self) -> Recording:
        request = self._request
        with ExitStack() as stack:
            stack.enter_context(self._watch.mode)
            if self._is_cuda:
                stack.enter_context(cuda.memory_of_the_host())
                stack.enter_context(
                    cuda.kernels_of_a_gpu(self._gpu, backend=request.config.attention)
                )
            stack.enter_context(self._programs.active())
            training = apply_techniques(
                request.config, request.workload, weights_file=None, device=_FAKE_DEVICE
            )
            self._parameters = _number_of_parameters(training.parts.model)
            stack.enter_context(self._watching(training.parts.model))
            if not self._is_cuda:
                stack.enter_context(self._random_states_counted())
            step = TrainingStep(
                training,
                workload=request.workload,
                config=request.config,
                device=_FAKE_DEVICE,
                marker=self._watch,
            )
            step(0, self._batch())
            gc.collect()
            batch = self._batch()
            with self._watch.recording(lambda: _resident(training)) as recording:
                step(1, batch)
            return recording

    def _batch(self) -> Batch:
        """On the host, as a trial's batches are; as many micro batches as can differ in memory."""
        workload = self._request.workload
        sequences = min(
            workload.global_batch, MICRO_BATCHES * self._request.config.micro_batch_size
        )
        rows = torch.zeros(sequences, workload.sequence_length + 1, dtype=torch.long)
        return Batch(rows[:, :-1], rows[:, 1:])

    @contextmanager
    def _watching(self, model: nn.Module) -> Iterator[None]:
        """Tells the mode which module runs, and which tensors are gradients when an optimizer takes them."""
        for path, module, is_inside_compiled in _modules_of(model):
            if not is_inside_compiled:
                self._watch_module(module, path or type(module).__name__)

        def mark(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self._watch.mark_gradients(p.grad for p in parameters if p.grad is not None)

        handle = register_optimizer_step_pre_hook(mark)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def _random_states_counted(self) -> Iterator[None]:
        """Checkpointing keeps the generator's state, 5 KiB a region; on a CPU that is memory as any other."""
        get_state = torch.get_rng_state

        def counted() -> Tensor:
            state = get_state()
            self._watch.note_real(state)
            return state

        torch.get_rng_state = counted
        try:
            yield
        finally:
            torch.get_rng_state = get_state

    def _watch_module(self, module: nn.Module, path: str) -> None:
        first_nodes: list[int] = []

        def enter(*_: object) -> None:
            first_nodes.append(torch._C._autograd._get_sequence_nr())
            self._watch.enter_module(path)

        def leave(*_: object) -> None:
            self._watch.leave_module(first_node=first_nodes.pop())

        if not is_compiled(module):
            module.register_forward_pre_hook(enter, prepend=True)
            module.register_forward_hook(leave, always_call=True)
            return
        compiled_call = module._compiled_call_impl
        assert compiled_call is not None

        def watched_call(*args: Any, **kwargs: Any) -> Any:
            enter()
            try:
                return compiled_call(*args, **kwargs)
            finally:
                leave()

        module._compiled_call_impl = watched_call

    def _notes(self) -> Iterator[str]:
        if self._is_cuda:
            config = self._request.config
            yield from self._kernels.assumptions(
                compiled=config.compile != "none",
                autocast=config.precision.endswith("mixed") or config.precision == "fp8",
                torch_version=self._request.torch_version,
            )


def _modules_of(
    model: nn.Module, path: str = "", inside: bool = False
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Every module with its path in the untouched model, and whether it is part of a compiled one."""
    yield path, model, inside
    for name, child in model.named_children():
        below = path if isinstance(model, Checkpointed) else f"{path}.{name}".lstrip(".")
        yield from _modules_of(child, below, inside or is_compiled(model))


def _number_of_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _resident(training: Training) -> Iterator[tuple[Category, str, Tensor]]:
    """What is alive between two steps, with its category and its name."""
    modules = [(path, module) for path, module, _ in _modules_of(training.parts.model)]
    for path, module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            yield "parameters", f"{path}.{name}", parameter
    for path, module in modules:
        for name, tensor in held_tensors(module):
            yield "buffers", f"{path}.{name}", tensor
    for tensor in training.updater.state():
        yield "optimizer_state", "optimizer state", tensor


def _impossible(error: BaseException) -> PredictionImpossible:
    """Says which operation cannot be done on fake tensors, where that is what `error` or its cause is about."""
    hint = "measure it: a search goes on without a prediction for it"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, PredictionImpossible):
            return cause
        if isinstance(cause, DataDependentOutputException | DynamicOutputShapeException):
            return PredictionImpossible(
                f"the model cannot be predicted: what follows {cause.func} depends on values, not only on shapes",
                hint=hint,
            )
        if isinstance(cause, UnsupportedOperatorException):
            return PredictionImpossible(
                f"the model cannot be predicted: {cause.func} has no fake form", hint=hint
            )
        cause = cause.__cause__ or cause.__context__
    first_line = next((line for line in str(error).splitlines() if line.strip()), "")
    return PredictionImpossible(
        f"the prediction failed: {type(error).__name__}: {first_line}", hint=hint
    )
