"""Peak memory on CUDA from the caching allocator, and a memory cap that is enforced.

A cap means: this training would run on a GPU of that size. So the caching allocator is limited to
the cap less what the process holds outside it (`context.py`), and what does not fit fails as it
would there. One rule decides for trials with a cap and without: what the allocator had to reserve
and the context, as it is at the end, must be within the cap. Kernels that are loaded after the
limit was set count like any others.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from autotune.memory.context import create_context
from autotune.memory.meter import CONTEXT_ALONE, MemoryReading
from autotune.memory.nvml import open_device
from autotune.units import format_size


class CudaMeter:
    """A `MemoryMeter`. Must be made before anything else in this process touches the device."""

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
        """Allocated at once in the first step or aside."""
        self._has_measured = self._is_measuring = False
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

    @contextmanager
    def aside(self) -> Iterator[None]:
        if self._has_measured:
            self._keep_peak("training")
        self._keep_reserved()
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        self._count_allocated_alone()

    def kernels_have_run(self) -> None:
        self._context_bytes = self._context.size_bytes()
        self._limit_allocator()
        self._peak_reserved_bytes = 0
        self._count_allocated_alone()

    def reading(self) -> MemoryReading:
        self._keep_reserved()
        context_bytes = self._context.size_bytes()
        return MemoryReading(
            peak_memory_bytes=self._peak_bytes,
            peak_phase=self._peak_phase,
            peak_reserved_bytes=self._reserved_beside(context_bytes),
            context_bytes=context_bytes,
            alloc_retries=int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0)),
        )

    def _limit_allocator(self) -> None:
        """Leaves the allocator the cap less the context; raises OutOfMemoryError if that is nothing."""
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

    def _reserved_beside(self, context_bytes: int) -> int:
        """Returns what the allocator reserved at most, had it been limited for a context of that size all along.

        The limit was set when the context did not hold all kernels yet. Of an allocator that has
        reserved all that it may, the cached blocks that the later ones need would have been given
        back, but nothing that was allocated.
        """
        if self._cap_bytes is None:
            return self._peak_reserved_bytes
        allocated_bytes = max(self._peak_bytes, self._peak_alone_bytes)
        return min(self._peak_reserved_bytes, max(allocated_bytes, self._cap_bytes - context_bytes))

    def _count_allocated_alone(self) -> None:
        """Of what ran since the peaks were forgotten, counts what was allocated, not what was reserved for it.

        What the allocator keeps for later it gives back before it refuses anything: a tighter limit
        would have made it.
        """
        allocated_bytes = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._peak_alone_bytes = max(self._peak_alone_bytes, allocated_bytes)
        self._peak_reserved_bytes = max(self._peak_reserved_bytes, allocated_bytes)

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
