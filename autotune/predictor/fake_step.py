"""A training step on fake tensors: what every prediction does, whoever brings the step.

`predict.py` runs the step of a trial, `user_training.py` that of a program of its user.
"""

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autotune.analysis.reasons import unquantized_share, why_left_in_16_bits
from autotune.errors import InvalidInput, PredictionImpossible
from autotune.memory.attribution import bytes_by_category, find_peak, largest_holders, make_timeline
from autotune.memory.recording import Recording
from autotune.predictor import cuda
from autotune.predictor.accuracy import PredictionError
from autotune.predictor.caching_allocator import round_up
from autotune.predictor.cpu import CpuKernels
from autotune.predictor.depths import Depths, Extrapolated
from autotune.predictor.fake_mode import StorageWatch, value_read_at
from autotune.predictor.generated_code import GeneratedPrograms, is_compiled
from autotune.predictor.gpu import Gpu
from autotune.predictor.routing import UNEQUAL_PARTS
from autotune.predictor.work import WorkPerToken
from autotune.shipped.quantized import tensors_behind
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Category, Holder, Prediction
from autotune.units import format_percent, format_size

FAKE_DEVICE = torch.device("cpu")
"""The device of all fake tensors, also in predictions for CUDA: no GPU is needed or touched."""

WAY_OUT = "measure the configuration: a search works without predictions"
KNOWN_REASONS = (
    PredictionImpossible,
    InvalidInput,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
_OTHER_ANSWERS = (0, 2, -(10.0**4), 10.0**4)
"""Values that are returned where a program reads one, instead of 1, in one step after another."""


@dataclass(frozen=True, kw_only=True)
class FakeStep:
    """A recorded step, with what the recording does not have."""

    device: str
    """The kind of device that is predicted for: cpu or cuda."""
    recording: Recording
    """With the sizes of the allocator's blocks."""
    error: PredictionError
    """How far a measured peak may be from it."""
    workspace_bytes: int
    parameters: int
    notes: tuple[str, ...]
    plan: str | None = None
    host_bytes: int = 0
    """What offloading takes of the host's memory."""
    ranks_alike: list[list[int]] = field(default_factory=list)
    work: WorkPerToken = field(default_factory=WorkPerToken)
    unquantized: tuple[int, int] = (0, 0)
    """How many numbers of frozen weights are not quantized, and how many are."""
    unequal_bytes: tuple[int, ...] = ()
    """The peaks if all tokens choose the same experts; empty where no routing was predicted."""

    def prediction(self, config: TrainingConfig, *, with_timeline: bool = False) -> Prediction:
        """Returns the prediction that this step is, of a training with this configuration."""
        peak = find_peak(self.recording)
        last = peak.last_block
        prediction = self._of_peak(
            config,
            phase=peak.phase,
            module=last.module if last else "",
            operator=last.operator if last else "",
            sizes=bytes_by_category(peak.blocks),
            holders=largest_holders(peak.blocks),
            host_bytes=self.host_bytes,
            work=self.work,
            unquantized=self.unquantized,
        )
        timeline = make_timeline(self.recording, peak) if with_timeline else None
        if self.unequal_bytes:
            more = max(self.unequal_bytes) - peak.size_bytes
            less = peak.size_bytes - min(self.unequal_bytes)
            prediction = replace(
                prediction,
                upper_bound_bytes=prediction.upper_bound_bytes + max(0, more),
                lower_bound_bytes=max(0, prediction.lower_bound_bytes - max(0, less)),
            )
        return replace(prediction, plan=self.plan, timeline=timeline)

    def extrapolated(
        self,
        config: TrainingConfig,
        depths: Depths,
        found: Extrapolated,
        *,
        at_first: "FakeStep",
    ) -> Prediction:
        """Returns the prediction of the whole model; this step is the one at the second depth."""
        periods = (depths.whole - depths.second) // (depths.second - depths.first)
        prediction = self._of_peak(
            config,
            phase=found.place.phase,
            module=found.place.module,
            operator=found.place.operator,
            sizes=dict(found.bytes_by_category),
            holders=found.holders,
            allowance_bytes=found.allowance_bytes,
            host_bytes=self.host_bytes + periods * (self.host_bytes - at_first.host_bytes),
            work=self.work.extrapolated(at_first.work, periods=periods),
            unquantized=tuple(
                here + periods * (here - before)
                for here, before in zip(self.unquantized, at_first.unquantized, strict=True)
            ),
        )
        return replace(
            prediction,
            parameters=self.parameters + periods * (self.parameters - at_first.parameters),
            extrapolated_from=(depths.first, depths.second),
            checked_at=depths.check,
            check_error_bytes=found.check_error_bytes,
        )

    def _of_peak(
        self,
        config: TrainingConfig,
        *,
        phase: str,
        module: str,
        operator: str,
        sizes: dict[Category, int],
        holders: tuple[Holder, ...],
        host_bytes: int,
        work: WorkPerToken,
        unquantized: tuple[int, ...],
        allowance_bytes: int = 0,
    ) -> Prediction:
        """Returns the prediction; the bounds allow for `allowance_bytes` of further error."""
        sizes["workspace"] += self.workspace_bytes
        peak_bytes = sum(sizes.values())
        notes = self.notes
        if host_bytes:
            taken = f"offload {config.offload} takes {format_size(host_bytes)}"
            notes = (*notes, f"{taken} of the host's memory for each device")
        share = unquantized_share(*unquantized)
        if left := why_left_in_16_bits(config, share):
            notes = (*notes, left)
        return Prediction(
            device=self.device,
            fake_device=FAKE_DEVICE.type,
            peak_memory_bytes=peak_bytes,
            upper_bound_bytes=self.error.upper_bound(peak_bytes) + allowance_bytes,
            lower_bound_bytes=max(0, self.error.lower_bound(peak_bytes) - allowance_bytes),
            phase=phase,
            module=module,
            operator=operator,
            bytes_by_category=sizes,
            parameters=self.parameters,
            flops_per_token=work.flops,
            bytes_accessed_per_token=work.bytes_accessed,
            operators_per_token=work.operators,
            unquantized_share=share,
            holders=holders,
            notes=notes,
        )


class FakeRun:
    """Runs a training on fake tensors, and finds what each of its steps allocates."""

    subject = "the model"
    way_out = WAY_OUT

    def __init__(self, gpu: Gpu | None) -> None:
        """`gpu` is what to predict for, None for this machine's CPU."""
        self.gpu = gpu
        self.cpu_kernels = CpuKernels()
        if gpu is not None:
            self.cuda_kernels = cuda.CudaKernels(gpu)
            self.watch = StorageWatch(round_up=round_up, scratch=self.cuda_kernels.scratch)
            self.cuda_kernels.cublas.note = self.watch.note_workspace
        else:
            self.watch = StorageWatch(
                scratch=lambda *call: [[self.cpu_kernels.scratch_bytes(*call)]],
                workspace=self.cpu_kernels.workspace_bytes,
            )
        self.programs = GeneratedPrograms(self.watch, for_gpu=gpu is not None)
        self.unequal_bytes: list[int] = []
        self._share_without_gradient = 0.0

    @property
    def is_cuda(self) -> bool:
        return self.gpu is not None

    @property
    def estimated_bytes(self) -> int:
        """What is only estimated, or unknown: the bounds allow for it."""
        return self.cuda_kernels.cudnn_bytes if self.is_cuda else self.cpu_kernels.unknown_bytes

    @contextmanager
    def reasons_named(self) -> Iterator[None]:
        """Raises PredictionImpossible for an error that follows from a value that was assumed."""
        try:
            yield
        except Exception as error:
            if self.watch.latest_unknown and not isinstance(error, KNOWN_REASONS):
                raise self._depends_on(self.watch.latest_unknown) from error
            raise

    def run_alternatives(
        self,
        recording: Recording,
        *,
        again: Callable[[], Recording],
        state: Callable[[], Iterable[Tensor]],
    ) -> None:
        """Repeats the step as other values would let it run, where the program reads values.

        `again` records one more step, `state` returns the state of the optimizers. Raises
        PredictionImpossible where such a value changes the peak.
        """
        watch, routing = self.watch, self.watch.routing
        if routing.was_used:
            for routing.parts in UNEQUAL_PARTS:
                peak_bytes = peak_of(again())
                # Experts that are never chosen have no state of the optimizer either.
                state_bytes = bytes_of(state())
                unused_bytes = round(self._share_without_gradient * state_bytes)
                self.unequal_bytes.append(peak_bytes - unused_bytes)
            routing.parts = "equal"
        if routing.assumed_all:
            routing.unknown_is_all = False
            try:
                self.unequal_bytes.append(peak_of(again()))
            except (Exception, SystemExit):  # not every program runs with nothing selected
                traceback.print_exc()
            routing.unknown_is_all = True
        if not watch.reads:
            return
        peak_bytes, agreeing = peak_of(recording), 1
        for watch.answer in _OTHER_ANSWERS:
            try:
                other_bytes = peak_of(again())
            except (Exception, SystemExit):  # a value that the program does not accept
                traceback.print_exc()
                continue
            if other_bytes != peak_bytes:
                raise self._depends_on(value_read_at(watch.reads[-1]))
            agreeing += 1
        if agreeing == 1:
            raise self._depends_on(value_read_at(watch.reads[-1]))

    @contextmanager
    def watch_models(self, models: Mapping[str, nn.Module]) -> Iterator[None]:
        """Tells the watch which module runs and, when an optimizer steps, the gradients.

        Paths of modules begin with the name of their model.
        """
        watched: set[nn.Module] = set()
        for name, model in models.items():
            for path, module, is_inside_compiled in modules_of(model, name):
                if not is_inside_compiled and module not in watched:
                    self._watch_module(module, path or _class_name(module))
                watched.add(module)

        def mark_gradients(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            gradients = [p.grad for p in parameters]
            unused_bytes = bytes_of(p for p in parameters if p.grad is None)
            self._share_without_gradient = unused_bytes / max(1, bytes_of(parameters))
            self.watch.mark_gradients(
                part
                for gradient in gradients
                if gradient is not None
                for part in tensors_behind(gradient)  # of a divided one, this device's part
            )

        with register_optimizer_step_pre_hook(mark_gradients):
            yield

    @contextmanager
    def count_random_states(self) -> Iterator[None]:
        """Counts the states of the random number generator that checkpointing stores.

        They take 5 KiB for each region, which on a CPU is memory like any other.
        """
        get_state = torch.get_rng_state

        def get_counted_state() -> Tensor:
            state = get_state()
            self.watch.note_real(state)
            return state

        torch.get_rng_state = get_counted_state
        try:
            yield
        finally:
            torch.get_rng_state = get_state

    def _watch_module(self, module: nn.Module, path: str) -> None:
        first_nodes: list[int] = []

        def enter(*_: object) -> None:
            first_nodes.append(torch._C._autograd._get_sequence_nr())
            self.watch.enter_module(path)

        def leave(*_: object) -> None:
            self.watch.leave_module(first_node=first_nodes.pop())

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

    def _depends_on(self, unknown: str) -> PredictionImpossible:
        return PredictionImpossible(
            f"{self.subject} cannot be predicted: {unknown} decides how much memory is needed",
            hint=self.way_out,
        )

    def notes(
        self,
        error: PredictionError,
        *,
        is_measured: bool,
        compiled: bool,
        autocast: bool,
        torch_version: str | None,
    ) -> Iterator[str]:
        """Yields the assumptions of the prediction, as text."""
        routing = self.watch.routing
        if self.unequal_bytes and routing.was_used:
            least, most = min(self.unequal_bytes), max(self.unequal_bytes)
            yield (
                "tokens are routed to experts in equal parts; with all or nearly all of them to "
                f"the same experts the peak is {format_size(least)} to {format_size(most)}, as the "
                "bounds allow"
            )
        if routing.assumed_all:
            yield (
                f"a mask whose values are not known ({self.watch.masks[0]}) was taken as all true; "
                "the lower bound allows for all false"
            )
        if self.watch.reads:
            yield (
                f"the value that {self.watch.reads[0]} reads is not known; "
                "the peak was the same for each of several"
            )
        if not self.is_cuda:
            yield from self.cpu_kernels.notes()
            return
        # Without what is only estimated, which has a note of its own.
        most_bytes = error.size_bytes - self.estimated_bytes
        bounds = f"{format_percent(error.share)} % and {format_size(most_bytes)}"
        if is_measured:
            yield f"compared with an H200: a peak is at most {bounds} off"
        else:
            yield (
                "not compared with such a model on such a GPU: that a peak is at most "
                f"{bounds} off is an assumption"
            )
        yield from self.cuda_kernels.assumptions(
            compiled=compiled, autocast=autocast, torch_version=torch_version
        )


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


ChangeOfRun = Callable[[FakeRun, Sequence[nn.Module]], None]
"""Changes the blocks of the model that a run trains."""


def peak_of(recording: Recording) -> int:
    return find_peak(recording).size_bytes


def modules_of(
    model: nn.Module, path: str = "", is_inside_compiled: bool = False
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yields every module with its path in the original model, and whether a parent is compiled."""
    yield path, model, is_inside_compiled
    for name, child in model.named_children():
        child_path = f"{path}.{name}".lstrip(".")
        yield from modules_of(child, child_path, is_inside_compiled or is_compiled(model))


def _class_name(module: nn.Module) -> str:
    """Returns the name of a module's own class, which FSDP2 replaces by one of its own."""
    kind = type(module)
    return kind.__bases__[1].__name__ if isinstance(module, FSDPModule) else kind.__name__
