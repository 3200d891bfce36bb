"""The interface that measures the peak memory of a training, and what a measurement returns.

`cpu.py` implements it with the allocator's events, `cuda.py` with the caching allocator's counters.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from autotune.memory.communication import Communication

CONTEXT_ALONE = "the CUDA context alone needs"
"""Start of the message when the cap leaves no bytes for the allocator."""


@dataclass(frozen=True, kw_only=True)
class MemoryReading:
    """The measured peak of a training. All sizes are in bytes.

    On a CPU nothing is reserved beyond what is allocated, and there is no context.
    """

    peak_memory_bytes: int
    peak_phase: str
    peak_reserved_bytes: int
    """What the allocator must be able to reserve: the most that it had reserved after the first
    step, and at least the peak allocated in that step or in `MemoryMeter.aside`."""
    context_bytes: int = 0
    alloc_retries: int = 0

    @property
    def device_bytes(self) -> int:
        """The memory that a device must have to run this training."""
        return self.peak_reserved_bytes + self.context_bytes


class PhaseMarker(Protocol):
    """Is told which part of a training step runs."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Names the part of a training step that runs inside, so that a peak can be located."""


class MemoryMeter(PhaseMarker, Protocol):
    """Measures peak memory on one device."""

    def measuring(self, resident: Callable[[], Iterable[Tensor]]) -> AbstractContextManager[None]:
        """Measures what runs inside it. Readings accumulate.

        `resident` returns the tensors that are alive when the measurement begins. No reference to
        them is stored, so those that are replaced meanwhile are freed as without a measurement.
        """

    def excluded(self) -> AbstractContextManager[None]:
        """Counts what runs inside for `device_bytes`, but not for the training's peak."""

    def kernels_have_run(self) -> None:
        """Must be called once, after the first step.

        The context has loaded its kernels by then, and the allocator is limited to what is left.
        """

    def communication(self) -> Communication | None:
        """Returns what the latest measurement spent in collectives.

        None where the meter records no events, as on CUDA, and where there was no collective.
        """

    def reading(self) -> MemoryReading:
        """Returns the peak over everything measured so far."""


def resident_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the distinct storages of `tensors`; views of one storage count once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(storages.values())
