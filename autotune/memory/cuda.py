"""Measures peak memory on CUDA with the caching allocator's counters, and enforces a memory cap.

A cap means that the training would run on a GPU of that size. So the caching allocator is limited
to the cap minus what the process holds outside the allocator (`context.py`), and an allocation that
does not fit fails as it would on such a GPU. Trials with a cap and without follow the same rule:
what the allocator had to reserve, plus the context at the end, must be within the cap. Kernels that
are loaded after the limit was set count like any others.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch._inductor.config
from torch import Tensor

from autotune.memory.communication import Communication
from autotune.memory.context import create_context
from autotune.memory.meter import CONTEXT_ALONE, MemoryReading
from autotune.memory.nvml import open_device
from autotune.units import format_size


class CudaMeter:
    """A `MemoryMeter` for CUDA. Create it before anything in the process touches the device."""

    def __init__(
        self,
        device: torch.device,
        *,
        uuid: str | None,
        cap_bytes: int | None,
        new_context_bytes: int | None = None,
        shares_device: bool = False,
    ) -> None:
        self._device = device
        self._cap_bytes = cap_bytes
        self._peak_bytes = 0
        self._peak_phase = ""
        self._peak_reserved_bytes = 0
        self._peak_alone_bytes = 0
        """Peak allocated in the first step or in `aside`, without what was reserved for it."""
        self._has_measured = False
        self._is_measuring = False
        self._context = create_context(
            device,
            nvml=None if uuid is None else open_device(uuid),
            expected_bytes=new_context_bytes,
            shares_device=shares_device,
        )
        self._context_bytes = self._context.size_bytes()
        self._limit_allocator()

    @contextmanager
    def measuring(self, resident: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """As in `MemoryMeter`. `resident` is not called: the allocator's counters include it."""
        if self._has_measured:
            self._record_peak("training")  # of the timed steps since the last measurement
        self._has_measured = True
        self._is_measuring = True
        self._reset_peak()
        yield
        self._record_peak("between")
        self._is_measuring = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if not self._is_measuring:
            yield
            return
        self._record_peak("between")
        self._reset_peak()
        yield
        self._record_peak(name)
        self._reset_peak()

    @contextmanager
    def excluded(self) -> Iterator[None]:
        if self._has_measured:
            self._record_peak("training")
        self._record_reserved()
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        self._count_allocated_alone()

    def kernels_have_run(self) -> None:
        self._context_bytes = self._context.size_bytes()
        self._limit_allocator()
        self._peak_reserved_bytes = 0
        self._count_allocated_alone()

    def communication(self) -> Communication | None:
        return None  # only a profiler would know

    def reading(self) -> MemoryReading:
        self._record_reserved()
        context_bytes = self._context.size_bytes()
        return MemoryReading(
            peak_memory_bytes=self._peak_bytes,
            peak_phase=self._peak_phase,
            peak_reserved_bytes=self._reserved_with_context(context_bytes),
            context_bytes=context_bytes,
            alloc_retries=int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0)),
        )

    def _limit_allocator(self) -> None:
        """Limits the allocator to the cap minus the context.

        Raises OutOfMemoryError if nothing is left.
        """
        if self._cap_bytes is None:
            return
        allowed_bytes = self._cap_bytes - self._context_bytes
        if allowed_bytes <= 0:
            raise torch.OutOfMemoryError(
                f"{CONTEXT_ALONE} {format_size(self._context_bytes)} of the cap"
            )
        total_bytes = torch.cuda.get_device_properties(self._device).total_memory
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, allowed_bytes / total_bytes), self._device
        )

    def _reserved_with_context(self, context_bytes: int) -> int:
        """Returns the most that the allocator would have reserved next to that context.

        That is, if its limit had allowed for such a context from the start.

        The limit was set before the context held all kernels. If the allocator has reserved all
        that its limit allows, a tighter limit would have made it release cached blocks to make room
        for the later kernels, but nothing that was allocated.
        """
        if self._cap_bytes is None:
            return self._peak_reserved_bytes
        allocated_bytes = max(self._peak_bytes, self._peak_alone_bytes)
        return min(self._peak_reserved_bytes, max(allocated_bytes, self._cap_bytes - context_bytes))

    def _count_allocated_alone(self) -> None:
        """Counts the peak allocated since the last reset, not what was reserved for it.

        The allocator releases its cached blocks before it fails an allocation, so a tighter limit
        would have made it release them.
        """
        allocated_bytes = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._peak_alone_bytes = max(self._peak_alone_bytes, allocated_bytes)
        self._peak_reserved_bytes = max(self._peak_reserved_bytes, allocated_bytes)

    def _reset_peak(self) -> None:
        self._record_reserved()
        torch.cuda.reset_peak_memory_stats(self._device)

    def _record_reserved(self) -> None:
        reserved_bytes = torch.cuda.max_memory_reserved(self._device)
        self._peak_reserved_bytes = max(self._peak_reserved_bytes, reserved_bytes)

    def _record_peak(self, phase: str) -> None:
        peak_bytes = torch.cuda.max_memory_allocated(self._device)
        if torch._inductor.config.triton.cudagraphs:
            # A graph computes in memory that is reserved for it, where nothing is allocated.
            peak_bytes = torch.cuda.max_memory_reserved(self._device)
        if peak_bytes > self._peak_bytes:
            self._peak_bytes, self._peak_phase = peak_bytes, phase
