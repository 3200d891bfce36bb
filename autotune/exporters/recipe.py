"""Input of an exporter: a configuration, the workload that it ran on, and what was measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autotune.exporters.adapters import beside_adapters
from autotune.printable import printable
from autotune.spec.config import FIELD_ORDER, TrainingConfig
from autotune.spec.optimizers import OPTIMIZERS, OptimizerFacts
from autotune.spec.prediction import KeptOfBlock
from autotune.spec.result import StudyResult, TrialRecord
from autotune.spec.workload import BESIDE_ADAPTERS, Workload

SMALLEST_RATE = 0.1
"""Fraction of the learning rate at which a cosine ends (`autotune/shipped/schedule.py`)."""

WORKLOAD_SETTINGS = (
    "learning_rate",
    "weight_decay",
    "schedule",
    "learning_rate_warmup_steps",
    "steps",
    "global_batch",
    "sequence_length",
    "gradient_clipping",
    "seed",
    "devices_per_trial",
    *BESIDE_ADAPTERS,
)
"""Settings of a workload that a trainer may have no key for.

They change the computed numbers, or say on how many devices they are computed.
"""

DECIDED_BY_SCRIPT = (
    "learning_rate",
    "weight_decay",
    "schedule",
    "learning_rate_warmup_steps",
    "sequence_length",
    "gradient_clipping",
)
"""Settings that a user's script makes itself, so that a study of it does not know their values."""

SETTINGS = (*FIELD_ORDER, *WORKLOAD_SETTINGS)
"""Every setting that an export must either express or list as not expressed."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A configuration to train with, and where its numbers come from."""

    config: TrainingConfig
    workload: Workload
    device_type: Literal["cpu", "cuda"]
    """Type of the device that the trial ran on."""
    origin: str
    """Study and trial that it comes from, such as `study tour, trial 12`.

    Always a single line, whatever the name of the study contains.
    """
    peak_memory_bytes: int | None = None
    peak_memory_bytes_by_rank: tuple[int, ...] = ()
    """The peak of each device, where the trial had several."""
    device_bytes: int | None = None
    tokens_per_second: float | None = None
    tokens_per_second_spread: float | None = None
    perplexity: float | None = None
    padding_share: float | None = None
    bytes_by_kind: Mapping[str, int] | None = None
    kept: tuple[KeptOfBlock, ...] = ()
    """What each block keeps for its activation budget; empty without one, and where it is not
    known."""
    device_name: str | None = None
    """The vendor's name of the device; of a CPU also the number of threads."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of torch, CUDA and other packages that the trial ran with."""
    marks_answers: bool | None = None
    """Whether the chat template of the trial has {% generation %} around answers; None: not known.
    """
    folder: Path = Path()
    """Folder that the files are written to."""
    search_folder: Path | None = None
    """Folder in which the user's script runs as it did in the search; None: not known."""

    def __post_init__(self) -> None:
        # The text goes into comments, which a line break would end.
        object.__setattr__(self, "origin", in_one_line(self.origin))

    @property
    def devices(self) -> int:
        """Number of devices, and of the processes that the command must start."""
        return self.workload.devices_per_trial

    @property
    def nodes(self) -> int:
        """Number of nodes that the devices are on, in equal parts."""
        return self.workload.nodes_per_trial

    @property
    def devices_on_each_node(self) -> int:
        return self.devices // self.nodes

    @property
    def replicas(self) -> int:
        """Number of parts of a global batch that are trained at once."""
        return self.devices // self.config.tensor_parallel

    @property
    def accumulation_steps(self) -> int:
        """Number of micro batches of a device whose gradients are summed for one step."""
        return self.workload.global_batch // (self.config.micro_batch_size * self.replicas)

    @property
    def is_fp16_on_cpu(self) -> bool:
        """Whether the trial used fp16 on a CPU, where trainers silently drop it or use bfloat16."""
        return self.device_type == "cpu" and self.config.precision == "fp16-mixed"

    @property
    def optimizer(self) -> OptimizerFacts:
        return OPTIMIZERS[self.config.optimizer]

    def settings(self) -> dict[str, Any]:
        """Returns {name: value} of all `SETTINGS`."""
        workload = self.workload
        return {
            **{field: getattr(self.config, field) for field in FIELD_ORDER},
            "learning_rate": workload.learning_rate_of(self.config.optimizer, self.config.adapter),
            "weight_decay": self.optimizer.settings["weight_decay"],
            **{name: getattr(workload, name) for name in WORKLOAD_SETTINGS[2:]},
            **beside_adapters(self.config, workload),
        }


def in_one_line(text: str) -> str:
    """Returns `text` on one line, with escapes for control characters, for use in a comment."""
    return printable(" ".join(text.split()))


def in_docstring(text: str) -> str:
    """Returns `text` (such as a user's path) on one line, escaped for use inside a docstring."""
    return in_one_line(text).replace("\\", "\\\\").replace('"', '\\"')


def recipe_of(result: StudyResult, record: TrialRecord) -> Recipe:
    """Returns the recipe of one trial of a study."""
    return Recipe(
        config=record.config,
        workload=result.workload,
        device_type="cuda" if result.device.type == "cuda" else "cpu",
        origin=f"study {result.study}, trial {record.number}",
        peak_memory_bytes=record.peak_memory_bytes,
        peak_memory_bytes_by_rank=record.peak_memory_bytes_by_rank,
        device_bytes=record.device_bytes,
        tokens_per_second=record.tokens_per_second,
        tokens_per_second_spread=record.tokens_per_second_spread,
        perplexity=record.perplexity,
        padding_share=record.padding_share,
        bytes_by_kind=record.bytes_by_kind,
        kept=record.kept,
        device_name=result.device.name,
        versions=result.device.versions,
    )
