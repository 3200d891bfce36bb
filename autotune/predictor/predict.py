"""Predicts peak memory by running the training step of a trial on fake tensors.

A fake tensor has a shape, a dtype and a storage but no memory. The code of the trial allocates and
frees fake tensors as it does real ones; each storage is recorded, and the peak is computed from the
recording.

    fake_mode.py       fake tensors, and when their storages are allocated and freed
    generated_code.py  torch.compile: the program that inductor generates, without its kernels
    whole_numbers.py   what is known of whole numbers that such a program computes
    routing.py         how many tokens each expert gets
    cpu.py             memory that CPU kernels allocate while they run
    known_values.py    values of fake tensors that depend on neither data nor weights
    measured_kernels.py  the same of a kernel that is run once on zeros; recurrent.py: of an LSTM
    cuda.py            what differs on a CUDA device from a fake CPU
    work.py            floating-point operations and bytes accessed of the step
    gpu.py             the GPU and the torch release that a prediction is for
    attention.py       the attention kernel that torch chooses on that GPU, and its memory
    cublas.py          workspaces of matrix products on that GPU
    caching_allocator.py  the blocks that torch's CUDA allocator returns
    depths.py          a deep model from two shallow depths, checked at a third
    accuracy.py        how far predictions were from measurements

The recording, its peak and what holds the bytes at the peak are in `autotune/memory/`.

Imported only in the process of a prediction, which ends after it: settings and patches end with
the process.
"""

import base64
import gc
import pickle
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
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
from autotune.data.batches import Batch
from autotune.errors import InvalidInput, PredictionImpossible, causes_of, class_and_first_line_of
from autotune.memory.attribution import bytes_by_category, find_peak, largest_holders, make_timeline
from autotune.memory.recording import Recording
from autotune.predictor import cuda
from autotune.predictor.accuracy import error_of, is_measured_on_cuda
from autotune.predictor.caching_allocator import count_pieces, round_up
from autotune.predictor.cpu import CpuKernels
from autotune.predictor.depths import (
    Depths,
    Extrapolated,
    at_depth,
    choose_depths,
    deeper_than,
    extrapolate,
)
from autotune.predictor.fake_mode import StorageWatch, value_read_at
from autotune.predictor.generated_code import GeneratedPrograms, is_compiled
from autotune.predictor.gpu import gpu_of
from autotune.predictor.known_values import taken_for_real
from autotune.predictor.ranks import as_rank, ranks_alike, resizes_noted
from autotune.predictor.routing import UNEQUAL_PARTS
from autotune.predictor.work import WorkPerToken
from autotune.shipped.quantized import tensors_behind
from autotune.shipped.tensors import held_tensors
from autotune.spec.config import TrainingConfig, replicas
from autotune.spec.model_file import ignored_quantization
from autotune.spec.optimizers import OPTIMIZERS
from autotune.spec.prediction import Category, Holder, Prediction, PredictionRequest
from autotune.techniques import Training, apply_techniques
from autotune.techniques.optimizer import PAGED_ELEMENTS
from autotune.techniques.pinned_memory import bytes_to_host
from autotune.techniques.sharding import make_mesh
from autotune.training.step import TrainingStep
from autotune.units import format_percent, format_size

_FAKE_DEVICE = torch.device("cpu")
"""The device of all fake tensors, also in predictions for CUDA: no GPU is needed or touched."""

