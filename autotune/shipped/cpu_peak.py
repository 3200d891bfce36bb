"""The peak of live bytes on a CPU, from the events of the allocator that the profiler records."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.profiler import profile

PHASE_PREFIX = "autotune::"


def reallocate(tensors: Iterable[Tensor]) -> int:
    """Moves every storage of `tensors` to a new block; views of one storage still share it.

    Returns the bytes of all these storages. Memory that torch does not own alone, such as a mapped
    file or memory shared with another process, is not moved.
    """
    storages = _distinct_storages(tensors)
    for storage in storages:
        if storage.resizable() and not storage.is_shared():
            size_bytes = storage.nbytes()
            content = storage.clone()
            storage.resize_(0)
            storage.resize_(size_bytes)
            storage.copy_(content)
    return sum(storage.nbytes() for storage in storages)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of all storages of `tensors`, each counted once."""
    return sum(storage.nbytes() for storage in _distinct_storages(tensors))


def _distinct_storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    found = {storage._cdata: storage for tensor in tensors for storage in _storages_of(tensor)}
    return list(found.values())


def _storages_of(tensor: Tensor) -> Iterator[UntypedStorage]:
    """Yields the storages of a tensor: all inner tensors of a subclass, both parts of a sparse one.

    Yields nothing for a tensor whose memory torch does not show, such as oneDNN's.
    """
    if tensor.layout == torch.sparse_coo:
        yield from (part.untyped_storage() for part in (tensor._indices(), tensor._values()))
        return
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):  # not the mesh of a DTensor
                yield from _storages_of(inner)
        return
    try:
        yield tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return


def peak_of(recording: profile, *, within: str, alive_bytes: int | None = None) -> tuple[int, str]:
    """Returns the peak of live bytes inside the range named `within`, and the phase of that peak.

    `alive_bytes` is what is alive when the range begins; None stands for what the recording had
    allocated by then.
    """
    assert recording.profiler is not None
    results = recording.profiler.kineto_results
    assert results is not None
    phases = [
        (
            event.start_ns(),
            event.start_ns() + event.duration_ns(),
            event.name().removeprefix(PHASE_PREFIX),
        )
        for event in results.events()
        if event.name().startswith(PHASE_PREFIX)
    ]
    first, last = next(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in results.events()
        if event.name() == within
    )
    changes = _size_changes(results)
    if alive_bytes is None:
        alive_bytes = sum(change_bytes for at, change_bytes in changes if at < first)
    live = peak = alive_bytes
    peak_at = first
    for at, change_bytes in changes:
        if first <= at <= last:
            live += change_bytes
            if live > peak:
                peak, peak_at = live, at
    for start, end, name in phases:
        if start <= peak_at <= end:
            return peak, name
    return peak, "between"


def _size_changes(results: Any) -> list[tuple[int, int]]:
    """Returns (time in nanoseconds, bytes) of every allocation, and of its release as minus bytes.

    The release of an older block is left out. The allocator reports it where it knows the block
    from an earlier recording.
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
    changes = []
    alive = set()
    for at, change_bytes, address in sorted(events):
        if change_bytes > 0:
            alive.add(address)
        elif address in alive:
            alive.remove(address)
        else:
            continue
        changes.append((at, change_bytes))
    return changes
