"""The record of the device, of each trial and of a whole study, as plain dataclasses."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from autotune.errors import InvalidInput
from autotune.spec.config import TrainingConfig
from autotune.spec.limits import (
    Count,
    Number,
    Perplexity,
    PerplexitySpread,
    Seconds,
    Share,
    SizeBytes,
    Speed,
    Spread,
    Work,
)
from autotune.spec.prediction import KeptOfBlock
from autotune.spec.provenance import PerplexitySource, TrialReference
from autotune.spec.schema import Schema
from autotune.spec.terms import ROWS, TOKENS, Counted, Terms
from autotune.spec.workload import Workload

Outcome = Literal[
    "ok",
    "out_of_memory",
    "over_cap",
    "predicted_over_cap",
    "parity_failed",
    "dominated",
    "diverged",
    "timeout",
    "crashed",
    "interrupted",
]

DIRECTIONS: Mapping[str, Literal["minimize", "maximize"]] = {
    "peak_memory_bytes": "minimize",
    "tokens_per_second": "maximize",
    "perplexity": "minimize",
}
"""The three objectives, in the order in which Optuna gets them."""

JSON_SCHEMA = 1

VARIANT_NUMBER = -1
"""In place of a trial's number: a variant of the pick (`StudyResult.variants`) is no trial."""

PINNED_ON_HOST = "pinned_on_host"
"""Key of the largest number of bytes of host memory that offloading pinned; torch rounds each block
up to a power of two."""
STATE_ON_HOST = "optimizer_state_on_host"
"""Key of the bytes of optimizer state in host memory, which is not pinned."""
ON_HOST = (PINNED_ON_HOST, STATE_ON_HOST)


@dataclass(frozen=True, kw_only=True)
class DeviceInfo(Schema):
    """The device that a study measures on, as reported by a process that used it."""

    device: str
    """Name in torch, such as `cpu` or `cuda:1`."""
    name: str
    """The vendor's name."""
    total_memory_bytes: SizeBytes
    """Memory of the device; for a CPU, of the host."""
    versions: Mapping[str, str]
    """Versions that a measurement depends on: python, torch, autotune and, for a CUDA device, CUDA
    and the driver."""
    uuid: str | None = None
    """Identity of a CUDA device: `GPU-...` or, for a slice of one, `MIG-...`. It also names the
    device slots."""
    is_known_to_nvml: bool = False
    """Whether NVML reports, for that UUID, how much of the memory is in use."""
    compute_capability: str | None = None
    """Of a CUDA device, such as `9.0`; None for a CPU, and in studies from before it was stored."""
    shares_host_memory: bool = False
    """Whether a GPU has no separate memory."""
    compute_mode: str | None = None
    """How many processes may use a CUDA device at a time: `default`, `exclusive-process` or
    `prohibited`; None: unknown."""
    context_bytes: SizeBytes | None = None
    """Device memory of a new CUDA context; None: not measured, or it could not be measured."""
    matrix_flops_per_second: Mapping[str, Work] | None = None
    """FLOPs per second of large matrix products by number format, such as bf16, measured when the
    study began; None: not measured."""
    layer_flops_per_second: Mapping[str, Work] | None = None
    """The same of the products of a linear layer of the workload's own size; without the formats
    that were not measured."""
    bandwidth_bytes_per_second: Work | None = None
    """Bytes per second that a large copy reads and writes, measured with it."""
    operator_seconds: Seconds | None = None
    """How long the host takes to run an operator of a training, measured with it."""
    others: str = ""
    """Text on what else used the device when the study was created; empty if nothing did."""
    notes: tuple[str, ...] = ()
    """What is unknown or unusual about the device, a sentence each without its full stop."""

    @property
    def type(self) -> str:
        """Type of the device in torch, `cpu` or `cuda`."""
        return self.device.partition(":")[0]

    @property
    def uuid_of_nvml(self) -> str | None:
        """The UUID by which NVML knows the device; None where it does not."""
        return self.uuid if self.is_known_to_nvml else None

    def describe(self, *, devices: int = 1, nodes: int = 1) -> str:
        """Returns `cuda:0 (NVIDIA H200)`, or `4 cuda devices on 2 nodes (NVIDIA H200)`."""
        name = self.device if devices == 1 else f"{devices} {self.type} devices"
        if nodes > 1:
            name += f" on {nodes} nodes"
        return f"{name} ({self.name})"

    @property
    def model(self) -> str:
        """The name and the memory, such as `NVIDIA H200 with 141.0 GiB`."""
        return f"{self.name} with {self.total_memory_bytes / 2**30:.1f} GiB"

    def is_of_model(self, other: "DeviceInfo") -> bool:
        """Returns whether speeds on two devices compare: those of one name, memory and driver."""
        if self.type == "cpu":  # its name has its number of threads, which slots share
            return other.type == "cpu"
        return (
            self.name == other.name
            and self.total_memory_bytes == other.total_memory_bytes
            and self.versions.get("driver") == other.versions.get("driver")
        )


