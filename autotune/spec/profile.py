"""A profile: where the time and the bytes of a trial's steps go. Does not import torch.

It is measured in a run of its own, which no number of the trial comes from.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.spec.limits import Count, Seconds, SizeBytes
from autotune.spec.prediction import Category, Holder, Timeline
from autotune.spec.schema import Schema

MOST_STEPS = 100
"""Of a profile: the trace of each step takes megabytes."""


@dataclass(frozen=True, kw_only=True)
class OperatorUse(Schema):
    """What one operator did, in the mean of the profiled steps."""

    name: str
    calls: float
    host_seconds: Seconds
    """Time on the host within the operator, without that of operators that it calls."""
    device_seconds: Seconds
    """Time of the kernels that it has started on a device; 0 on a CPU."""
    allocated_bytes: SizeBytes
    """All that it has allocated, however soon that was freed."""

    @property
    def seconds(self) -> float:
        """The time on the device that trains: that of kernels, or on a CPU that of the host."""
        return self.device_seconds or self.host_seconds


@dataclass(frozen=True, kw_only=True)
class CompiledGraph(Schema):
    """One compilation by torch.compile."""

    name: str
    """Function, file and line of the code that was compiled."""
    operators: Count
    """How many operators the captured graph has; 0 where none was captured."""
    seconds: Seconds
    recompiled_because: str = ""
    """The guard that failed, where the same code had been compiled before."""


@dataclass(frozen=True, kw_only=True)
class Compilation(Schema):
    """What torch.compile did in the first steps."""

    graphs: tuple[CompiledGraph, ...] = ()
    breaks: tuple[tuple[str, int], ...] = ()
    """(reason, how often) of each place where a graph had to end."""
    code_files: tuple[str, ...] = ()
    """Generated code, relative to the profile's folder."""


@dataclass(frozen=True, kw_only=True)
class Profile(Schema):
    """Where the time and the bytes of a steady training step go. Sizes are in bytes."""

    device: str
    """The type of the device: cpu or cuda."""
    steps: Count
    """How many steps were profiled."""
    step_seconds: Seconds
    """Median time of a step without a profiler, in the same run."""
    profiled_step_seconds: Seconds
    """Mean time of a profiled step; the times below are parts of it."""
    phase_seconds: Mapping[str, float]
    """Of the forward pass, the backward pass and the optimizer's step. On CUDA this is the time in
    which the host starts the kernels."""
    recomputed_seconds: Seconds | None
    """The part of the backward pass in which checkpointed forward passes run again; None where they
    are inside compiled code."""
    idle_seconds: Seconds | None
    """Time of a step in which the GPU waits for the host; None on a CPU."""
    operators: tuple[OperatorUse, ...]
    """Those that took most time or memory, the slowest first."""
    other_operators: Count
    """How many are not among them."""
    peak_memory_bytes: SizeBytes
    """Of one step, by the allocator's events; the measured peak of the trial is a run of its own.
    """
    peak_phase: str
    bytes_by_category: Mapping[Category, int]
    """Bytes at the peak; their sum is the peak."""
    holders: tuple[Holder, ...]
    timeline: Timeline
    compilation: Compilation | None
    """None without torch.compile."""
    files: tuple[str, ...]
    """What was written, relative to the profile's folder."""
    torch_version: str

    def to_dict(self) -> dict[str, Any]:
        """Returns a dictionary ready for JSON."""
        return dataclasses.asdict(self)
