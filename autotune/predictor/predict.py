"""Predicts peak memory by running the training step of a trial on fake tensors.

A fake tensor has a shape, a dtype and a storage but no memory. The code of the trial allocates and
frees fake tensors as it does real ones; each storage is recorded, and the peak is computed from the
recording.

    user_training.py   the same of a user's own modules, optimizers and step
    double.py          copies these, with fake tensors; one_device.py runs what names a GPU
    memory_fit.py      whether they fit, and what would make them fit
    activation_budget.py  what its blocks keep within a budget; block_traces.py: what they run
    fake_step.py       a step on fake tensors, its peak and its bounds, whoever brings the step
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from autotune.data.batches import Batch
from autotune.errors import InvalidInput, PredictionImpossible, causes_of, class_and_first_line_of
from autotune.memory.recording import Recording
from autotune.predictor import cuda
from autotune.predictor.accuracy import error_of, is_measured_on_cuda
from autotune.predictor.activation_budget import ActivationPlanner
from autotune.predictor.caching_allocator import count_pieces
from autotune.predictor.depths import (
    Depths,
    Extrapolated,
    at_depth,
    choose_depths,
    deeper_than,
    extrapolate,
)
from autotune.predictor.fake_step import (
    FAKE_DEVICE,
    WAY_OUT,
    ChangeOfRun,
    FakeRun,
    FakeStep,
    modules_of,
)
from autotune.predictor.gpu import gpu_of
from autotune.predictor.known_values import taken_for_real
from autotune.predictor.ranks import as_rank, ranks_alike, resizes_noted
from autotune.predictor.work import WorkPerToken
from autotune.shipped.quantized import scales_beside, tensors_behind
from autotune.shipped.tensors import held_tensors
from autotune.spec.config import TrainingConfig, replicas
from autotune.spec.model_file import ignored_quantization
from autotune.spec.optimizers import OPTIMIZERS
from autotune.spec.prediction import Category, Prediction, PredictionRequest
from autotune.spec.setting import NO_LIMIT
from autotune.techniques import ChangeBlocks, Training, apply_techniques, kernels
from autotune.techniques.checkpointing import in_words, keep_in_blocks
from autotune.techniques.feed_forward import check_tiles_of
from autotune.techniques.optimizer import PAGED_ELEMENTS
from autotune.techniques.pinned_memory import bytes_to_host
from autotune.techniques.sharding import make_mesh
from autotune.training.step import TrainingStep
from autotune.units import format_size, parse_size

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
        check_tiles_of(request.workload, request.config)
        depths = None
        if request.may_be_extrapolated:
            depths = choose_depths(request.workload, request.config)
        if depths is None and request.config.activation_budget != NO_LIMIT and not request.kept:
            prediction, alike = _within_budget(request)
        elif depths is None:
            step = _FakeTraining(request).run()
            prediction, alike = _prediction_of(step, request), step.ranks_alike
        else:
            prediction, alike = _extrapolated(request, depths, run_jobs=run_jobs)
    return replace(prediction, seconds=time.perf_counter() - started), alike


def _within_budget(request: PredictionRequest) -> tuple[Prediction, list[list[int]]]:
    """Returns the prediction with the fastest plan within the activation budget."""
    alike: list[list[int]] = []

    def run(change: ChangeOfRun) -> tuple[Prediction, Recording]:
        step = _FakeTraining(request, change).run()
        alike[:] = step.ranks_alike
        return _prediction_of(step, request), step.recording

    planner = ActivationPlanner(run=run)
    found = planner.find(parse_size(request.config.activation_budget))
    return replace(found.prediction, kept=tuple(map(in_words, found.kept))), alike


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
    steps: dict[int, FakeStep] = {}
    for attempt in attempts:
        missing = [layers for layers in attempt.predicted if layers not in steps]
        steps.update(_steps_at(missing, request, run_jobs=run_jobs))
        first, second, check = (steps[layers] for layers in attempt.predicted)
        found = extrapolate(attempt, first.recording, second.recording, check.recording)
        if found is not None and found.is_trusted and not second.unequal_bytes:
            prediction = second.extrapolated(request.config, attempt, found, at_first=first)
            return prediction, second.ranks_alike
    whole = _FakeTraining(request).run()
    prediction = _prediction_of(whole, request)
    notes = (*prediction.notes, _why_whole(attempt, found))
    return replace(prediction, notes=notes), whole.ranks_alike


def _steps_at(
    depths: Sequence[int], request: PredictionRequest, *, run_jobs: RunJobs
) -> dict[int, "FakeStep"]:
    """Returns the steps of models with these numbers of layers.

    Of a compiled model, the deepest one runs at the same time as the others.
    """
    if request.config.compile != "model":
        return _shallow_steps(depths, request)
    jobs = [partial(_pickled_steps, part, request) for part in (depths[:-1], depths[-1:]) if part]
    steps: dict[int, FakeStep] = {}
    for pickled in run_jobs(jobs):
        steps.update(pickle.loads(base64.b64decode(pickled)))
    return steps


def _shallow_steps(depths: Sequence[int], request: PredictionRequest) -> dict[int, "FakeStep"]:
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


def _prediction_of(step: FakeStep, request: PredictionRequest) -> Prediction:
    prediction = step.prediction(request.config, with_timeline=request.with_timeline)
    return replace(prediction, kept=request.kept)


class _FakeTraining(FakeRun):
    """Two training steps on fake tensors, of which the second one is the prediction.

    The first one compiles and creates the optimizer's state. For a GPU it is recorded as well: what
    it leaves decides which pieces the allocator has for the second one.
    """

    def __init__(
        self, request: PredictionRequest, change_blocks: ChangeOfRun | None = None
    ) -> None:
        self._request = request
        self._change_blocks: ChangeBlocks | None = None
        if change_blocks is not None:
            self._change_blocks = partial(change_blocks, self)
        elif request.kept:
            self._change_blocks = partial(keep_in_blocks, planned=request.kept)
        is_cuda = request.device == "cuda"
        gpu = gpu_of(request.compute_capability, request.torch_version)
        super().__init__(gpu if is_cuda else None)
        self._first_step = Recording()
        """What the first step allocates on a GPU."""
        self._parameters = 0
        self._host_bytes = 0
        self._unquantized = (0, 0)
        self._ranks_alike: list[list[int]] = []
        self._left_out: tuple[str, ...] = ()
        """What of the configuration is not in the prediction."""
        self._work_per_token = WorkPerToken()

    def run(self) -> FakeStep:
        request, config = self._request, self._request.config
        recording = self._record()
        workspace_bytes = self._round_to_allocator_blocks(recording)
        is_measured = is_measured_on_cuda(request.workload, request.compute_capability)
        error = error_of(
            config,
            device=request.device,
            is_measured=is_measured,
            estimated_bytes=self.estimated_bytes,
        )
        ignored = ignored_quantization(request.workload.model_config)
        notes = self.notes(
            error,
            is_measured=is_measured,
            compiled=config.compile != "none",
            autocast=config.precision.endswith("mixed") or config.precision == "fp8",
            torch_version=request.torch_version,
        )
        return FakeStep(
            device=request.device,
            recording=recording,
            error=error,
            workspace_bytes=workspace_bytes,
            parameters=self._parameters,
            host_bytes=self._host_bytes,
            unquantized=self._unquantized,
            plan=self.programs.plan,
            notes=((ignored,) if ignored else ()) + self._left_out + tuple(notes),
            ranks_alike=self._ranks_alike,
            work=self._work_per_token,
            unequal_bytes=tuple(self.unequal_bytes),
        )

    def _round_to_allocator_blocks(self, recording: Recording) -> int:
        """Replaces each size by that of the allocator's block; returns the workspaces' bytes."""
        if not self.is_cuda:
            return 0
        if self._request.config.allocator == "expandable":
            # Every block is split to the size of the request.
            return sum(self.cuda_kernels.cublas.persistent)
        warmup_steps = self._request.workload.warmup_steps
        return count_pieces(self._first_step, recording, warmup_steps=warmup_steps)

    def _record(self) -> Recording:
        request = self._request
        with ExitStack() as stack:
            devices = request.workload.devices_per_trial
            if devices > 1 or request.config.offload == "all":
                stack.enter_context(as_rank(request.rank, of=devices))
            mesh = make_mesh(request.config, devices=devices, device=FAKE_DEVICE)
            stack.enter_context(resizes_noted(self.watch.note_resized))
            stack.enter_context(self.watch.mode)
            stack.enter_context(cuda.frozen_off_device(self.watch))
            if self.gpu is not None:
                stack.enter_context(
                    cuda.offloaded_off_device(self.watch, place=request.config.offload)
                )
                stack.enter_context(cuda.gpu_kernels(self.gpu, backend=request.config.attention))
            stack.enter_context(self.programs.active())
            training = apply_techniques(
                request.config,
                request.workload,
                weights_file=None,
                device=FAKE_DEVICE,
                mesh=mesh,
                change_blocks=self._change_blocks,
            )
            stack.enter_context(taken_for_real())
            self._parameters = training.number_of_parameters
            self._unquantized = training.unquantized
            if request.config.kernels != "none" and (reason := kernels.why_not(training.parts)):
                self._left_out = (f"without kernels {request.config.kernels}: {reason}",)
            if self.is_cuda:
                self._host_bytes = bytes_to_host(request.config, training.parts.model.parameters())
            self._ranks_alike = ranks_alike(training, request.config, devices=devices)
            stack.enter_context(self.watch_models({"": training.parts.model}))
            if not self.is_cuda:
                stack.enter_context(self.count_random_states())
            step = TrainingStep(
                training,
                workload=request.workload,
                config=request.config,
                device=FAKE_DEVICE,
                marker=self.watch,
            )
            with self.reasons_named():
                if self.is_cuda:
                    self._first_step = self._recorded(step, training, number=0)
                else:
                    step(0, self._batch())
                recording = self._recorded(step, training)
                self._work_per_token = self._count_work()
            self.run_alternatives(
                recording,
                again=lambda: self._recorded(step, training),
                state=lambda: training.updater.state(),
            )
            return recording

    def _recorded(self, step: TrainingStep, training: Training, *, number: int = 1) -> Recording:
        """Runs a step and returns what it allocates."""
        gc.collect()
        config = self._request.config
        batch = self._batch()
        on_device = self._copies_on_device(training)
        with self.watch.recording(
            lambda: [*_resident(training, config, is_cuda=self.is_cuda), *on_device]
        ) as recording:
            step(number, batch)
        return recording

    def _copies_on_device(self, training: Training) -> list[tuple[Category, str, Tensor]]:
        """Returns the tokens and labels of a step as the GPU holds them: for all micro batches."""
        if not self.is_cuda:
            return []
        workload = self._request.workload
        rows = torch.zeros(workload.global_batch, workload.sequence_length, dtype=torch.long)
        of_device = training.devices.part_of(rows)
        return [("inputs", name, of_device.clone()) for name in ("tokens", "labels")]

    def _count_work(self) -> WorkPerToken:
        """Returns the work per token of the recorded step."""
        workload = self._request.workload
        return self.watch.work.per_token(
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
        if self.is_cuda:
            rows = torch.empty(self._sequences(), length, dtype=torch.long)
            return Batch(rows, rows.clone())
        rows = torch.empty(self._sequences(), length + 1, dtype=torch.long)
        return Batch(rows[:, :-1], rows[:, 1:])


def _resident(
    training: Training, config: TrainingConfig, *, is_cuda: bool
) -> Iterator[tuple[Category, str, Tensor]]:
    """Yields category, name and tensor of everything that is on the device between two steps.

    Paged state is in memory that the device's allocator does not know of. An optimizer's count of
    its steps is a scalar that a GPU has only for a fused update (torch/optim/adam.py, _init_group).
    Scales of quantized weights stay there where the weights are on the host.
    """
    has_paged_state = is_cuda and OPTIMIZERS[config.optimizer].is_paged
    counts_on_host = is_cuda and config.optimizer_fusion != "kernel"
    has_weights = not (is_cuda and config.offload == "all")
    modules = [(path, module) for path, module, _ in modules_of(training.parts.model)]
    for path, module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            for part in tensors_behind(parameter) if has_weights else scales_beside(parameter):
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
    hint = WAY_OUT
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
