"""A prediction: peak memory worked out on fake tensors, and who holds the bytes at the peak."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from autotune.errors import InvalidInput
from autotune.spec.config import TrainingConfig

Category = Literal[
    "parameters",
    "buffers",
    "optimizer_state",
    "gradients",
    "activations",
    "temporaries",
    "inputs",
    "workspace",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
"""What holds memory.

activations: born in a forward pass, or in its recomputation, and needed after it; temporaries:
everything else that lives within a step, the gradients of activations included; inputs: tokens and
labels; workspace: what cuBLAS keeps.
"""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Blocks of memory that are alive at the peak and come from the same place."""

    category: Category
    module: str
    """Path of the module, its blocks' numbers written as `*`; empty where no module was running."""
    operator: str
    """The operator that allocated them, such as `aten.mm`, or the name of a parameter or buffer."""
    count: int
    size_bytes: int
    """Of all of them together."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Live bytes over the allocations and frees of one step.

    A long step is thinned out; the peak is always kept.
    """

    events: tuple[int, ...]
    """Number of the allocation or free after which the bytes were read."""
    bytes_by_category: Mapping[Category, tuple[int, ...]]
    phases: tuple[tuple[str, int, int], ...]
    """(name, first event, last event) of each forward, backward and step, in order."""
    peak_event: int


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """All sizes in bytes."""

    device: str
    """The kind of device the prediction is for: cpu or cuda."""
    fake_device: str
    """The device of the fake tensors: cpu. Predictions for CUDA that older releases stored may say
    cuda."""
    peak_memory_bytes: int
    upper_bound_bytes: int
    """What no measured peak of the accuracy study exceeded, relative to its prediction
    (`predictor/accuracy.py`)."""
    lower_bound_bytes: int
    phase: str
    """Where in the step the peak is: forward, backward or step."""
    module: str
    operator: str
    """The operator whose result is the last allocation before the peak."""
    bytes_by_category: Mapping[Category, int]
    """At the peak; adds up to it."""
    parameters: int
    """Number of trained parameters; their bytes are in `bytes_by_category`."""
    holders: tuple[Holder, ...]
    """The largest at the peak, largest first."""
    plan: str | None = None
    """Hash of the code that torch.compile generated; equal plans have equal memory and speed. None:
    not compiled."""
    notes: tuple[str, ...] = ()
    """What the prediction assumes, in words."""
    timeline: Timeline | None = None
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "Prediction":
        values = dict(stored)
        values["holders"] = tuple(Holder(**holder) for holder in values["holders"])
        values["notes"] = tuple(values["notes"])
        if timeline := values["timeline"]:
            values["timeline"] = Timeline(
                events=tuple(timeline["events"]),
                bytes_by_category={
                    name: tuple(sizes) for name, sizes in timeline["bytes_by_category"].items()
                },
                phases=tuple((name, first, last) for name, first, last in timeline["phases"]),
                peak_event=timeline["peak_event"],
            )
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A configuration and its prediction, or why there is none."""

    config: TrainingConfig
    prediction: Prediction | None = None
    refusal: str = ""

    @cached_property
    def plan(self) -> tuple[str, str] | None:
        """Equal for configurations that run the same program; None where nothing is compiled or predicted.

        torch.compile makes one program of several memory budgets; all else in the configuration
        must be equal.
        """
        if self.prediction is None or self.prediction.plan is None:
            return None
        plain = self.config.memory_budget == 1.0
        config = self.config if plain else dataclasses.replace(self.config, memory_budget=1.0)
        return self.prediction.plan, config.fingerprint


def check_release(torch_version: str | None) -> None:
    """Raises InvalidInput unless `torch_version`, which a prediction is made for, has the form of one, or is None."""
    form = r"[0-9]{1,3}\.[0-9]{1,3}(\.[0-9]{1,3})?"
    if torch_version is not None and not re.fullmatch(form, torch_version):
        raise InvalidInput(f"{torch_version!r} is no release of torch", hint="give for example 2.8")


def parse_compute_capability(text: str) -> tuple[int, int]:
    """The two numbers of a GPU's compute capability, such as "9.0". Raises InvalidInput."""
    if not re.fullmatch(r"[0-9]{1,2}\.[0-9]", text):
        raise InvalidInput(
            f"{text!r} is not a compute capability",
            hint="give for example 9.0, as nvidia-smi --query-gpu=compute_cap --format=csv shows it",
        )
    major, _, minor = text.partition(".")
    return int(major), int(minor)
