"""Peak memory of a training: the one number every other number is weighed against.

`cpu.py` reads the allocator's own events, `cuda.py` the caching allocator's counters; both are a
`MemoryMeter`.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

CONTEXT_ALONE = "the CUDA context alone needs"
"""How the message begins when a cap leaves the allocator nothing at all."""


@dataclass(frozen=True, kw_only=True)
class MemoryReading:
    """All sizes in bytes.

    On a CPU nothing is reserved beyond what is allocated and there is no context.
    """

    peak_memory_bytes: int
    peak_phase: str
    peak_reserved_bytes: int
    """What the allocator must be able to reserve: what it had at its fullest since the first step,
    and at least what was allocated at once in that step or aside (`MemoryMeter.aside`)."""
    context_bytes: int = 0
    alloc_retries: int = 0

    @property
    def device_bytes(self) -> int:
        """What the device must have for this to run."""
        return self.peak_reserved_bytes + self.context_bytes


class PhaseMarker(Protocol):
    def phase(self, name: str) -> AbstractContextManager[None]:
        """Names a part of a training step, so that it can be said where a peak was."""


class MemoryMeter(PhaseMarker, Protocol):
    def measuring(self, resident: Callable[[], Iterable[Tensor]]) -> AbstractContextManager[None]:
        """Measures the block it surrounds. Readings accumulate.

        `resident` gives the tensors that are alive when the block begins. They are not kept: what
        the block replaces of them is freed, as it is without a measurement.
        """

    def aside(self) -> AbstractContextManager[None]:
        """What runs in the block is no part of the training: its peak counts for the device alone."""

    def kernels_have_run(self) -> None:
        """To be called once after the first step: the context now holds its kernels, the allocator gets the rest."""

    def reading(self) -> MemoryReading:
        """The peak over everything measured so far."""


def resident_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`, in bytes; views of one storage count once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(storages.values())


def make_meter(
    device: torch.device,
    *,
    uuid: str | None,
    cap_bytes: int | None,
    new_context_bytes: int | None = None,
    shares_device: bool = False,
) -> MemoryMeter:
    """The meter for `device`.

    On CUDA `cap_bytes` is enforced from here on; None leaves the device unlimited.

    `uuid` is what NVML calls the device; None: NVML does not know it. `new_context_bytes` and
    `shares_device` are as in `create_context`, and as there DeviceDisturbed is raised.
    """
    if device.type == "cuda":
        from autotune.memory.cuda import CudaMeter

        return CudaMeter(
            device,
            uuid=uuid,
            cap_bytes=cap_bytes,
            new_context_bytes=new_context_bytes,
            shares_device=shares_device,
        )
    from autotune.memory.cpu import CpuMeter

    return CpuMeter()
