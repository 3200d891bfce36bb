"""Limits the host memory that activation offload pins on CUDA to what the host has.

Pinned memory cannot be swapped out, and torch does not release it before the process ends. It pins
blocks of a power of two bytes. Without a limit the kernel kills a trial that pins too much, and
often the search with it. Source: c10/core/CachingHostAllocator.h
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
"""The share of the memory available at the start of a trial that stays free for everything else."""


def bound_pinned_memory() -> None:
    """Makes offloading raise HostMemoryExceeded before it pins more than the host has.

    Applies to the whole process. Must be called once on CUDA, when a trial begins.
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
    """Returns {"pinned_on_host": peak bytes} of torch; empty where nothing is offloaded."""
    if config.activation_offload == "none" or not torch.cuda.is_initialized():
        return {}
    return {PINNED_ON_HOST: int(torch.cuda.host_memory_stats()["allocated_bytes.peak"])}


class PinnedMemoryBudget:
    """Counts the bytes that are pinned, and limits them."""

    def __init__(self, *, limit_bytes: int, available_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._available_bytes = available_bytes
        self._upper_bound_bytes = 0
        """Pinned bytes if no block was ever reused. Counting the real number takes time, so that is
        only done when this bound exceeds the limit."""

    def take(self, size_bytes: int) -> None:
        """Must be called before a tensor of that size is copied to pinned memory.

        Raises HostMemoryExceeded if the limit would be exceeded.
        """
        block_bytes = pinned_bytes(size_bytes)
        self._upper_bound_bytes += block_bytes
        if self._upper_bound_bytes <= self._limit_bytes:
            return
        pinned, in_use = _pinned_and_in_use()
        # Assumes that a free block has the right size. If not, torch pins another one, which is
        # counted at the next tensor.
        self._upper_bound_bytes = pinned
        if pinned - in_use < block_bytes:
            self._upper_bound_bytes += block_bytes
        if self._upper_bound_bytes > self._limit_bytes:
            needed = format_size(self._upper_bound_bytes)
            left = format_size(self._available_bytes)
            limit = format_size(self._limit_bytes)
            raise HostMemoryExceeded(
                f"out of host memory: offloaded activations pin at least {needed}, and of the "
                f"{left} that the host had left when the trial began {limit} may be pinned; use "
                "activation_offload none, checkpointing or a smaller micro batch, or a host or "
                "container with more memory"
            )


def _pinned_and_in_use() -> tuple[int, int]:
    counted = torch.cuda.host_memory_stats()
    return counted["allocated_bytes.current"], counted["active_bytes.current"]
