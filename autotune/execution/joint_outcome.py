"""The outcome of a training on several devices, from those of its parts: ranks, or nodes.

What is measured is put together, and of what failed the part counts that failed first, unless it
only complains that another one has ended. Does not import torch.
"""

from collections.abc import Sequence
from dataclasses import replace

from autotune.spec.result import Measurement

SECONDS_FOR_OTHERS = 1.0
"""How long the errors of other ranks are waited for: that which came first may only say that the
connection to another one broke."""

_CONNECTION_BROKE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "connectFullMesh failed",
    "Broken pipe",
    "Socket Timeout",
    "NCCL error",
    "recvValue failed",
)
"""Parts of the messages of a rank whose peer has ended."""


def complains_of_another(message: str | None) -> bool:
    """Returns whether the message of a failure only says that another rank has ended."""
    return message is not None and any(part in message for part in _CONNECTION_BROKE)


def together(parts: Sequence[Measurement]) -> Measurement:
    """Returns the measurement of a trial from those of its ranks, which all came to the end.

    Or from those of its nodes, each with as many ranks, in order. Memory is that of the rank that
    needs most, and communication is the mean over all; the rest is the same for all, or that of
    rank 0.
    """
    if parts[0].peak_memory_bytes is None:
        return parts[0]  # the memory was not measured
    largest = max(parts, key=lambda part: part.device_bytes or 0)
    over_cap = next((part for part in parts if part.outcome == "over_cap"), parts[0])
    peaks: list[int] = []
    for part in parts:
        peaks += part.peak_memory_bytes_by_rank or (part.peak_memory_bytes or 0,)
    return replace(
        parts[0],
        outcome=over_cap.outcome,
        message=over_cap.message,
        peak_memory_bytes=max(peaks),
        peak_memory_bytes_by_rank=tuple(peaks),
        peak_reserved_bytes=max(part.peak_reserved_bytes or 0 for part in parts),
        device_bytes=largest.device_bytes,
        context_bytes=largest.context_bytes,
        alloc_retries=max((part.alloc_retries or 0 for part in parts), default=None),
        peak_phase=largest.peak_phase,
        bytes_by_kind=largest.bytes_by_kind,
        peak_bytes_by_category=largest.peak_bytes_by_category,
        communication_seconds=_mean([part.communication_seconds for part in parts]),
        communication_share=_mean([part.communication_share for part in parts]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    """Returns the mean; None where a value is not known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None
