"""Peak of live tensor bytes on the CPU, from the allocator's own events.

torch's profiler records an event for every block the CPU allocator hands out or takes back, also
those of code that torch.compile generated, which a dispatch mode would not see. Blocks born before
the recording are not in it, and neither is their end. So the tensors that are alive when it begins
(weights, optimizer state) are allocated once more inside it: then the end of those that a step
replaces is seen, too.

The events are read from `kineto_results`, which is private: the public list leaves out all events
that happen inside an operator, and no other one has addresses. `tests/memory/test_cpu_meter.py`
compares with peaks known by hand.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.profiler import ProfilerActivity, profile, record_function

from autotune.memory.meter import MemoryReading
from autotune.memory.torch_interfaces import check_cpu_meter

_PHASE_PREFIX = "autotune::"
_MEASURED = "autotune measured block"


class CpuMeter:
    """A `MemoryMeter`.

    Recording costs about a third of a step's time, so measured steps are not timed.
    """

    def __init__(self) -> None:
        check_cpu_meter()
        self._peak_bytes = 0
        self._peak_phase = ""
        self._is_measuring = False

    @contextmanager
    def measuring(self, resident: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
            resident_at_start = _allocate_again(resident())
            self._is_measuring = True
            with record_function(_MEASURED):
                yield
            self._is_measuring = False
        peak, phase = peak_of(recording, within=_MEASURED, alive_bytes=resident_at_start)
        if peak > self._peak_bytes:
            self._peak_bytes, self._peak_phase = peak, phase

    def phase(self, name: str) -> AbstractContextManager[None]:
        # No events are recorded outside a measured block, so the range is only named inside one.
        return record_function(_PHASE_PREFIX + name) if self._is_measuring else nullcontext()

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()  # nothing is recorded outside a measured block

    def kernels_have_run(self) -> None:
        pass

    def reading(self) -> MemoryReading:
        return MemoryReading(
            peak_memory_bytes=self._peak_bytes,
            peak_phase=self._peak_phase,
            peak_reserved_bytes=self._peak_bytes,
        )


def _allocate_again(tensors: Iterable[Tensor]) -> int:
    """Gives every storage behind `tensors` a new block with the same content; views go on sharing it.

    Returns the bytes of all these storages. Those that are not torch's alone, such as memory that
    is mapped from a file or shared with another process, stay where they are.
    """
    storages = {storage._cdata: storage for tensor in tensors for storage in _storages_of(tensor)}
    for storage in storages.values():
        if storage.resizable() and not storage.is_shared():
            size_bytes, content = storage.nbytes(), storage.clone()
            storage.resize_(0)
            storage.resize_(size_bytes)
            storage.copy_(content)
    return sum(storage.nbytes() for storage in storages.values())


def _storages_of(tensor: Tensor) -> Iterator[UntypedStorage]:
    """The storages of a tensor, of the tensors that a subclass is made of, and of the parts of a sparse one.

    None of a tensor whose memory torch does not show, such as oneDNN's.
    """
    if tensor.layout == torch.sparse_coo:
        yield from (part.untyped_storage() for part in (tensor._indices(), tensor._values()))
        return
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _storages_of(getattr(tensor, name))
        return
    try:
        yield tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return


def peak_of(recording: profile, *, within: str, alive_bytes: int | None = None) -> tuple[int, str]:
    """Returns the largest number of bytes alive inside the range named `within`, and the phase it was reached in.

    `alive_bytes`: how much is alive when the range begins; None: what was allocated in the
    recording until then.
    """
    assert recording.profiler is not None
    results = recording.profiler.kineto_results
    assert results is not None
    phases = [
        (
            event.start_ns(),
            event.start_ns() + event.duration_ns(),
            event.name().removeprefix(_PHASE_PREFIX),
        )
        for event in results.events()
        if event.name().startswith(_PHASE_PREFIX)
    ]
    first, last = next(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in results.events()
        if event.name() == within
    )
    changes = _changes(results)
    if alive_bytes is None:
        alive_bytes = sum(change_bytes for at, change_bytes in changes if at < first)
    live = peak = alive_bytes
    peak_at = first
    for at, change_bytes in changes:
        if first <= at <= last:
            live += change_bytes
            if live > peak:
                peak, peak_at = live, at
    return peak, next((name for start, end, name in phases if start <= peak_at <= end), "between")


def _changes(results: Any) -> list[tuple[int, int]]:
    """(time in nanoseconds, bytes) of every block that was allocated in a recording, and of its end.

    The end of an older block is left out. The allocator reports it where it knows the block from an
    earlier recording.
    """
    events = []
    waiting = list(results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:
            events.append(
                (event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr)
            )
    changes, alive = [], set()
    for at, change_bytes, address in sorted(events):
        if change_bytes > 0:
            alive.add(address)
        elif address in alive:
            alive.remove(address)
        else:
            continue
        changes.append((at, change_bytes))
    return changes
