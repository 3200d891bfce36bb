"""A prediction: peak memory computed on fake tensors, and what occupies it at the peak."""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from autotune.errors import InvalidInput
from autotune.printable import printable
from autotune.spec.config import TrainingConfig
from autotune.spec.limits import (
    Count,
    EventNumber,
    NeededBytes,
    Seconds,
    Share,
    SizeBytes,
    Speed,
    Spread,
    Work,
)
from autotune.spec.schema import Schema
from autotune.spec.setting import NO_LIMIT
from autotune.spec.workload import Workload
from autotune.units import format_size

Category = Literal[
    "parameters",
    "buffers",
    "optimizer_state",
    "gradients",
    "gathered_weights",
    "activations",
    "temporaries",
    "inputs",
    "workspace",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
"""Kinds of memory.

gathered_weights: weights that FSDP2 has gathered from all devices or from the host for a while, and
the buffers in which they arrive; activations: allocated in a forward pass, or in its recomputation,
and needed after it; temporaries: all other memory that is allocated and freed within a step,
including the gradients of activations; inputs: tokens and labels; workspace: memory that cuBLAS
keeps allocated.
"""

Resource = Literal["matrix products", "memory bandwidth", "host link", "host", "collectives"]
"""What the time of a step is spent on. host link: between a GPU and the memory of its host; host:
what the CPU needs to launch operators; collectives: what devices send each other."""

Extrapolation = Literal["nothing", "compiled", "any"]
"""Which deep models may be predicted by shallower ones instead of with all their layers.

compiled: those that are compiled as a whole, which takes up to a minute for each prediction.
"""

CUDA_CONTEXT_BYTES = round(0.6 * 1024**3)
"""Memory that a CUDA device uses outside the allocator: contexts measured 300 to 600 MiB."""


def context_bytes_on(device_type: str) -> int:
    """Returns what a device must have in addition to a predicted peak, where it is not measured."""
    return CUDA_CONTEXT_BYTES if device_type == "cuda" else 0


@dataclass(frozen=True, kw_only=True)
class Holder(Schema):
    """Memory blocks that are allocated at the peak and come from the same operator and module."""

    category: Category
    module: str
    """Path of the module, with `*` for the numbers of blocks; empty if no module was running."""
    operator: str
    """The operator that allocated them, such as `aten.mm`, or the name of a parameter or buffer."""
    count: Count
    size_bytes: SizeBytes
    """Size of all the blocks together."""


@dataclass(frozen=True, kw_only=True)
class KeptOfBlock(Schema):
    """What one block keeps; the rest runs again in the backward pass."""

    operators: tuple[str, ...] | None = None
    """The calls of operators whose results it keeps, such as `aten.mm 3`, the fourth `aten.mm`;
    None: of all, but in `recomputed_parts`."""
    recomputed_parts: tuple[str, ...] = ()
    """The modules of the block that are recomputed whole, by their names in it."""

    def __str__(self) -> str:
        """Returns what it keeps."""
        if self.recomputed_parts:
            return f"everything but in {', '.join(self.recomputed_parts)}"
        if self.operators is None:
            return "everything"
        names = [operator.removeprefix("aten.") for operator in self.operators]
        return ", ".join(names) or "nothing but its inputs"


def kept_in_words(blocks: Sequence[KeptOfBlock]) -> list[str]:
    """Returns what how many blocks keep, a line for each kind: `3 blocks keep mm 0, mm 3`."""
    return [
        f"{'1 block keeps' if count == 1 else f'{count} blocks keep'} {kept}"
        for kept, count in Counter(map(str, blocks)).items()
    ]


@dataclass(frozen=True, kw_only=True)
class Timeline(Schema):
    """Allocated bytes after the allocations and frees of one step.

    A long step is subsampled; the peak is always included.
    """

    events: tuple[EventNumber, ...]
    """Numbers of the allocations and frees after which the bytes were read; the first is -1, before
    any of them."""
    bytes_by_category: Mapping[Category, tuple[SizeBytes, ...]]
    phases: tuple[tuple[str, Count, Count], ...]
    """(name, first event, last event) of each forward, backward and step, in order."""
    peak_event: EventNumber


@dataclass(frozen=True, kw_only=True, repr=False)
class Prediction(Schema):
    """The predicted peak memory of one configuration; all sizes are in bytes."""

    device: str
    """The type of device that the prediction is for: cpu or cuda."""
    fake_device: str
    """The device of the fake tensors: cpu. Predictions for CUDA that older releases stored may have
    cuda."""
    peak_memory_bytes: NeededBytes
    upper_bound_bytes: SizeBytes
    """No measured peak of the accuracy study exceeded this bound, relative to its prediction
    (`predictor/accuracy.py`)."""
    lower_bound_bytes: SizeBytes
    phase: str
    """Phase in which the peak occurs: forward, backward or step."""
    module: str
    operator: str
    """The operator whose result is the last allocation before the peak."""
    bytes_by_category: Mapping[Category, SizeBytes]
    """Bytes at the peak; their sum is the peak."""
    parameters: Count
    """Number of trained parameters; their bytes are in `bytes_by_category`."""
    holders: tuple[Holder, ...]
    """The largest ones at the peak, in descending order of size."""
    plan: str | None = None
    """Hash of the code that torch.compile generated; equal plans have equal memory and speed. None
    without torch.compile, and where the whole model was not compiled but extrapolated."""
    notes: tuple[str, ...] = ()
    """Assumptions of the prediction, as text."""
    timeline: Timeline | None = None
    flops_per_token: Work | None = None
    """Floating-point operations of forward and backward pass per token, recomputed ones included
    (`predictor/work.py`); None where an operator ran whose FLOPs are not known, such as a recurrent
    layer, and in predictions that older releases stored."""
    bytes_accessed_per_token: Work | None = None
    """Bytes that the operators of a whole step read and write, per token."""
    operators_per_token: Work | None = None
    """Operators and generated kernels that a whole step runs, per token, without views: what the
    host has to launch. None in predictions that older releases stored."""
    unquantized_share: Share | None = None
    """Share of the model's own weights, by their number, that quantized base weights leave in 16
    bits; None: nothing is quantized."""
    predicted_tokens_per_second: Speed | None = None
    """Speed of all devices together, from the counts above and the rates of the device
    (`analysis/expected_step.py`); None: its rates or the FLOPs are not known."""
    predicted_tokens_per_second_bounds: tuple[Speed, Speed] | None = None
    """Between which a measured speed is expected."""
    bound_by: Resource | None = None
    """What most of the time of a step is spent on."""
    predicted_model_flops_utilization: Spread | None = None
    """Share of the device's matrix rate that the model's FLOPs reach at that speed."""
    devices: Count = 1
    """Devices of a trial. The peak and what holds it are those of the device that needs most."""
    peak_memory_bytes_by_rank: tuple[NeededBytes, ...] = ()
    """The peak of each device, where a trial has several."""
    distinct_ranks: Count = 1
    """How many devices were predicted: the others are like one of them."""
    extrapolated_from: tuple[Count, ...] = ()
    """The two numbers of layers that were predicted instead of the whole model; empty where the
    whole model was. `module` then stands for the same module in any layer, as in holders."""
    checked_at: Count | None = None
    """The third number of layers, at which the extrapolation was compared with a prediction."""
    check_error_bytes: SizeBytes | None = None
    """How far the extrapolation was off there. The bounds allow for what that may become at the
    whole depth."""
    kept: tuple[KeptOfBlock, ...] = ()
    """What each block keeps for an activation budget, in the order in which they run; empty without
    one."""
    seconds: Seconds = 0.0
    """Time that the prediction took."""

    def __repr__(self) -> str:
        """Returns the peak with its bounds, and where it is."""
        peak, least, most = map(
            format_size, (self.peak_memory_bytes, self.lower_bound_bytes, self.upper_bound_bytes)
        )
        where = " at ".join(filter(None, (self.module, self.operator)))
        text = f"peak of {peak} ({least} to {most}) in {self.phase}{where and f', in {where}'}"
        return printable(f"<prediction for {self.device}: {text}>")

    def to_dict(self) -> dict[str, Any]:
        """Returns a dictionary ready for JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class PredictionRequest(Schema):
    """What to predict, and for which device."""

    workload: Workload
    config: TrainingConfig
    device: str
    """The kind of device to predict for: cpu or cuda."""
    torch_version: str | None = None
    """The torch release to predict for on CUDA, such as 2.8; None: the installed release."""
    compute_capability: str | None = None
    """Of the GPU to predict for, such as 9.0; None: that of an A100, which a note mentions."""
    with_timeline: bool = False
    rank: int = 0
    """Which of the devices of a trial."""
    extrapolates: Extrapolation = "nothing"
    """Which models may be extrapolated from shallower ones. A timeline is of the whole model."""
    kept: tuple[KeptOfBlock, ...] = ()
    """What each block keeps, where that is planned already; empty: an activation budget decides."""

    @property
    def may_be_extrapolated(self) -> bool:
        if self.with_timeline or self.extrapolates == "nothing":
            return False
        if self.config.activation_budget != NO_LIMIT:
            return False  # each block has its own part in the plan
        return self.extrapolates == "any" or self.config.compile == "model"


@dataclass(frozen=True, kw_only=True)
class Forecast(Schema):
    """A configuration with its prediction, or with the reason why there is none."""

    config: TrainingConfig
    prediction: Prediction | None = None
    error: str = ""

    @cached_property
    def plan(self) -> tuple[str, str] | None:
        """Key that is equal for configurations that run the same program.

        torch.compile can generate the same program for several memory budgets, and blocks can keep
        the same for several activation budgets, or keep everything; everything else in the
        configurations must be equal. None where it takes a prediction that is not there, or that
        has compiled nothing.
        """
        config, prediction = self.config, self.prediction
        if config.compile == "none" and config.activation_budget == NO_LIMIT:
            return "", config.fingerprint
        if prediction is None or (config.compile != "none" and prediction.plan is None):
            return None
        keeps_everything = all(one == KeptOfBlock() for one in prediction.kept)
        kept = "" if keeps_everything else repr(prediction.kept)
        plain = dataclasses.replace(config, memory_budget=1.0, activation_budget=NO_LIMIT)
        return prediction.plan or kept, plain.fingerprint


def check_release(torch_version: str | None) -> None:
    """Raise InvalidInput unless `torch_version` is None or a release such as 2.8 or 2.8.1."""
    pattern = r"[0-9]{1,3}\.[0-9]{1,3}(\.[0-9]{1,3})?"
    if torch_version is not None and not re.fullmatch(pattern, torch_version):
        raise InvalidInput(
            f"{torch_version!r} is not a release of torch", hint="give for example 2.8"
        )


def parse_compute_capability(text: str) -> tuple[int, int]:
    """Returns the two numbers of a compute capability such as "9.0". Raises InvalidInput."""
    if not re.fullmatch(r"[0-9]{1,2}\.[0-9]", text):
        raise InvalidInput(
            f"{text!r} is not a compute capability",
            hint="give for example 9.0; nvidia-smi --query-gpu=compute_cap --format=csv shows it",
        )
    major, _, minor = text.partition(".")
    return int(major), int(minor)
