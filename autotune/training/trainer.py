"""Trains one configuration in this process: build, warm up, measure memory, time, evaluate.

    steps          warm-up (compiles) | memory is recorded | timed, until the workload's last step
    peak memory    the most bytes that were allocated at once, in the recorded steps or evaluation
    speed          tokens of a step, without padding / median seconds of the timed steps
    perplexity     exp(mean token loss on the held-out text, in nats)
    bits per byte  mean token loss / ln 2 / bytes per token

Steps whose memory is recorded are not timed, since recording slows them down. A trial that shares
its perplexity with another one of the same numerics takes fewer timed steps and evaluates one micro
batch only, for its memory.

Every trial has a process for itself, so that a leaked setting or a crash cannot reach the next one.
Failures are exceptions here; `execution/process/failures.py` turns them into outcomes. Left
out on purpose: whatever prepares text (`autotune/data/`, once a study), checkpoints of the weights,
and evaluation between steps. They are the same for every configuration.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch._dynamo.utils
import torch._inductor.config
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from autotune.analysis.reasons import unquantized_share
from autotune.data.batches import Batch, TokenSequences
from autotune.data.token_file import TextFacts
from autotune.memory.attribution import bytes_by_category, find_peak
from autotune.memory.communication import Communication, communication_on_cuda
from autotune.memory.device_meter import make_meter
from autotune.memory.history import StepHistory
from autotune.memory.meter import MemoryMeter, MemoryReading, PhaseMarker, resident_bytes
from autotune.shipped.quantized import tensors_behind
from autotune.shipped.seeds import seed_generators
from autotune.shipped.tensors import held_tensors
from autotune.shipped.token_loss import learned_labels
from autotune.shipped.training_order import training_order
from autotune.spec.cap import is_over_cap
from autotune.spec.early_stopping import SETTLED_STEPS, PruningBound, dominated_by
from autotune.spec.limits import LARGEST_LOSS
from autotune.spec.parity import PARITY_STEPS, ParityTrace
from autotune.spec.provenance import MEASURED, PerplexitySource
from autotune.spec.result import Measurement
from autotune.spec.training_request import ReportsStage, TrainingRequest, unwatched
from autotune.spec.workload import MEMORY_STEPS, SHORT_TIMED_STEPS
from autotune.techniques import Training, apply_techniques, before_the_device
from autotune.techniques.checkpointing import keep_in_blocks
from autotune.techniques.feed_forward import check_tiles_of
from autotune.techniques.pinned_memory import (
    bound_pinned_memory,
    bytes_to_host,
    offloaded_bytes,
    on_device,
)
from autotune.techniques.sharding import make_mesh
from autotune.training.parity import ParityWatch
from autotune.training.speed import DeviceClock, StepEnd, TimedStep, measured_speed
from autotune.training.step import Diverged, TrainingStep, check_finite
from autotune.training.turns import Turns
from autotune.training.verdict import judged

_BYTES_FOR_PROFILER = 1 << 30
"""What every device must have free for the profiler of CUDA, which takes far less."""


def train(request: TrainingRequest, *, progress: ReportsStage = unwatched) -> Measurement:
    """Trains the workload's steps and returns their measurement; no step with `evaluates_only`.

    Raises ParityFailed, Diverged and whatever torch raises.
    """
    before_the_device(request.config)
    trainer = Trainer(request, progress=progress)
    return trainer.evaluate_untrained() if request.evaluates_only else trainer.run()


def train_in_turn(
    request: TrainingRequest, *, turns: Turns, progress: ReportsStage = unwatched
) -> Measurement:
    """Trains while `turns` lets it, which gets the time of its steps; returns only the outcome.

    Raises Diverged and whatever torch raises.
    """
    before_the_device(request.config)
    Trainer(request, progress=progress).run_in_turn(turns)
    return Measurement(outcome="ok")


def trace(
    request: TrainingRequest, *, dropout: bool, progress: ReportsStage = unwatched
) -> ParityTrace:
    """Trains the first steps and returns their trace, to compare with another configuration's.

    Without `dropout` the model is in evaluation mode. Compiled code is made to draw the random
    numbers of eager code, which costs memory and time, so this training is not used to measure
    either.
    """
    before_the_device(request.config)
    torch._inductor.config.fallback_random = True
    trainer = Trainer(request, is_trace=True, progress=progress)
    trainer.training.parts.model.train(dropout)
    # Also without dropout the loss is that of training, not the cross entropy of evaluation.
    trainer.training.parts.model.training = True
    batches = trainer.batches()
    progress("step")
    for step in range(PARITY_STEPS):
        trainer.take_step(step, next(batches))
    return trainer.parity.trace()


class Trainer:
    """Builds a training with all techniques applied, then runs and measures it."""

    def __init__(
        self,
        request: TrainingRequest,
        *,
        is_trace: bool = False,
        progress: ReportsStage = unwatched,
        phase_marker: PhaseMarker | None = None,
    ) -> None:
        """Builds the training. `phase_marker` is told the phases of steps, in place of the meter.

        Raises as `apply_techniques` does.
        """
        self._request, self._progress = request, progress
        self._config, self._workload = request.config, request.workload
        self._device = torch.device(request.device)
        check_tiles_of(self._workload, self._config)
        seed_generators(self._workload.seed)
        started = time.monotonic()
        self._meter: MemoryMeter = make_meter(
            self._device,
            uuid=request.device_uuid,
            cap_bytes=request.cap_bytes if request.enforce_cap else None,
            new_context_bytes=request.new_context_bytes,
            shares_device=request.shares_device,
        )
        self._device_startup_seconds = time.monotonic() - started
        self._startup_seconds = 0.0
        self._seconds_by_part: dict[str, float] = {}
        self._last_step = 0
        """How many steps the training has; 0 where that is not known."""
        self._communication: Communication | None = None
        """Of a step on several devices, as far as it was profiled."""
        self.training: Training = apply_techniques(
            self._config,
            self._workload,
            weights_file=request.folder / "weights.pt",
            device=self._device,
            mesh=make_mesh(
                self._config, devices=self._workload.devices_per_trial, device=self._device
            ),
            dequantized=request.dequantized,
            change_blocks=partial(keep_in_blocks, planned=request.kept) if request.kept else None,
        )
        if self._device.type == "cuda" and self._config.activation_offload != "none":
            bound_pinned_memory(
                taken_otherwise=bytes_to_host(self._config, self.training.parts.model.parameters())
            )
        self._devices = self.training.devices
        seed_generators(self._workload.seed)  # the model may have drawn numbers in its making
        self._devices.seed_dropout(self._workload.seed)
        self.history = StepHistory(marker=phase_marker or self._meter)
        self.step = TrainingStep(
            self.training,
            workload=self._workload,
            config=self._config,
            device=self._device,
            marker=self.history,
        )
        self.parity = ParityWatch(
            self.training.parameters_by_block,
            device=self._device,
            precision=self._config.precision,
            reference=request.reference,
            is_trace=is_trace,
            progress=progress,
            whole_gradient=self.training.whole_gradient,
            buffers=self.training.buffers,
            shares_out=self._devices.devices > 1 or self._config.engine != "torch",
            updater=self.training.updater,
            micro_batches=self._workload.global_batch // self._config.micro_batch_size,
            sums_in_fp32=self._config.gradient_accumulation_dtype == "fp32",
        )
        self.parity.follow(self.training.updater.optimizer)
        self._train, self._held_out = (
            TokenSequences(
                request.folder / name,
                sequence_length=self._workload.sequence_length,
            )
            for name in ("train.npy", "held_out.npy")
        )
        self._facts = TextFacts.read(request.folder)
        # The mean over the text: the same for all trials, whichever of its steps they time.
        tokens_per_step = self._workload.tokens_per_step * self._facts.tokens_per_place
        self._tokens_per_step = max(1, round(tokens_per_step))

    def run(self) -> Measurement:
        workload, batches = self._workload, self.batches()
        timed_from = workload.warmup_steps + MEMORY_STEPS
        wanted = SHORT_TIMED_STEPS if self._request.shares_perplexity else workload.steps
        self._last_step = min(workload.steps, timed_from + wanted)
        self._startup_seconds = time.monotonic() - self._request.requested_at
        self._progress("step")
        with self._clocked("training"):
            warmup = self._warm_up(batches)
            memory = self._measure_memory(batches)
        if self._request.enforce_cap and self._is_over_cap(memory):
            # Nothing that follows could bring it back under the cap.
            return self._measurement(memory, warmup=warmup, timed=[], held_out_loss=None)
        timed: list[TimedStep] = []
        dominating: PruningBound | None = None
        with self._clocked("training"):
            for step in self._timed_steps(range(timed_from, self._last_step), batches):
                timed.append(step)
                dominating = self._dominating_trial(memory, timed)
                if dominating is not None:
                    break
        if dominating is not None:
            return self._measurement(
                memory, warmup=warmup, timed=timed, held_out_loss=None, dominating=dominating
            )
        held_out_loss = self._evaluate()
        memory = self._meter.reading()
        if self._device.type == "cuda" and workload.devices_per_trial > 1:
            self._profile_step(batches)
        return self._measurement(memory, warmup=warmup, timed=timed, held_out_loss=held_out_loss)

    def evaluate_untrained(self) -> Measurement:
        """Returns the perplexity of the weights as they are; nothing else is measured.

        Only the weights and one forward pass are on the device. Raises Diverged.
        """
        held_out_loss = self._evaluate()
        assert held_out_loss is not None
        return Measurement(
            outcome="ok",
            perplexity=math.exp(held_out_loss),
            perplexity_source=MEASURED,
            bits_per_byte=self._bits_per_byte(held_out_loss),
        )

    def run_in_turn(self, turns: Turns) -> None:
        """Warms up, then takes as many steps at a time as `turns` says, until it says to end.

        The workload must have these steps. Memory is not measured: others are on the device.
        """
        batches = self.batches()
        self._progress("step")
        warmup = self._warm_up(batches)
        first = self._workload.warmup_steps
        steps = turns.begin(step_seconds=warmup[-1].seconds)
        while steps:
            timed = list(self._timed_steps(range(first, first + steps), batches))
            first += steps
            steps = turns.next(
                seconds=sum(step.seconds for step in timed),
                tokens=sum(step.tokens for step in timed),
            )

    def _warm_up(self, batches: Iterator[Batch]) -> list[TimedStep]:
        steps = [self._timed_step(0, next(batches))]
        self._meter.kernels_have_run()
        for step in range(1, self._workload.warmup_steps):
            steps.append(self._timed_step(step, next(batches)))
        return steps

    def _measure_memory(self, batches: Iterator[Batch]) -> MemoryReading:
        first = self._workload.warmup_steps
        with self._recorded_history(), self._meter.measuring(self._resident_tensors):
            for step in range(first, first + MEMORY_STEPS):
                self.take_step(step, next(batches))
        if self._workload.devices_per_trial > 1:
            found = self._meter.communication()
            self._communication = found and found.of_one_step(steps=MEMORY_STEPS)
        return self._meter.reading()

    def _profile_step(self, batches: Iterator[Batch]) -> None:
        """Notes what a step on CUDA spends in collectives.

        Must come last: the profiler takes memory of the device, and the model trains on. Devices
        without memory for it leave it out, all of them, as one alone would wait for the others.
        """
        self.training.parts.model.train()
        self._devices.end_evaluation()
        torch.cuda.empty_cache()  # as it was before the first step
        self._progress("step")
        step = self._last_step - 1  # of which the learning rate is known
        self.step.launch(step, next(batches))  # allocates again
        self._synchronize()
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        if self._devices.largest(-free_bytes) > -_BYTES_FOR_PROFILER:
            return
        batch = next(batches)
        with profile(activities=[ProfilerActivity.CUDA]) as recording:
            began = time.perf_counter()
            self.step.launch(step, batch)
            self._synchronize()
            seconds = time.perf_counter() - began
        self._communication = communication_on_cuda(recording, seconds=seconds)

    def _is_over_cap(self, memory: MemoryReading) -> bool:
        """Returns whether any device of the trial needs more than the cap."""
        return is_over_cap(self._devices.largest(memory.device_bytes), self._request.cap_bytes)

    def _dominating_trial(
        self, memory: MemoryReading, timed: Sequence[TimedStep]
    ) -> PruningBound | None:
        """Returns an earlier trial of the same numerics that is faster in no more memory, or None.

        Checked only once, after the number of timed steps at which the speed has settled.
        """
        if len(timed) != SETTLED_STEPS:
            return None
        seconds = statistics.median(step.seconds for step in timed)
        return dominated_by(
            self._request.pruning_bounds,
            peak_memory_bytes=int(self._devices.largest(memory.peak_memory_bytes)),
            tokens_per_second=self._tokens_per_step / self._devices.largest(seconds),
        )

    @contextmanager
    def _clocked(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds_by_part[part] = (
                self._seconds_by_part.get(part, 0.0) + time.perf_counter() - began
            )

    # -- one step ----------------------------------------------------------------------------------

    def _timed_step(self, step: int, batch: Batch) -> TimedStep:
        """Takes one step that starts on an idle device, and waits until it has finished."""
        self._synchronize()
        parity_seconds_before = self.parity.seconds
        started = time.perf_counter()
        loss = self.take_step(step, batch)
        self._synchronize()
        parity_seconds = self.parity.seconds - parity_seconds_before
        seconds = time.perf_counter() - started - parity_seconds
        return TimedStep(seconds=seconds, tokens=self._tokens_per_step, loss=loss)

    def _timed_steps(self, steps: Iterable[int], batches: Iterator[Batch]) -> Iterator[TimedStep]:
        """Takes `steps` one after the other and yields each when it has ended.

        A CUDA device is already given the next step by then, so a loss that is infinite or NaN, or
        a step that hangs, is noticed one step later. Raises as `take_step` does.
        """
        if self._device.type != "cuda":
            yield from (self._timed_step(step, next(batches)) for step in steps)
            return
        clock = DeviceClock(self._device)
        queued: deque[tuple[int, StepEnd]] = deque()
        # Offloaded activations occupy pinned host memory until the device has used them. Running a
        # step ahead would pin the same amount again.
        most_queued = 1 if self._config.activation_offload == "none" else 0
        for step in steps:
            with self.parity.step():
                loss = self.step.launch(step, next(batches))
            queued.append((step, clock.step_ended(loss)))
            del loss  # otherwise it stays on the device during the next step and is measured
            self._progress("step")
            if len(queued) > most_queued:
                yield self._finish_step(*queued.popleft())
        for step, wait in queued:
            yield self._finish_step(step, wait)

    def _finish_step(self, step: int, wait: StepEnd) -> TimedStep:
        seconds, loss = wait()
        self._progress("step", step + 1, self._last_step)
        self.parity.note(loss)  # first: what only this configuration makes of it is not divergence
        check_finite(loss, step=step)
        return TimedStep(seconds=seconds, tokens=self._tokens_per_step, loss=loss)

    def take_step(self, step: int, batch: Batch) -> float:
        """Takes one training step, waits for it and returns its mean token loss in nats.

        Raises Diverged, and ParityFailed when the first steps differ from the reference's.
        """
        with self.parity.step():
            loss = self.step.launch(step, batch).item()
        self._progress("step", step + 1, self._last_step)
        self.parity.note(loss)  # first, as in `_finish_step`
        return check_finite(loss, step=step)

    # -- held-out text -----------------------------------------------------------------------------

    @torch.no_grad()
    def _evaluate(self) -> float | None:
        """Returns the mean token loss on the held-out set, in nats, computed in micro batches.

        Returns None where the perplexity is reused from another trial of the same numerics; only
        the memory of a first micro batch is then measured. Raises Diverged if the loss is too large
        or NaN.

        Compiled models stay compiled: eager code would hold logits that the training never holds,
        and set the peak.
        """
        workload, micro_batch_size = self._workload, self._config.micro_batch_size
        # What is drawn in evaluation must not depend on the steps before.
        seed_generators(workload.seed)
        self.training.parts.model.eval()  # no dropout
        self._devices.begin_evaluation()
        # Each device has as many micro batches as the others; the last ones may have no labels.
        total = workload.evaluation_sequences
        stride = micro_batch_size * self._devices.size
        batches = (
            self._held_out.padded_batch(start, size=micro_batch_size, total=total)
            for start in range(
                self._devices.index * micro_batch_size, -(-total // stride) * stride, stride
            )
        )
        self._progress("evaluation")
        first = next(batches)
        if self._config.compile != "none":
            with self._clocked("compilation"), self._meter.excluded():
                # Compiles the graph without gradients, so that no measurement includes it.
                self._summed_loss(first)
        with self._clocked("evaluation"):
            with self._meter.measuring(self._resident_tensors), self._meter.phase("evaluation"):
                loss = self._summed_loss(first)
            if self._request.shares_perplexity:
                return None
            labels_of = partial(learned_labels, self.training.parts.model)
            valid_labels = labels_of(first.labels)
            for batch in batches:
                loss += self._summed_loss(batch)
                valid_labels += labels_of(batch.labels)
        loss, labels = self._devices.add_up(loss, valid_labels)
        mean_loss = loss / max(1, labels)
        if not mean_loss < LARGEST_LOSS:
            when = f"after {workload.steps} steps"
            if self._request.evaluates_only:
                when = "before training"
            raise Diverged(f"the held-out loss is {mean_loss} {when}")
        return mean_loss

    def _summed_loss(self, batch: Batch) -> float:
        loss = self.step.forward(*(part.to(self._device) for part in batch)).item()
        self._progress("evaluation")
        return loss

    # -- batches and tensors -----------------------------------------------------------------------

    def batches(self) -> Iterator[Batch]:
        """Yields global batches on the host, in the order that all trials of the study share."""
        for indices in training_order(
            sequences=len(self._train),
            global_batch=self._workload.global_batch,
            seed=self._workload.seed,
        ):
            batch = self._train.batch(indices)
            if self._device.type == "cuda":
                # A copy from pinned memory runs while the device computes; any other copy waits.
                batch = Batch(*(part.contiguous().pin_memory() for part in batch))
            yield batch

    def _resident_tensors(self) -> list[Tensor]:
        model = self.training.parts.model
        held = [tensor for module in model.modules() for _, tensor in held_tensors(module)]
        weights = [part for weight in model.parameters() for part in tensors_behind(weight)]
        state = self.training.updater.state()
        resident = [*weights, *held, *state, *self.training.devices.held()]
        return [tensor for tensor in resident if tensor.device.type == self._device.type]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # -- the result --------------------------------------------------------------------------------

    def _measurement(
        self,
        memory: MemoryReading,
        *,
        warmup: list[TimedStep],
        timed: list[TimedStep],
        held_out_loss: float | None,
        dominating: PruningBound | None = None,
    ) -> Measurement:
        speed = measured_speed(warmup, timed, compiled=self._config.compile != "none")
        return replace(
            judged(memory, cap_bytes=self._request.cap_bytes, dominating=dominating),
            bytes_by_kind=self._bytes_by_kind(),
            peak_bytes_by_category=self._peak_bytes_by_category(),
            padding_share=self._padding_share(),
            perplexity=None if held_out_loss is None else math.exp(held_out_loss),
            perplexity_source=None if held_out_loss is None else self._perplexity_source(),
            **self.parity.verdict(),
            unquantized_share=unquantized_share(*self.training.unquantized),
            kept=self._request.kept,
            bits_per_byte=self._bits_per_byte(held_out_loss),
            startup_seconds=self._startup_seconds,
            device_startup_seconds=self._device_startup_seconds,
            final_loss=timed[-1].loss if held_out_loss is not None else None,
            **self._communication_fields(),
            seconds_by_part=self._final_seconds_by_part(
                compile_seconds=speed.get("compile_seconds") or 0.0
            ),
            **speed,
        )

    def _communication_fields(self) -> dict[str, Any]:
        """Returns the fields of a measurement for communication, empty where it is not known."""
        found = self._communication
        if found is None:
            return {}
        return {"communication_seconds": found.seconds, "communication_share": found.share}

    def _final_seconds_by_part(self, *, compile_seconds: float) -> dict[str, float]:
        """Returns the seconds of each part; compilation and parity are parts of their own."""
        parts = {
            "startup": self._startup_seconds,
            "compilation": 0.0,
            "evaluation": 0.0,
            **self._seconds_by_part,
        }
        parts["compilation"] += compile_seconds
        parts["training"] -= compile_seconds + self.parity.seconds
        if self.parity.seconds:
            parts["parity"] = self.parity.seconds
        return parts

    def _padding_share(self) -> float | None:
        share = 1.0 - self._facts.tokens_per_place
        return share if share > 0.0 else None

    def _perplexity_source(self) -> PerplexitySource:
        is_random = self._config.adapter != "none" and self._workload.has_random_weights
        return replace(
            MEASURED,
            over_random_weights=is_random,
            of_own_loss=not self.training.parts.evaluates_cross_entropy,
        )

    def _bits_per_byte(self, held_out_loss: float | None) -> float | None:
        bytes_per_token = self._facts.bytes_per_token
        is_cross_entropy = self.training.parts.evaluates_cross_entropy
        if held_out_loss is None or bytes_per_token is None or not is_cross_entropy:
            return None
        return held_out_loss / math.log(2) / bytes_per_token

    def _recorded_history(self) -> AbstractContextManager[None]:
        file = self._request.snapshot_file
        if file is None:
            return nullcontext()
        return self.history.recorded(self._device, snapshot_file=file)

    def _peak_bytes_by_category(self) -> Mapping[str, int] | None:
        if self._request.snapshot_file is None:
            return None
        model = self.training.parts.model
        recording = self.history.recording(
            {
                "parameters": on_device(model.parameters(), self._device.type),
                "buffers": model.buffers(),
                "optimizer_state": on_device(self.training.updater.state(), self._device.type),
            }
        )
        sizes = bytes_by_category(find_peak(recording).blocks)
        return {str(category): size_bytes for category, size_bytes in sizes.items()}

    def _bytes_by_kind(self) -> dict[str, int]:
        model = self.training.parts.model
        return {
            "parameters": resident_bytes(on_device(model.parameters(), self._device.type)),
            "buffers": resident_bytes(model.buffers()),
            "optimizer_state": resident_bytes(
                on_device(self.training.updater.state(), self._device.type)
            ),
            **offloaded_bytes(self._config, self.training.updater.state()),
        }
