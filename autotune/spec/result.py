"""What is remembered: the device, each trial's record, and a study's result.

Plain values that cross every border.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from autotune.spec.config import TrainingConfig
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
"""The three objectives, in the order Optuna sees them."""

JSON_SCHEMA = 1

PINNED_ON_HOST = "pinned_on_host"
"""Name of the bytes of host memory that activation offload has pinned at most, in powers of two as
torch takes it."""

AFTER_STEP = "evaluation loss after step"
"""How the source of a perplexity begins that a script has evaluated after the update of its last
step. Until this was checked it began with "evaluation loss of step"."""
NOT_AFTER_THE_LAST_STEP = "as no evaluation was seen after the last step"
"""What the source of a perplexity says of a script whose evaluation decides nothing."""


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """The device a study measures on, as found by a process that used it."""

    device: str
    """torch's name, `cpu` or `cuda:1`."""
    name: str
    """What the maker calls it."""
    total_memory_bytes: int
    """Memory of the device; of the host for a CPU."""
    versions: Mapping[str, str]
    """Versions of python, torch, autotune and, on CUDA, of CUDA and the driver: whatever a
    measurement depends on."""
    uuid: str | None = None
    """Identity of a CUDA device: `GPU-...` or, for a slice of one, `MIG-...`. Names its turns."""
    is_known_to_nvml: bool = False
    """Whether NVML says, by that UUID, how much of its memory is in use."""
    compute_capability: str | None = None
    """Of a CUDA device, as `9.0`; None for a CPU, and in studies made before this was kept."""
    shares_host_memory: bool = False
    """Whether a GPU has no memory of its own."""
    compute_mode: str | None = None
    """How many processes may use a CUDA device at a time: `default`, `exclusive-process` or
    `prohibited`; None: not known."""
    context_bytes: int | None = None
    """What a new CUDA context takes of the device; None: not measured, or it could not be."""
    others: str = ""
    """What else was using the device when the study began, in words; empty when nothing was."""
    notes: tuple[str, ...] = ()
    """What is not known of the device, or is particular about it, a sentence each without its
    point."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "notes", tuple(self.notes))  # a list, as it comes from JSON

    @property
    def type(self) -> str:
        return self.device.partition(":")[0]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a trial's own process hands back. None: not measured."""

    outcome: Outcome
    message: str = ""
    peak_memory_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_bytes: int | None = None
    context_bytes: int | None = None
    alloc_retries: int | None = None
    peak_phase: str | None = None
    """Where in a step the peak is: forward, backward, step or evaluation."""
    bytes_by_kind: Mapping[str, int] | None = None
    """Bytes of parameters, buffers and optimizer state between two steps; the rest of a peak lives
    within one.

    With activation offload on CUDA also PINNED_ON_HOST, which is no memory of the device."""
    peak_bytes_by_category: Mapping[str, int] | None = None
    """Who held the memory at the peak, read from the allocator's history where that was asked for
    (CUDA)."""
    requested_bytes: int | None = None
    """For out_of_memory: what the allocator was asked for on top of what it held, where the error
    says so."""
    tokens_per_second: float | None = None
    tokens_per_second_spread: float | None = None
    """Half the interquartile range of the per-step speeds, in tokens per second."""
    perplexity: float | None = None
    """With several seeds, their mean."""
    perplexity_spread: float | None = None
    """Standard deviation over the seeds; None where there was one."""
    perplexity_source: str | None = None
    """`measured`, with the number of seeds where there were several; `shared with trial 3`, which
    may be one "of study 'x'"; of a script `evaluation loss after step 20` or `training loss of the
    last 5 steps`, and why."""
    parity: Literal["same", "failed", "not compared"] | None = None
    """Whether its first steps are those of a plain training of the same numerics; None: that was
    never asked."""
    parity_message: str | None = None
    """The largest difference found, or why nothing could be compared."""
    bits_per_byte: float | None = None
    final_loss: float | None = None
    """Mean token loss of the workload's last step, in nats; None where perplexity is shared."""
    compile_seconds: float | None = None
    compile_cache: Literal["miss", "partial", "hit"] | None = None
    startup_seconds: float | None = None
    """From the request to the first optimizer step's start."""
    device_startup_seconds: float | None = None
    """The device's own share of it: creating a CUDA context."""
    seconds_by_part: Mapping[str, float] | None = None
    """Wall-clock time of the process: startup, compilation, training (warm-up included) and
    evaluation. What `seconds` has beyond their sum went into predicting, comparing and the
    process's own start and end. None for a script."""
    reused_from: str | None = None
    """`trial 3 of study 'x'`, where an earlier study measured it; None: measured in this one."""


@dataclass(frozen=True, kw_only=True)
class TrialRecord(Measurement):
    """One configuration put to the test, and all that is known of it."""

    number: int
    config: TrainingConfig
    name: str | None = None
    feasible: bool = False
    predicted_peak_memory_bytes: int | None = None
    seconds: float | None = None
    """Wall-clock time of the whole trial, process start included. None where it took none here: an
    earlier study's."""

    @property
    def is_finished(self) -> bool:
        return self.outcome != "interrupted"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: what is no finite number is null, as what was not measured."""
        # Not `asdict`: it copies every value, which takes a second for thousands of trials.
        values = {name: getattr(self, name) for name in _RECORD_FIELDS}
        values |= {name: dict(values[name]) for name in _TABLES if values[name] is not None}
        values["config"] = self.config.to_dict()
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }


_RECORD_FIELDS = tuple(field.name for field in dataclasses.fields(TrialRecord))
_TABLES = ("bytes_by_kind", "peak_bytes_by_category", "seconds_by_part")


@dataclass(frozen=True, kw_only=True)
class Pick:
    """The recommended trial and the reason in one sentence."""

    number: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """All of a study that a reader needs: what was asked, every record, the front and the pick."""

    study: str
    storage: str
    workload: Workload
    device: DeviceInfo
    cap_bytes: int
    trials: tuple[TrialRecord, ...]
    front: tuple[int, ...]
    pick: Pick | None
    baseline: int | None

    def trial(self, number: int) -> TrialRecord:
        if number < len(self.trials) and self.trials[number].number == number:
            return self.trials[number]  # as in every study that is whole
        return next(record for record in self.trials if record.number == number)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object `--json` prints. Unmeasured is null."""
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
        }
