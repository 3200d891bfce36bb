"""Peak memory on CUDA from the caching allocator, and a memory cap that is enforced.

A cap means: this training would run on a GPU of that size. So the caching allocator is limited to the cap less what
the process holds outside it (the CUDA context and the loaded kernels), and what does not fit fails as it would there.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from autotune.memory import CONTEXT_ALONE, MemoryReading, nvml
from autotune.quantities import format_size

MODULES_LOADED_LATER_BYTES = 64 * 1024**2
"""Kept free under the cap for kernels that CUDA loads after the first step (the evaluation's, for example)."""


class CudaMeter:
    """A `MemoryMeter`. Must be made before anything else in this process touches the device.

    `uuid` is the device's identity in NVML. What this process holds outside the allocator is the growth of the
    device's used memory since then, so other processes must not change theirs meanwhile.
    """

    def __init__(self, device: torch.device, *, uuid: str, cap_bytes: int | None) -> None:
        self._device = device
        self._uuid = uuid
        self._cap_bytes = cap_bytes
        self._used_before_bytes = nvml.used_bytes(uuid)
        self._context_bytes = 0
        self._peak_bytes = 0
        self._peak_phase = ""
        self._peak_reserved_bytes = 0
        self._has_measured = self._is_measuring = False
        torch.cuda.set_device(device)  # compiled code and a bare "cuda" go to this device, too
        torch.empty(1, device=device)  # creates the context
        torch.cuda.synchronize(device)
        self._limit_allocator(reserve_bytes=0)

    @contextmanager
    def measuring(self, resident: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """The allocator knows what is resident: nothing asks for it."""
        if self._has_measured:
            self._keep_peak("training")  # of the timed steps since the last measured block
        self._has_measured = self._is_measuring = True
        self._forget_peak()
        yield
        self._keep_peak("between")
        self._is_measuring = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if not self._is_measuring:
            yield
            return
        self._keep_peak("between")
        self._forget_peak()
        yield
        self._keep_peak(name)
        self._forget_peak()

    def kernels_have_run(self) -> None:
        self._context_bytes = self._outside_allocator_bytes()
        self._limit_allocator(reserve_bytes=MODULES_LOADED_LATER_BYTES)
        # What the first step reserved under the wider limit, the final limit might have made it give back.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._peak_reserved_bytes = 0

    def reading(self) -> MemoryReading:
        self._keep_reserved()
        return MemoryReading(
            peak_memory_bytes=self._peak_bytes,
            peak_phase=self._peak_phase,
            peak_reserved_bytes=self._peak_reserved_bytes,
            context_bytes=max(self._context_bytes, self._outside_allocator_bytes()),
            alloc_retries=int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0)),
        )

    def _limit_allocator(self, *, reserve_bytes: int) -> None:
        """Leaves the allocator the cap less context and `reserve_bytes`; raises OutOfMemoryError if that is none."""
        if self._cap_bytes is None:
            return
        allowed_bytes = self._cap_bytes - self._context_bytes - reserve_bytes
        if allowed_bytes <= 0:
            raise torch.OutOfMemoryError(
                f"{CONTEXT_ALONE} {format_size(self._context_bytes + reserve_bytes)} of the cap"
            )
        total_bytes = torch.cuda.get_device_properties(self._device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed_bytes / total_bytes), self._device)

    def _outside_allocator_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        grown_bytes = nvml.used_bytes(self._uuid) - self._used_before_bytes
        return max(0, grown_bytes - torch.cuda.memory_reserved(self._device))

    def _forget_peak(self) -> None:
        self._keep_reserved()
        torch.cuda.reset_peak_memory_stats(self._device)

    def _keep_reserved(self) -> None:
        reserved_bytes = torch.cuda.max_memory_reserved(self._device)
        self._peak_reserved_bytes = max(self._peak_reserved_bytes, reserved_bytes)

    def _keep_peak(self, phase: str) -> None:
        peak_bytes = torch.cuda.max_memory_allocated(self._device)
        if peak_bytes > self._peak_bytes:
            self._peak_bytes, self._peak_phase = peak_bytes, phase
