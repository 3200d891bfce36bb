"""What an exporter is given: a configuration, the workload it was measured on, and what was measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from autotune.spec.config import FIELD_ORDER, TrainingConfig
from autotune.spec.result import StudyResult, TrialRecord
from autotune.spec.workload import Workload

OPTIMIZER_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8},
    "adamw-8bit": {"weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8},
    "adafactor": {"weight_decay": 0.0, "eps": (1.1920928955078125e-07, 1e-3)},
    "sgd": {"weight_decay": 0.0, "momentum": 0.9},
    "adafactor-fixed-rate": {"weight_decay": 0.01},
}
"""What trials train with besides the learning rate (`autotune/techniques/optimizer.py`)."""

SMALLEST_RATE = 0.1
"""Share of the learning rate that a cosine schedule ends at (`autotune/training/step.py`)."""

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
)
"""What of a workload decides the numbers that are computed, and a trainer may or may not have a key
for."""

SETTINGS = (*FIELD_ORDER, *WORKLOAD_SETTINGS)
"""Everything an export must either express or refuse."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A configuration to train with, and where its numbers come from."""

    config: TrainingConfig
    workload: Workload
    device_type: Literal["cpu", "cuda"]
    """What the trial ran on."""
    origin: str
    """Where it comes from, such as `study tour, trial 12`: in one line, whatever a study is called.
    """
    peak_memory_bytes: int | None = None
    device_bytes: int | None = None
    tokens_per_second: float | None = None
    perplexity: float | None = None

    def __post_init__(self) -> None:
        # It stands in comments, which a line break would end and a control character would spoil.
        object.__setattr__(self, "origin", in_one_line(self.origin))

    @property
    def accumulation_steps(self) -> int:
        """Micro batches whose gradients add up to one optimizer step."""
        return self.workload.global_batch // self.config.micro_batch_size

    @property
    def is_fp16_on_cpu(self) -> bool:
        """Trainers leave it out there, or make bfloat16 of it, without a word."""
        return self.device_type == "cpu" and self.config.precision == "fp16-mixed"

    @property
    def optimizer_settings(self) -> Mapping[str, Any]:
        return OPTIMIZER_SETTINGS[self.config.optimizer]

    def settings(self) -> dict[str, Any]:
        """Every one of `SETTINGS` with its value."""
        workload = self.workload
        return {
            **{field: getattr(self.config, field) for field in FIELD_ORDER},
            "learning_rate": workload.learning_rate_of(self.config.optimizer),
            "weight_decay": self.optimizer_settings["weight_decay"],
            **{name: getattr(workload, name) for name in WORKLOAD_SETTINGS[2:]},
        }


def in_one_line(text: str) -> str:
    """Without line breaks and without what cannot be printed, for comments."""
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())


def in_docstring(text: str) -> str:
    """Somebody's text, such as a path or a name, between three quotes: it neither ends them nor escapes anything."""
    return in_one_line(text).replace("\\", "\\\\").replace('"', '\\"')


def recipe_of(result: StudyResult, record: TrialRecord) -> Recipe:
    return Recipe(
        config=record.config,
        workload=result.workload,
        device_type="cuda" if result.device.type == "cuda" else "cpu",
        origin=f"study {result.study}, trial {record.number}",
        peak_memory_bytes=record.peak_memory_bytes,
        device_bytes=record.device_bytes,
        tokens_per_second=record.tokens_per_second,
        perplexity=record.perplexity,
    )
