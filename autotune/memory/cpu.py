"""Peak of live tensor bytes on the CPU, from the allocator's own events.

torch's profiler records an event for every block the CPU allocator hands out or takes back, also those of code that
torch.compile generated, which a dispatch mode would not see. Blocks born before the recording are not in it, and
neither is their end: so the tensors alive at its start are counted and added, and must live until its end, as weights
and optimizer state do.

The events are read from `kineto_results`, which is private: the public list leaves out all events that happen inside
an operator. `tests/memory/test_cpu.py` holds this to a peak known by hand.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from autotune.memory import MemoryReading, resident_bytes

_PHASE_PREFIX = "autotune::"


class CpuMeter:
    """A `MemoryMeter`. Recording costs about a third of a step's time, so measured steps are not timed."""

    def __init__(self) -> None:
        self._peak_bytes = 0
        self._peak_phase = ""
        self._is_measuring = False

    @contextmanager
    def measuring(self, resident: Iterable[Tensor]) -> Iterator[None]:
        resident_at_start = resident_bytes(resident)
        self._is_measuring = True
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
            yield
        self._is_measuring = False
        peak, phase = peak_of(recording, resident_at_start)
        if peak > self._peak_bytes:
            self._peak_bytes, self._peak_phase = peak, phase

    def phase(self, name: str) -> AbstractContextManager[None]:
        # No events are recorded outside a measured block, so the range is only named inside one.
        return record_function(_PHASE_PREFIX + name) if self._is_measuring else nullcontext()

    def kernels_have_run(self) -> None:
        pass

    def reading(self) -> MemoryReading:
        return MemoryReading(
            peak_memory_bytes=self._peak_bytes,
            peak_phase=self._peak_phase,
            peak_reserved_bytes=self._peak_bytes,
        )


def peak_of(recording: profile, resident_at_start: int, *, within: str | None = None) -> tuple[int, str]:
    """The largest number of live bytes and the phase it was reached in; with `within`, that inside this range only."""
    assert recording.profiler is not None
    assert recording.profiler.kineto_results is not None
    events = recording.profiler.kineto_results.events()
    # nbytes is missing from torch's annotations.
    changes = sorted(
        (event.start_ns(), event.nbytes())  # type: ignore[attr-defined]
        for event in events
        if event.name() == "[memory]"
    )
    phases = [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name().removeprefix(_PHASE_PREFIX))
        for event in events
        if event.name().startswith(_PHASE_PREFIX)
    ]
    first, last = next(
        ((event.start_ns(), event.start_ns() + event.duration_ns()) for event in events if event.name() == within),
        (0, sys.maxsize),
    )
    live = peak = resident_at_start
    peak_at = changes[0][0] if changes else 0
    for at, change_bytes in changes:
        live += change_bytes
        if live > peak and first <= at <= last:
            peak, peak_at = live, at
    return peak, next((name for start, end, name in phases if start <= peak_at <= end), "between")
