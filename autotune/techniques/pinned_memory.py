"""Counts the memory of the host that activation offload pins on CUDA, and bounds it by what the host has.

Pinned memory cannot be swapped out, and torch keeps what it has pinned until the process ends, in
blocks of a power of two bytes. Without a bound a trial that pins too much is ended by the kernel,
and often the search with it. Source: c10/core/CachingHostAllocator.h
"""

import torch
from torch import Tensor

from autotune.memory.host import HostMemoryExceeded, available_bytes
from autotune.spec.config import TrainingConfig
from autotune.spec.result import PINNED_ON_HOST
from autotune.techniques import activation_offload
from autotune.techniques.activation_offload import OnHost, pinned_bytes
from autotune.units import format_size

KEPT_FREE_SHARE = 0.1
"""Of the memory that the host has available when a trial begins: for all else that it and others
then do."""


def bound_pinned_memory() -> None:
    """Makes offloading raise HostMemoryExceeded before it pins more than the host has.

    A setting of the whole process.

    To be called when a trial begins, once, on CUDA.
    """
    available = available_bytes()
    if available is None:
        return
    budget = PinnedMemoryBudget(
        limit_bytes=int((1 - KEPT_FREE_SHARE) * available), available_bytes=available
    )
    to_host = activation_offload.to_host

    def to_host_within_budget(tensor: Tensor) -> OnHost:
        budget.take(tensor.numel() * tensor.element_size())
        return to_host(tensor)

    activation_offload.to_host = to_host_within_budget


def offloaded_bytes(config: TrainingConfig) -> dict[str, int]:
    """Returns {"pinned_on_host": bytes} with what torch has pinned at most; empty where nothing is offloaded."""
    if config.activation_offload == "none" or not torch.cuda.is_initialized():
        return {}
    return {PINNED_ON_HOST: int(torch.cuda.host_memory_stats()["allocated_bytes.peak"])}


class PinnedMemoryBudget:
    """How much may be pinned, and at most is."""

    def __init__(self, *, limit_bytes: int, available_bytes: int) -> None:
        self._limit_bytes, self._available_bytes = limit_bytes, available_bytes
        self._at_most_bytes = 0
        """As if no block was ever used again; counted anew when that is too much, for counting
        takes time."""

    def take(self, size_bytes: int) -> None:
        """To be called before a tensor of that size is copied to pinned memory.

        Raises HostMemoryExceeded.
        """
        block_bytes = pinned_bytes(size_bytes)
        self._at_most_bytes += block_bytes
        if self._at_most_bytes <= self._limit_bytes:
            return
        pinned, in_use = _pinned_and_in_use()
        # A free block of another size is of no use; that more had to be pinned is then seen at the
        # next tensor.
        is_new = pinned - in_use < block_bytes
        self._at_most_bytes = pinned + (block_bytes if is_new else 0)
        if self._at_most_bytes > self._limit_bytes:
            needed, left, limit = map(
                format_size, (self._at_most_bytes, self._available_bytes, self._limit_bytes)
            )
            raise HostMemoryExceeded(
                f"out of host memory: offloaded activations pin at least {needed}, and of the {left} that the host had "
                f"left when the trial began {limit} may be pinned; use activation_offload none, checkpointing or a "
                "smaller micro batch, or a host or container with more memory"
            )


def _pinned_and_in_use() -> tuple[int, int]:
    counted = torch.cuda.host_memory_stats()
    return counted["allocated_bytes.current"], counted["active_bytes.current"]
