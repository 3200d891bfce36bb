"""Measures the peak of live tensor bytes on the CPU, from the events of the allocator.

torch's profiler records an event for every block that the CPU allocator allocates or frees,
including blocks of code that torch.compile generated, which a dispatch mode would not see. Blocks
allocated before the recording are not in it, and neither is their release. So the tensors that are
alive at its start (weights, optimizer state) are allocated again inside it; the release of those
that a step replaces is then recorded, too.

The events are read from `kineto_results`, which is private: the public list omits all events inside
an operator, and has no addresses. `tests/memory/test_cpu_meter.py` compares the result with peaks
known by hand. Memory that does not come from torch's allocator is not seen.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from autotune.memory.communication import Communication, communication_on_cpu
from autotune.memory.meter import MemoryReading
from autotune.memory.torch_interfaces import check_cpu_meter
from autotune.shipped.cpu_peak import PHASE_PREFIX, peak_of, reallocate

_MEASURED = "autotune measured block"


class CpuMeter:
    """A `MemoryMeter` for the CPU.

    Recording adds about a third to the time of a step, so measured steps are not timed.
    """

    def __init__(self) -> None:
        check_cpu_meter()
        self._peak_bytes = 0
        self._peak_phase = ""
        self._is_measuring = False
        self._communication: Communication | None = None

    @contextmanager
    def measuring(self, resident: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
            resident_bytes = reallocate(resident())
            self._is_measuring = True
            with record_function(_MEASURED):
                yield
            self._is_measuring = False
        self._communication = communication_on_cpu(recording, within=_MEASURED)
        peak, phase = peak_of(recording, within=_MEASURED, alive_bytes=resident_bytes)
        if peak > self._peak_bytes:
            self._peak_bytes, self._peak_phase = peak, phase

    def phase(self, name: str) -> AbstractContextManager[None]:
        # No events are recorded outside `measuring`, so the range is only named inside it.
        if not self._is_measuring:
            return nullcontext()
        return record_function(PHASE_PREFIX + name)

    def excluded(self) -> AbstractContextManager[None]:
        return nullcontext()  # nothing is recorded outside `measuring`

    def kernels_have_run(self) -> None:
        pass

    def communication(self) -> Communication | None:
        return self._communication

    def reading(self) -> MemoryReading:
        return MemoryReading(
            peak_memory_bytes=self._peak_bytes,
            peak_phase=self._peak_phase,
            peak_reserved_bytes=self._peak_bytes,
        )