_WAY_OUT = "measure the configuration: a search works without predictions"
_KNOWN_REASONS = (
    PredictionImpossible,
    InvalidInput,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
_OTHER_ANSWERS = (0, 2, -(10.0**4), 10.0**4)
"""Values that are returned instead of 1 where a module reads a value, in one step after another."""
MICRO_BATCHES = 2
"""Micro batches that are run of a step. All after the second are like it: it finds gradients of an
earlier one and adds to them."""


Job = Callable[[], str]
RunJobs = Callable[[Sequence[Job]], list[str]]
"""Calls each of the functions, in whatever process, and returns their results."""


def in_turn(jobs: Sequence[Job]) -> list[str]:
    """Calls each of the functions in this process."""
    return [job() for job in jobs]


def predict(request: PredictionRequest, *, run_jobs: RunJobs = in_turn) -> Prediction:
    """Returns the predicted peak of a steady training step, of one device.

    `run_jobs` may run the depths of an extrapolated, compiled model at the same time. Raises
    PredictionImpossible where the model cannot run on fake tensors.
    """
    return predict_rank(request, run_jobs=run_jobs)[0]


def predict_rank(
    request: PredictionRequest, *, run_jobs: RunJobs = in_turn
) -> tuple[Prediction, list[list[int]]]:
    """Returns the prediction of one device, and the groups of devices that are alike.

    Only one rank can be predicted in a process: torch remembers its parts of tensors. Raises
    PredictionImpossible.
    """
    started = time.perf_counter()
    with _errors_translated():
        depths = None
        if request.may_be_extrapolated:
            depths = choose_depths(request.workload, request.config)
        if depths is None:
            step = _FakeTraining(request).run()
            prediction, alike = step.prediction(request), step.ranks_alike
        else:
            prediction, alike = _extrapolated(request, depths, run_jobs=run_jobs)
    return replace(prediction, seconds=time.perf_counter() - started), alike


@contextmanager
def _errors_translated() -> Iterator[None]:
    """Raises PredictionImpossible for any error inside it, which goes to this process's log."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        raise _to_prediction_impossible(error) from error


def of_all_ranks(predictions: Sequence[Prediction], alike: Sequence[Sequence[int]]) -> Prediction:
    """Returns the prediction of the device that needs most, with the peaks of all.

    There is one prediction for each group of devices that are alike.
    """
    peaks = {
        rank: prediction.peak_memory_bytes
        for group, prediction in zip(alike, predictions, strict=True)
        for rank in group
    }
    return replace(
        max(predictions, key=lambda prediction: prediction.peak_memory_bytes),
        devices=len(peaks),
        peak_memory_bytes_by_rank=tuple(peaks[rank] for rank in sorted(peaks)),
        distinct_ranks=len(alike),
    )


def _extrapolated(
    request: PredictionRequest, depths: Depths, *, run_jobs: RunJobs
) -> tuple[Prediction, list[list[int]]]:
    """Returns the prediction of the whole model by shallower ones, if their check confirms them.

    Where the check is off by too much, a compiled model is tried at two deeper depths, and then the
    model is predicted at its whole depth.
    """
    attempts = [depths]
    if request.config.compile == "model" and (deeper := deeper_than(depths)) is not None:
        attempts.append(deeper)
    steps: dict[int, _FakeStep] = {}
    for attempt in attempts:
        missing = [layers for layers in attempt.predicted if layers not in steps]
        steps.update(_steps_at(missing, request, run_jobs=run_jobs))
        first, second, check = (steps[layers] for layers in attempt.predicted)
        found = extrapolate(attempt, first.recording, second.recording, check.recording)
        if found is not None and found.is_trusted and not second.unequal_bytes:
            prediction = second.extrapolated(request, attempt, found, at_first=first)
            return prediction, second.ranks_alike
    whole = _FakeTraining(request).run()
    prediction = whole.prediction(request)
    notes = (*prediction.notes, _why_whole(attempt, found))
    return replace(prediction, notes=notes), whole.ranks_alike


def _steps_at(
    depths: Sequence[int], request: PredictionRequest, *, run_jobs: RunJobs
) -> dict[int, "_FakeStep"]:
    """Returns the steps of models with these numbers of layers.

    Of a compiled model, the deepest one runs at the same time as the others.
    """
    if request.config.compile != "model":
        return _shallow_steps(depths, request)
    jobs = [partial(_pickled_steps, part, request) for part in (depths[:-1], depths[-1:]) if part]
    steps: dict[int, _FakeStep] = {}
    for pickled in run_jobs(jobs):
        steps.update(pickle.loads(base64.b64decode(pickled)))
    return steps


def _shallow_steps(depths: Sequence[int], request: PredictionRequest) -> dict[int, "_FakeStep"]:
    steps = {}
    for layers in depths:
        shallow = replace(request, workload=at_depth(request.workload, layers))
        steps[layers] = _FakeTraining(shallow).run()
        if request.config.compile != "none":
            torch.compiler.reset()  # or the code of the depth before might be reused
    return steps


def _pickled_steps(depths: Sequence[int], request: PredictionRequest) -> str:
    """Returns `_shallow_steps` as text that another process can send."""
    with _errors_translated():
        return base64.b64encode(pickle.dumps(_shallow_steps(depths, request))).decode()


def _why_whole(depths: Depths, found: Extrapolated | None) -> str:
    from_two = f"what {depths.first} and {depths.second} layers need"
    if found is None:
        reason = "another operator sets the peak there"
    else:
        reason = f"was off by {format_size(found.check_error_bytes)} there"
    return (
        f"predicted at its whole depth of {depths.whole} layers: {from_two} does not say what "
        f"{depths.check} need ({reason})"
    )


@dataclass(frozen=True, kw_only=True)
class _FakeStep:
    """A recorded step, with what the recording does not have."""

    recording: Recording
    """With the sizes of the allocator's blocks."""
    workspace_bytes: int
    parameters: int
    estimated_bytes: int
    """What is only estimated, or unknown: the bounds allow for it."""
    host_bytes: int
    """What offloading takes of the host's memory."""
    plan: str | None
    notes: tuple[str, ...]
    ranks_alike: list[list[int]]
    work: WorkPerToken
    unquantized: tuple[int, int]
    """How many numbers of frozen weights are not quantized, and how many are."""
    unequal_bytes: tuple[int, ...] = ()
    """The peaks if all tokens choose the same experts; empty where no routing was predicted."""

    def prediction(self, request: PredictionRequest) -> Prediction:
        """Returns the prediction that this step is."""
        peak = find_peak(self.recording)
        last = peak.last_block
        prediction = self._of_peak(
            request,
            phase=peak.phase,
            module=last.module if last else "",
            operator=last.operator if last else "",
            sizes=bytes_by_category(peak.blocks),
            holders=largest_holders(peak.blocks),
            host_bytes=self.host_bytes,
            work=self.work,
            unquantized=self.unquantized,
        )
        timeline = make_timeline(self.recording, peak) if request.with_timeline else None
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
        request: PredictionRequest,
        depths: Depths,
        found: Extrapolated,
        *,
        at_first: "_FakeStep",
    ) -> Prediction:
        """Returns the prediction of the whole model; this step is the one at the second depth."""
        periods = (depths.whole - depths.second) // (depths.second - depths.first)
        prediction = self._of_peak(
            request,
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
        request: PredictionRequest,
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
        error = error_of(
            request.config,
            device=request.device,
            is_measured=is_measured_on_cuda(request.workload, request.compute_capability),
            estimated_bytes=self.estimated_bytes,
        )
        notes = self.notes
        if host_bytes:
            taken = f"offload {request.config.offload} takes {format_size(host_bytes)}"
            notes = (*notes, f"{taken} of the host's memory for each device")
        share = unquantized_share(*unquantized)
        if left := why_left_in_16_bits(request.config, share):
            notes = (*notes, left)
        return Prediction(
            device=request.device,
            fake_device=_FAKE_DEVICE.type,
            peak_memory_bytes=peak_bytes,
            upper_bound_bytes=error.upper_bound(peak_bytes) + allowance_bytes,
            lower_bound_bytes=max(0, error.lower_bound(peak_bytes) - allowance_bytes),
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


class _FakeTraining:
    """Two training steps on fake tensors, of which the second one is the prediction.

    The first one compiles and creates the optimizer's state. For a GPU it is recorded as well: what
    it leaves decides which pieces the allocator has for the second one.
    """

    def __init__(self, request: PredictionRequest) -> None:
        self._request = request
        self._is_cuda = request.device == "cuda"
        self._gpu = gpu_of(request.compute_capability, request.torch_version)
        self._kernels = cuda.CudaKernels(self._gpu)
        self._cpu_kernels = CpuKernels()
        if self._is_cuda:
            self._watch = StorageWatch(round_up=round_up, scratch=self._kernels.scratch)
            self._kernels.cublas.note = self._watch.note_workspace
        else:
            self._watch = StorageWatch(
                scratch=lambda *call: [[self._cpu_kernels.scratch_bytes(*call)]],
                workspace=self._cpu_kernels.workspace_bytes,
            )
        self._programs = GeneratedPrograms(self._watch, for_gpu=self._is_cuda)
        self._first_step = Recording()
        """What the first step allocates on a GPU."""
        self._parameters = 0
        self._host_bytes = 0
        self._unquantized = (0, 0)
        self._unequal_bytes: list[int] = []
        self._share_without_gradient = 0.0
        self._ranks_alike: list[list[int]] = []
        self._work_per_token = WorkPerToken()

    def run(self) -> _FakeStep:
        recording = self._record()
        workspace_bytes = self._round_to_allocator_blocks(recording)
        return _FakeStep(
            recording=recording,
            workspace_bytes=workspace_bytes,
            parameters=self._parameters,
            estimated_bytes=(
                self._kernels.cudnn_bytes if self._is_cuda else self._cpu_kernels.unknown_bytes
            ),
            host_bytes=self._host_bytes,
            unquantized=self._unquantized,
            plan=self._programs.plan,
            notes=tuple(self._notes()),
            ranks_alike=self._ranks_alike,
            work=self._work_per_token,
            unequal_bytes=tuple(self._unequal_bytes),
        )

    def _round_to_allocator_blocks(self, recording: Recording) -> int:
        """Replaces each size by that of the allocator's block; returns the workspaces' bytes."""
        if not self._is_cuda:
            return 0
        if self._request.config.allocator == "expandable":
            # Every block is split to the size of the request.
            return sum(self._kernels.cublas.persistent)
        warmup_steps = self._request.workload.warmup_steps
        return count_pieces(self._first_step, recording, warmup_steps=warmup_steps)

    def _record(self) -> Recording:
        request = self._request
        with ExitStack() as stack:
            devices = request.workload.devices_per_trial
            if devices > 1 or request.config.offload == "all":
                stack.enter_context(as_rank(request.rank, of=devices))
            mesh = make_mesh(request.config, devices=devices, device=_FAKE_DEVICE)
            stack.enter_context(resizes_noted(self._watch.note_resized))
            stack.enter_context(self._watch.mode)
            if self._is_cuda:
                stack.enter_context(
                    cuda.offloaded_off_device(self._watch, place=request.config.offload)
                )
                stack.enter_context(cuda.gpu_kernels(self._gpu, backend=request.config.attention))
            stack.enter_context(self._programs.active())
            training = apply_techniques(
                request.config, request.workload, weights_file=None, device=_FAKE_DEVICE, mesh=mesh
            )
            stack.enter_context(taken_for_real())
            self._parameters = training.number_of_parameters
            self._unquantized = training.unquantized
            if self._is_cuda:
                self._host_bytes = bytes_to_host(request.config, training.parts.model.parameters())
            self._ranks_alike = ranks_alike(training, request.config, devices=devices)
            stack.enter_context(self._watch_model(training.parts.model))
            if not self._is_cuda:
                stack.enter_context(self._count_random_states())
            step = TrainingStep(
                training,
                workload=request.workload,
                config=request.config,
                device=_FAKE_DEVICE,
                marker=self._watch,
            )
            try:
                if self._is_cuda:
                    self._first_step = self._recorded(step, training, number=0)
                else:
                    step(0, self._batch())
                recording = self._recorded(step, training)
                self._work_per_token = self._count_work()
            except Exception as error:
                if self._watch.latest_unknown and not isinstance(error, _KNOWN_REASONS):
                    raise _depends_on(self._watch.latest_unknown) from error
                raise
            self._run_alternatives(step, training, recording)
            return recording

    def _recorded(self, step: TrainingStep, training: Training, *, number: int = 1) -> Recording:
        """Runs a step and returns what it allocates."""
        gc.collect()
        config = self._request.config
        batch = self._batch()
        on_device = self._copies_on_device(training)
        with self._watch.recording(
            lambda: [*_resident(training, config, is_cuda=self._is_cuda), *on_device]
        ) as recording:
            step(number, batch)
        return recording

    def _copies_on_device(self, training: Training) -> list[tuple[Category, str, Tensor]]:
        """Returns the tokens and labels of a step as the GPU holds them: for all micro batches."""
        if not self._is_cuda:
            return []
        workload = self._request.workload
        rows = torch.zeros(workload.global_batch, workload.sequence_length, dtype=torch.long)
        of_device = training.devices.part_of(rows)
        return [("inputs", name, of_device.clone()) for name in ("tokens", "labels")]

    def _run_alternatives(
        self, step: TrainingStep, training: Training, recording: Recording
    ) -> None:
        """Repeats the step as other values would let it run, where the program reads values.

        Raises PredictionImpossible where such a value changes the peak.
        """
        watch, routing = self._watch, self._watch.routing
        if routing.was_used:
            for routing.parts in UNEQUAL_PARTS:
                peak_bytes = _peak_bytes(self._recorded(step, training))
                # Experts that are never chosen have no state of the optimizer either.
                state_bytes = _bytes_of(training.updater.state())
                unused_bytes = round(self._share_without_gradient * state_bytes)
                self._unequal_bytes.append(peak_bytes - unused_bytes)
            routing.parts = "equal"
        if routing.assumed_all:
            routing.unknown_is_all = False
            try:
                self._unequal_bytes.append(_peak_bytes(self._recorded(step, training)))
            except Exception:  # not every program runs with nothing selected
                traceback.print_exc()
            routing.unknown_is_all = True
        if not watch.reads:
            return
        peak_bytes, agreeing = _peak_bytes(recording), 1
        for watch.answer in _OTHER_ANSWERS:
            try:
                other_bytes = _peak_bytes(self._recorded(step, training))
            except Exception:  # a value that the model does not accept, by an assertion or a shape
                traceback.print_exc()
                continue
            if other_bytes != peak_bytes:
                raise _depends_on(value_read_at(watch.reads[-1]))
            agreeing += 1
        if agreeing == 1:
            raise _depends_on(value_read_at(watch.reads[-1]))

    def _count_work(self) -> WorkPerToken:
        """Returns the work per token of the recorded step."""
        workload = self._request.workload
        return self._watch.work.per_token(
            tokens_recorded=self._sequences() * workload.sequence_length,
            tokens_of_step=workload.global_batch * workload.sequence_length,
            devices=workload.devices_per_trial,
        )

    def _sequences(self) -> int:
        """Returns how many sequences are run: as many micro batches as can differ in memory."""
        workload = self._request.workload
        config = self._request.config
        size = replicas(config.to_dict(), workload.legality_context)
        return min(workload.global_batch, MICRO_BATCHES * config.micro_batch_size * size)

    def _batch(self) -> Batch:
        """Returns a batch on the host, of unknown tokens.

        On a CPU tokens and labels are views of the same rows, and micro batches are copied out of
        them. What is moved to a GPU is contiguous there, so that its micro batches are no copies.
        """
        length = self._request.workload.sequence_length
        if self._is_cuda:
            rows = torch.empty(self._sequences(), length, dtype=torch.long)
            return Batch(rows, rows.clone())
        rows = torch.empty(self._sequences(), length + 1, dtype=torch.long)
        return Batch(rows[:, :-1], rows[:, 1:])

    @contextmanager
    def _watch_model(self, model: nn.Module) -> Iterator[None]:
        """Tells the watch which module runs and, when an optimizer steps, the gradients."""
        for path, module, is_inside_compiled in _modules_of(model):
            if not is_inside_compiled:
                self._watch_module(module, path or _class_name(module))

        def mark_gradients(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            gradients = [p.grad for p in parameters]
            unused_bytes = _bytes_of(p for p in parameters if p.grad is None)
            self._share_without_gradient = unused_bytes / max(1, _bytes_of(parameters))
            self._watch.mark_gradients(
                part
                for gradient in gradients
                if gradient is not None
                for part in tensors_behind(gradient)  # of a divided one, this device's part
            )

        with register_optimizer_step_pre_hook(mark_gradients):
            yield

    @contextmanager
    def _count_random_states(self) -> Iterator[None]:
        """Counts the states of the random number generator that checkpointing stores.

        They take 5 KiB for each region, which on a CPU is memory like any other.
        """
        get_state = torch.get_rng_state

        def get_counted_state() -> Tensor:
            state = get_state()
            self._watch.note_real(state)
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
        if ignored := ignored_quantization(self._request.workload.model_config):
            yield ignored
        routing = self._watch.routing
        if self._unequal_bytes and routing.was_used:
            least, most = min(self._unequal_bytes), max(self._unequal_bytes)
            yield (
                "tokens are routed to experts in equal parts; with all or nearly all of them to "
                f"the same experts the peak is {format_size(least)} to {format_size(most)}, as the "
                "bounds allow"
            )
        if routing.assumed_all:
            yield (
                "a mask whose values are not known was taken as all true; the lower bound allows "
                "for all false"
            )
        if self._watch.reads:
            yield (
                f"the value that {self._watch.reads[0]} reads is not known; "
                "the peak was the same for each of several"
            )
        if not self._is_cuda:
            yield from self._cpu_kernels.notes()
        else:
            config = self._request.config
            yield self._bounds_in_words()
            yield from self._kernels.assumptions(
                compiled=config.compile != "none",
                autocast=config.precision.endswith("mixed") or config.precision == "fp8",
                torch_version=self._request.torch_version,
            )

    def _bounds_in_words(self) -> str:
        request = self._request
        is_measured = is_measured_on_cuda(request.workload, request.compute_capability)
        error = error_of(request.config, device="cuda", is_measured=is_measured)
        most = f"{format_percent(error.share)} % and {format_size(error.size_bytes)}"
        if is_measured:
            return f"compared with an H200: a peak is at most {most} off"
        return (
            f"not compared with such a model on such a GPU: that a peak is at most {most} off is "
            "an assumption"
        )


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _peak_bytes(recording: Recording) -> int:
    return find_peak(recording).size_bytes


def _depends_on(unknown: str) -> PredictionImpossible:
    return PredictionImpossible(
        f"the model cannot be predicted: {unknown} decides how much memory is needed", hint=_WAY_OUT
    )


def _modules_of(
    model: nn.Module, path: str = "", is_inside_compiled: bool = False
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yields every module with its path in the original model, and whether a parent is compiled."""
    yield path, model, is_inside_compiled
    for name, child in model.named_children():
        child_path = f"{path}.{name}".lstrip(".")
        yield from _modules_of(child, child_path, is_inside_compiled or is_compiled(model))


def _class_name(module: nn.Module) -> str:
    """Returns the name of a module's own class, which FSDP2 replaces by one of its own."""
    kind = type(module)
    return kind.__bases__[1].__name__ if isinstance(module, FSDPModule) else kind.__name__


def _resident(
    training: Training, config: TrainingConfig, *, is_cuda: bool
) -> Iterator[tuple[Category, str, Tensor]]:
    """Yields category, name and tensor of everything that is on the device between two steps.

    Paged state is in memory that the device's allocator does not know of. An optimizer's count of
    its steps is a scalar that a GPU has only for a fused update (torch/optim/adam.py, _init_group).
    """
    has_paged_state = is_cuda and OPTIMIZERS[config.optimizer].is_paged
    counts_on_host = is_cuda and config.optimizer_fusion != "kernel"
    has_weights = not (is_cuda and config.offload == "all")
    modules = [(path, module) for path, module, _ in _modules_of(training.parts.model)]
    for path, module in modules if has_weights else ():
        for name, parameter in module.named_parameters(recurse=False):
            for part in tensors_behind(parameter):
                yield "parameters", f"{path}.{name}", part
    for path, module in modules:
        for name, tensor in held_tensors(module):
            yield "buffers", f"{path}.{name}", tensor
    for tensor in training.devices.held():
        yield "gradients", "buckets of gradients", tensor
    for tensor in training.updater.state() if has_weights else ():
        is_paged = has_paged_state and tensor.numel() >= PAGED_ELEMENTS
        is_count_on_host = counts_on_host and tensor.dim() == 0
        if not (is_paged or is_count_on_host):
            yield "optimizer_state", "optimizer state", tensor


def _to_prediction_impossible(error: BaseException) -> PredictionImpossible:
    """Translates an error of the fake training.

    The message names the operator that fake tensors do not support, if that is the error or one of
    its causes.
    """
    hint = _WAY_OUT
    for cause in causes_of(error):
        if isinstance(cause, PredictionImpossible):
            return cause
        if isinstance(cause, InvalidInput):  # such as a config.json of no language model
            return PredictionImpossible(cause.message, hint=cause.hint)
        if isinstance(cause, DataDependentOutputException | DynamicOutputShapeException):
            return PredictionImpossible(
                f"the model cannot be predicted: what follows {cause.func} depends on values, not "
                "only on shapes",
                hint=hint,
            )
        if isinstance(cause, UnsupportedOperatorException):
            return PredictionImpossible(
                f"the model cannot be predicted: fake tensors do not support {cause.func}",
                hint=hint,
            )
    return PredictionImpossible(
        f"the prediction failed: {class_and_first_line_of(error)}", hint=hint
    )
