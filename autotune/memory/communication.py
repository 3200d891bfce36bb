"""Computes from a profile how long a process was in collectives with the other ranks of a trial.

A collective counts from the moment at which the process has asked for it until it is done, with the
time that it waits for the other ranks. Collectives at the same time count once, and computation may
run meanwhile: the seconds are not what a training without communication would save.

On a CPU they are gloo's own events. On CUDA they are NCCL's kernels, which begin once the stream
has come to them. Pure functions.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch.profiler import profile

_OF_GLOO = "gloo:"
"""Start of the name of an event from the request of a collective to its end, such as
`gloo:all_reduce`. Source: ProcessGroupGloo.cpp in torch/csrc/distributed/c10d"""
_OF_NCCL = ("ncclDevKernel", "ncclKernel")
"""Start of the name of a kernel: `ncclDevKernel_AllGather_RING_LL(...)`, without Dev in releases of
NCCL before 2.19."""


@dataclass(frozen=True, kw_only=True)
class Communication:
    """What one rank spends in collectives in one or more profiled training steps."""

    seconds: float
    share: float
    """Of these steps."""

    def of_one_step(self, *, steps: int) -> "Communication":
        """Returns the mean over its steps."""
        return replace(self, seconds=self.seconds / steps)


def communication_on_cpu(recording: profile, *, within: str) -> Communication | None:
    """Returns the communication by gloo inside the range named `within`; None where there is none.

    A release of torch that names gloo's events otherwise gives None, too, not zero.
    """
    events = _events(recording)
    first, last = next(_interval(event) for event in events if event.name() == within)
    collectives = [
        (max(start, first), min(end, last))
        for start, end in map(_interval, (e for e in events if e.name().startswith(_OF_GLOO)))
        if start < last and end > first
    ]
    if not collectives:
        return None
    in_flight = covered(collectives)
    return Communication(seconds=in_flight / 1e9, share=in_flight / (last - first))


def communication_on_cuda(recording: profile, *, seconds: float) -> Communication | None:
    """Returns the communication by NCCL in one step of `seconds`; None where there is none."""
    kernels = [
        _interval(event) for event in _events(recording) if event.name().startswith(_OF_NCCL)
    ]
    if not kernels:
        return None
    in_flight_seconds = covered(kernels) / 1e9
    return Communication(seconds=in_flight_seconds, share=min(1.0, in_flight_seconds / seconds))


def covered(intervals: Iterable[tuple[int, int]]) -> int:
    """Returns the length of the union of (start, end) intervals."""
    length = 0
    reached: int | None = None
    for start, end in sorted(intervals):
        if reached is None or start > reached:
            length += end - start
            reached = end
        elif end > reached:
            length += end - reached
            reached = end
    return length


def _events(recording: profile) -> list[Any]:
    assert recording.profiler is not None
    results = recording.profiler.kineto_results
    assert results is not None
    return list(results.events())


def _interval(event: Any) -> tuple[int, int]:
    """Returns start and end of an event, in nanoseconds."""
    start = event.start_ns()
    return start, start + event.duration_ns()