@dataclass(frozen=True, kw_only=True)
class Measurement(Schema):
    """What the process of a trial returns; a value of None was not measured."""

    outcome: Outcome
    message: str = ""
    peak_memory_bytes: SizeBytes | None = None
    devices: Count = 1
    """How many devices trained together."""
    peak_memory_bytes_by_rank: tuple[SizeBytes, ...] = ()
    """The peak of each device, where a trial has several; `peak_memory_bytes` is the largest."""
    peak_reserved_bytes: SizeBytes | None = None
    device_bytes: SizeBytes | None = None
    context_bytes: SizeBytes | None = None
    alloc_retries: Count | None = None
    peak_phase: str | None = None
    """Phase in which the peak occurs: forward, backward, step or evaluation."""
    bytes_by_kind: Mapping[str, SizeBytes] | None = None
    """Bytes of parameters, buffers and optimizer state between two steps; the rest of the peak is
    allocated within a step. With offloading on CUDA also those of ON_HOST, which are host
    memory."""
    peak_bytes_by_category: Mapping[str, SizeBytes] | None = None
    """Bytes at the peak by category, read from the allocator's history if that was requested (CUDA
    only)."""
    requested_bytes: SizeBytes | None = None
    """For out_of_memory: bytes of the allocation that failed, if the error message gives them."""
    counted: Counted = "tokens"
    """What `tokens_per_second` counts; where it is rows, `perplexity` is exp(loss)."""
    tokens_per_second: Speed | None = None
    tokens_per_second_spread: Spread | None = None
    """Half the interquartile range of the per-step speeds, in tokens per second; of a confirmed
    trial half the width of its interval."""
    padding_share: Share | None = None
    """Share of the places of the training sequences that hold padding, which is computed but is no
    token of `tokens_per_second`; None: the text is packed, or a script counts its tokens."""
    perplexity: Perplexity | None = None
    """For several seeds, the mean."""
    perplexity_spread: PerplexitySpread | None = None
    """Standard deviation over the seeds; None for a single seed."""
    perplexity_source: PerplexitySource | None = None
    parity: Literal["same", "same at two blocks", "failed", "not compared"] | None = None
    """Whether the first steps equal those of a plain training of the same numerics class, or those
    of a model of two blocks do; None: no check was requested."""
    parity_message: str | None = None
    """The largest difference, or why there was no comparison."""
    bits_per_byte: float | None = None
    final_loss: float | None = None
    """Mean token loss of the workload's last step, in nats; None if the perplexity is shared."""
    compile_seconds: Seconds | None = None
    compile_cache: Literal["miss", "partial", "hit"] | None = None
    startup_seconds: Seconds | None = None
    """From the request to the start of the first optimizer step."""
    device_startup_seconds: Seconds | None = None
    """The part of `startup_seconds` that creating a CUDA context took."""
    seconds_by_part: Mapping[str, Seconds] | None = None
    """Wall-clock time of startup, compilation, training (with warm-up) and evaluation. The rest of
    `seconds` went into prediction, the parity check, and starting and ending the process. None for
    a script."""
    communication_seconds: Seconds | None = None
    """How long a device of a trial has a collective with the others in flight in one step, with the
    time that it waits for them: the mean over the devices, from a profile of steps that are not
    timed."""
    communication_share: Share | None = None
    """The share of these profiled steps, which take longer than timed ones."""
    model_flops_per_token: Work | None = None
    """Floating-point operations per token that forward and backward pass need without any technique
    (`predictor/work.py`); None: the model was not predicted."""
    recomputed_flops_per_token: Work | None = None
    """Those that the configuration computes again; None: not known."""
    unquantized_share: Share | None = None
    """Share of the model's own weights, by their number, that quantized base weights leave in 16
    bits; None: nothing is quantized."""
    kept: tuple[KeptOfBlock, ...] = ()
    """What each block keeps for its activation budget; empty without one."""
    reused_from: TrialReference | None = None
    """The trial of an earlier study that measured it; None: measured in this study."""

    @property
    def terms(self) -> Terms:
        """What its speed and its perplexity are called."""
        return ROWS if self.counted == "rows" else TOKENS

    @property
    def is_same_training(self) -> bool:
        """Whether its first steps were compared with a plain training, and are the same."""
        return self.parity in ("same", "same at two blocks")

    @property
    def places_per_second(self) -> float | None:
        """Tokens and padding that are computed per second."""
        if self.tokens_per_second is None or not self.padding_share:
            return self.tokens_per_second
        return self.tokens_per_second / (1.0 - self.padding_share)

    @property
    def shares_perplexity(self) -> bool:
        """Whether its perplexity was measured in another trial, which has the same numerics."""
        return self.perplexity_source is not None and self.perplexity_source.is_shared

    @property
    def perplexity_says_nothing(self) -> bool:
        """Whether it must decide nothing: an adapter over random weights, or of other seeds."""
        source = self.perplexity_source
        return source is not None and (source.over_random_weights or source.of_other_seeds)

    @property
    def perplexity_is_of_own_loss(self) -> bool:
        """Whether it is exp(loss) of a model whose loss may be no cross entropy."""
        return self.perplexity_source is not None and self.perplexity_source.of_own_loss

    def with_perplexity_of(self, trial: "TrialRecord") -> Self:
        """Returns the measurement with the perplexity of a trial that is the same training."""
        return dataclasses.replace(
            self,
            perplexity=trial.perplexity,
            perplexity_spread=trial.perplexity_spread,
            bits_per_byte=trial.bits_per_byte,
            perplexity_source=PerplexitySource.shared_with(
                TrialReference(number=trial.number),
                over_random_weights=trial.perplexity_says_nothing,
                of_own_loss=trial.perplexity_is_of_own_loss,
            ),
        )

    @property
    def has_all_objectives(self) -> bool:
        """Whether memory, speed and perplexity were all measured."""
        return all(getattr(self, objective) is not None for objective in DIRECTIONS)

    @property
    def is_within_cap(self) -> bool:
        """Whether it trained within the cap, to its end or until another trial dominated it."""
        return self.outcome in ("ok", "dominated")

    @property
    def is_over_cap(self) -> bool:
        """Whether it needs more memory than the cap, by measurement or by prediction."""
        return self.outcome in ("over_cap", "predicted_over_cap")

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether it was begun and needed more memory than it was given."""
        return self.outcome in ("over_cap", "out_of_memory")

    @property
    def was_rejected(self) -> bool:
        """Whether it needs more memory than it may have: predicted, measured, or run out of."""
        return self.is_over_cap or self.ran_out_of_memory

    @property
    def was_trained(self) -> bool:
        """Whether it trained for long enough that its peak memory was measured."""
        return self.is_within_cap or self.outcome == "over_cap"

    @property
    def failed(self) -> bool:
        """Whether the training itself failed, whatever memory it needed."""
        return self.outcome in ("crashed", "timeout", "diverged", "parity_failed")


def terms_of(measured: Iterable[Measurement]) -> Terms:
    """Returns what the speeds of a study are called, as its first trial with a speed says."""
    return next((one.terms for one in measured if one.tokens_per_second is not None), TOKENS)


def bits_per_byte_at(perplexity: float, first: Measurement) -> float | None:
    """Returns the bits per byte of `perplexity`, scaled from the pair in `first`.

    Both numbers are the mean loss in different units, so bits per byte are proportional to the
    logarithm of perplexity: bits = bits(first) * ln(perplexity) / ln(perplexity(first)). With a
    first perplexity of 1 the loss is zero and cannot be scaled: the bits of `first` are returned.
    """
    if first.bits_per_byte is None or first.perplexity is None or first.perplexity == 1.0:
        return first.bits_per_byte
    return first.bits_per_byte * math.log(perplexity) / math.log(first.perplexity)


@dataclass(frozen=True, kw_only=True)
class SpeedAlone(Schema):
    """The speed of a trial itself, which trained alone, before it was confirmed in turn."""

    tokens_per_second: Speed
    spread: Spread | None
    """As `tokens_per_second_spread`."""
    error: Spread
    """Relative standard error over runs."""


@dataclass(frozen=True, kw_only=True)
class TrialRecord(Measurement):
    """One configuration with everything that was measured of it."""

    number: Number
    config: TrainingConfig
    name: str | None = None
    feasible: bool = False
    """Whether it is a solution (`analysis/feasibility.py`); stored, as a record has no cap."""
    model_flops_utilization: Share | None = None
    """Share of the device's matrix rate that the model's FLOPs reach (`analysis/roofline.py`).
    Stored nowhere, as it follows from the device."""
    predicted_peak_memory_bytes: SizeBytes | None = None
    seconds: Seconds | None = None
    """Wall-clock time of the whole trial, including the start of its process. None for a trial that
    is reused from an earlier study."""
    confirmations: Count = 0
    """Measurements in turn with a partner behind `tokens_per_second`; 0: measured once, alone."""
    tokens_per_second_interval: tuple[Spread, Spread] | None = None
    """Where the speed of a confirmed trial is with a probability of 95 %, over further runs."""
    speed_error: Spread | None = None
    """Relative standard error of the speed within the study, over runs; None: not known."""
    alone: SpeedAlone | None = None
    """Of a confirmed trial, for comparisons with trials that were not confirmed."""
    is_running: bool = False
    """Whether a process works on it now; its outcome is `interrupted` until it has one."""

    @property
    def is_finished(self) -> bool:
        """Whether the trial has a final outcome, that is, any but `interrupted`."""
        return self.outcome != "interrupted"

    def to_dict(self) -> dict[str, Any]:
        """Returns a dictionary for JSON; None stands for NaN, infinity and what was not measured.

        Where a result comes from is said in a sentence.
        """
        # Not `asdict`: it copies every value, which takes a second for thousands of trials.
        values = {name: getattr(self, name) for name in _RECORD_FIELDS}
        values["config"] = self.config.to_dict()
        for name, value in values.items():
            if name in _MAPPING_FIELDS and value is not None:
                values[name] = dict(value)
            elif name == "kept":
                values[name] = [dataclasses.asdict(block) for block in value]
            elif name in _PROVENANCE_FIELDS and value is not None:
                values[name] = str(value)
            elif isinstance(value, float) and not math.isfinite(value):
                values[name] = None
        return values


NOT_SHOWN = ("speed_error", "alone", "is_running")
"""What neither JSON nor CSV has: the interval says the error."""
_RECORD_FIELDS = tuple(
    field.name for field in dataclasses.fields(TrialRecord) if field.name not in NOT_SHOWN
)
_MAPPING_FIELDS = ("bytes_by_kind", "peak_bytes_by_category", "seconds_by_part")
_PROVENANCE_FIELDS = ("perplexity_source", "reused_from")


@dataclass(frozen=True, kw_only=True)
class Pick(Schema):
    """The recommended trial, with the reason for it."""

    number: int
    criterion: str
    """By which it was picked, such as `the fastest on the front`."""
    learning_rates: str = ""
    """The rates of each kind of training, where full training and adapters were compared."""
    comparison: str = ""
    """With the baseline; empty if that is unknown."""
    warning: str = ""
    """What its measurements leave open; empty if nothing does."""
    doubt: str = ""
    """Why it is not to be trusted; empty if nothing speaks against it."""

    @property
    def reason(self) -> str:
        """Returns all of it in one sentence, without a full stop, what speaks against it first."""
        parts = (self.doubt, self.criterion, self.learning_rates, self.comparison, self.warning)
        return "; ".join(filter(None, parts))

    @property
    def heading(self) -> str:
        """Returns what stands before the trial."""
        return "Pick, not to be trusted" if self.doubt else "Pick"


@dataclass(frozen=True, kw_only=True)
class StudyResult(Schema):
    """Everything that a report on a study needs: settings, records, Pareto front and pick."""

    study: str
    storage: str
    workload: Workload
    device: DeviceInfo
    cap_bytes: SizeBytes
    trials: tuple[TrialRecord, ...]
    front: tuple[int, ...]
    pick: Pick | None
    baseline: int | None
    initial_perplexity: Perplexity | None = None
    """Of the pretrained weights on the held-out text, before any training; None without pretrained
    weights, and where it was not measured."""
    initial_perplexity_remark: str = ""
    """In which precision it was measured, where that is not the baseline's, or why it has failed;
    JSON has no place for it."""
    variants: tuple[TrialRecord, ...] = ()
    """The pick without single techniques, as far as that was measured after the trials."""
    folder: Path | None = None
    """The study's work folder, with the logs of trials that ran on this machine, if there are any;
    None for a study of a server."""

    @property
    def terms(self) -> Terms:
        """What speed and perplexity of its trials are called."""
        return terms_of(self.trials)

    @property
    def is_cuda(self) -> bool:
        """Whether the memory that a device must have is another than the peak."""
        return self.device.type == "cuda"

    def trial(self, number: int) -> TrialRecord:
        """Returns the record of a trial by its number. Raises InvalidInput if there is none."""
        if not isinstance(number, int):
            raise InvalidInput(
                f"the number of a trial is a whole number, not {number!r}",
                hint=f"see autotune show {self.study}",
            )
        # Trials lie at their numbers unless the study has gaps.
        if number < len(self.trials) and self.trials[number].number == number:
            return self.trials[number]
        found = next((record for record in self.trials if record.number == number), None)
        if found is None:
            known = "it has none yet"
            if self.trials:
                last = self.trials[-1].number
                known = f"its trials are 0 to {last}" if last else "its only trial is 0"
            raise InvalidInput(
                f"study {self.study!r} has no trial {number}",
                hint=f"{known}; see autotune show {self.study}",
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON object that `--json` prints; what was not measured is null."""
        return {
            "schema": JSON_SCHEMA,
            "study": self.study,
            "storage": self.storage,
            "workload": self.workload.to_dict(),
            "device": dataclasses.asdict(self.device),
            "cap_bytes": self.cap_bytes,
            "directions": dict(DIRECTIONS),
            "trials": [record.to_dict() for record in self.trials],
            "front": list(self.front),
            "pick": None if self.pick is None else self.pick.number,
            "pick_reason": None if self.pick is None else self.pick.reason,
            "baseline": self.baseline,
            "initial_perplexity": self.initial_perplexity,
        }
