"""Counts the host memory that offloading takes on CUDA, and limits it to what the host has.

Most of it is pinned. Pinned memory cannot be swapped out, and torch does not release it before the
process ends. It pins blocks of a power of two bytes. Without a limit the kernel kills a trial that
pins too much, and often the search with it. Source: c10/core/CachingHostAllocator.h
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from autotune.memory.host import HostMemoryExceeded, available_bytes, when_it_was_left
from autotune.memory.meter import resident_bytes
from autotune.shipped import activation_offload, frozen_on_host
from autotune.shipped.activation_offload import OnHost
from autotune.shipped.frozen_on_host import emptied
from autotune.shipped.quantized import scales_beside, tensors_behind
from autotune.spec.config import TrainingConfig
from autotune.spec.optimizers import OPTIMIZERS
from autotune.spec.result import PINNED_ON_HOST, STATE_ON_HOST
from autotune.techniques.activation_offload import pinned_bytes
from autotune.techniques.offload import SMALLEST_ELEMENTS
from autotune.units import different_sizes, format_size

KEPT_FREE_SHARE = 0.1
"""The share of the memory available at the start of a trial that stays free for everything else."""


def check_host_memory(config: TrainingConfig, parameters: Iterable[Tensor]) -> None:
    """Raises HostMemoryExceeded if the host has less memory than `config.offload` moves there.

    Must be called before. Of several ranks each does so with its own part of the host's memory.
    """
    available = available_bytes()
    if config.offload == "none" or available is None:
        return
    needed = bytes_to_host(config, parameters)
    limit = int((1 - KEPT_FREE_SHARE) * available)
    if needed > limit:
        size, allowed = different_sizes(needed, limit)
        raise HostMemoryExceeded(
            f"out of host memory: offload {config.offload} takes {size}, and of the "
            f"{format_size(available)} {when_it_was_left()} {allowed} may be taken; "
            "use offload none, an optimizer with less state, "
            "or a host or container with more memory"
        )


def bytes_to_host(config: TrainingConfig, parameters: Iterable[Tensor]) -> int:
    """Returns the host memory of `config.offload`: pinned weights and gradients, and the state.

    Between two steps, when frozen weights have been copied to the host.
    """
    if config.offload == "none":
        return 0
    size_bytes = 0
    for parameter in parameters:
        if parameter.requires_grad and config.offload != "frozen":
            size_bytes += sum(_bytes_of_trained(config, one) for one in tensors_behind(parameter))
        elif config.offload == "all":
            frozen = sum(one.nbytes for one in tensors_behind(parameter))
            on_device = sum(scales.nbytes for scales in scales_beside(parameter))
            size_bytes += pinned_bytes(frozen - on_device)
        elif config.offload == "frozen":
            size_bytes += sum(pinned_bytes(one.nbytes) for one in emptied(parameter))
    return size_bytes


def _bytes_of_trained(config: TrainingConfig, weight: Tensor) -> int:
    if config.offload == "optimizer" and weight.numel() < SMALLEST_ELEMENTS:
        return 0
    # The weight and its gradient. Of the state, rows and columns do not count.
    state_bytes = int(OPTIMIZERS[config.optimizer].state) * weight.nbytes
    return 2 * pinned_bytes(weight.nbytes) + state_bytes


def bound_frozen_weights() -> None:
    """Makes offload frozen raise HostMemoryExceeded before it pins more than the host has.

    Applies to the whole process. Must be called once on CUDA, before weights are loaded.
    """
    available = available_bytes()
    if available is None:
        return
    budget = PinnedMemoryBudget(
        limit_bytes=int((1 - KEPT_FREE_SHARE) * available),
        available_bytes=available,
        pins="frozen weights",
        hint="use offload none, base_weights of fewer bits",
    )
    copy_on_host = frozen_on_host.copy_on_host

    def copy_within_budget(tensor: Tensor) -> Tensor:
        budget.take(tensor.nbytes)
        return copy_on_host(tensor)

    frozen_on_host.copy_on_host = copy_within_budget


def bound_pinned_memory(*, taken_otherwise: int = 0) -> None:
    """Makes activation offload raise HostMemoryExceeded before it pins more than the host has.

    Applies to the whole process. Must be called once on CUDA, before the first step. Something else
    will take `taken_otherwise` bytes, of which what is pinned now is a part.
    """
    available = available_bytes()
    if available is None:
        return
    pinned, _ = _pinned_and_in_use()
    budget = PinnedMemoryBudget(
        limit_bytes=int((1 - KEPT_FREE_SHARE) * available) - max(0, taken_otherwise - pinned),
        available_bytes=available,
        pinned_before=pinned,
    )
    to_host = activation_offload.to_host

    def to_host_within_budget(tensor: Tensor) -> OnHost:
        budget.take(tensor.numel() * tensor.element_size())
        return to_host(tensor)

    activation_offload.to_host = to_host_within_budget


def offloaded_bytes(config: TrainingConfig, state: Iterable[Tensor] = ()) -> dict[str, int]:
    """Returns the host's bytes by kind, with those of optimizer state; empty without offloading."""
    if not torch.cuda.is_initialized():
        return {}
    found = {}
    if config.activation_offload != "none" or config.offload != "none":
        counted = torch.cuda.host_memory_stats()
        found[PINNED_ON_HOST] = int(counted["allocated_bytes.peak"])
    if config.offload != "none":
        found[STATE_ON_HOST] = resident_bytes(on_device(state, "cpu"))
    return found


def on_device(tensors: Iterable[Tensor], device_type: str) -> list[Tensor]:
    """Returns the tensors that are on such a device, those of a DTensor as its own part."""
    parts = (part for tensor in tensors for part in tensors_behind(tensor))
    return [part for part in parts if part.device.type == device_type]


class PinnedMemoryBudget:
    """Counts the bytes that are pinned, and limits them."""

    def __init__(
        self,
        *,
        limit_bytes: int,
        available_bytes: int,
        pinned_before: int = 0,
        pins: str = "offloaded activations",
        hint: str = "use activation_offload none, checkpointing or a smaller micro batch",
    ) -> None:
        self._pins, self._hint = pins, hint
        self._limit_bytes = limit_bytes
        self._available_bytes = available_bytes
        self._pinned_before = pinned_before
        """Bytes that were pinned already when the available ones were read."""
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
        self._upper_bound_bytes = pinned - self._pinned_before
        if pinned - in_use < block_bytes:
            self._upper_bound_bytes += block_bytes
        if self._upper_bound_bytes > self._limit_bytes:
            needed = format_size(self._upper_bound_bytes)
            left = format_size(self._available_bytes)
            limit = format_size(self._limit_bytes)
            raise HostMemoryExceeded(
                f"out of host memory: {self._pins} pin at least {needed}, and of the {left} "
                f"{when_it_was_left()} {limit} may be pinned; {self._hint}, or a host or "
                "container with more memory"
            )


def _pinned_and_in_use() -> tuple[int, int]:
    counted = torch.cuda.host_memory_stats()
    return counted["allocated_bytes.current"], counted["active_bytes.current"]
