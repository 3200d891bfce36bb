"""Records a real step from the allocations and releases that torch's allocator reports.

On CUDA they come from the history that the caching allocator keeps, with Python frames; on a CPU
from the profiler (`cpu.py`), with the operator that ran. The training adds which addresses are
parameters, optimizer state or gradients, and the times of the phases. Source:
https://docs.pytorch.org/docs/stable/torch_cuda_memory.html, torch/cuda/_memory_viz.py
"""

import pickle
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autotune.memory.meter import PhaseMarker
from autotune.memory.recording import Block, Phase, Recording, Scope
from autotune.memory.torch_interfaces import check_snapshots
from autotune.spec.prediction import Category

_ALLOCATIONS = frozenset(
    ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::resize_")
)
"""Operators that do not show what the memory is for: the one that calls them does."""
_RANGES = ("autotune::", "FSDP::")
"""Beginnings of the names of ranges of a profile, which are no operators."""
_GATHERING = "FSDP::all_gather"
MOST_ENTRIES = 1_000_000
"""Most allocations and releases that torch stores; a step of the largest models has some ten
thousand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One allocation or release."""

    at: int
    """When, by the clock of the phases."""
    address: int
    size_bytes: int
    """Below zero for a release."""
    made_by: str = ""
    """The operator or the Python frame that allocated it."""
    gathers_weights: bool = False
    """Whether FSDP2 gathers weights in it."""


@dataclass(kw_only=True)
class StepHistory:
    """A `PhaseMarker` that also records the time of each phase and the addresses of gradients.

    Times are in microseconds since the epoch.
    """

    marker: PhaseMarker
    phases: list[tuple[str, int, int]] = field(default_factory=list)
    """(name, begin, end) of every phase."""
    gradients: list[tuple[int, int]] = field(default_factory=list)
    """(address, time) of every gradient that an optimizer used."""
    trace: Sequence[Mapping[str, Any]] = ()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self.marker.phase(name):
            began = _now()
            yield
            self.phases.append((name, began, _now()))

    @contextmanager
    def recorded(self, device: torch.device, *, snapshot_file: Path) -> Iterator[None]:
        """Records what runs inside; writes torch's snapshot to `snapshot_file`.

        The file can be opened at pytorch.org/memory_viz. Raises AutotuneError where the installed
        torch cannot record.
        """
        check_snapshots()
        self.phases.clear()
        handle = register_optimizer_step_pre_hook(self._record_gradients)
        torch.cuda.synchronize(device)
        # Frames of allocations only. A block is also freed while an exception unwinds the stack,
        # for example when a checkpoint stops early. Collecting Python frames there loses that
        # exception, and the training would crash.
        torch.cuda.memory._record_memory_history(
            max_entries=MOST_ENTRIES, stacks="python", context="alloc"
        )
        try:
            yield
            torch.cuda.synchronize(device)
            snapshot_file.parent.mkdir(parents=True, exist_ok=True)
            snapshot = torch.cuda.memory._snapshot(device)
            # Later protocols, which Python 3.14 has by default, are not read by PyTorch's viewer.
            snapshot_file.write_bytes(pickle.dumps(snapshot, protocol=4))
            self.trace = snapshot["device_traces"][device.index or 0]
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
            handle.remove()

    def _record_gradients(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        now = _now()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.gradients.append((parameter.grad.data_ptr(), now))

    def recording(self, resident: Mapping[Category, Iterable[Tensor]]) -> Recording:
        """Returns what was recorded.

        `resident` has the tensors that stay alive from step to step, as they are after it.
        """
        blocks: dict[Category, list[tuple[int, int]]] = {}
        for category, tensors in resident.items():
            storages = [tensor.untyped_storage() for tensor in distinct(tensors)]
            blocks[category] = [(storage.data_ptr(), storage.nbytes()) for storage in storages]
        return read_changes(
            changes_of(self.trace), resident=blocks, phases=self.phases, gradients=self.gradients
        )


def distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns one tensor for each storage."""
    return list({tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values())


def changes_of(trace: Iterable[Mapping[str, Any]]) -> Iterator[Change]:
    """Yields the allocations and releases of torch's allocation history."""
    for entry in trace:
        address, at, size_bytes = int(entry["addr"]), int(entry["time_us"]), int(entry["size"])
        if entry["action"] == "alloc":
            frames = entry.get("frames", ())
            yield Change(
                at=at,
                address=address,
                size_bytes=size_bytes,
                made_by=_innermost_frame(frames),
                gathers_weights=_gathers_weights(frames),
            )
        elif entry["action"] == "free_requested":
            yield Change(at=at, address=address, size_bytes=-size_bytes)


def changes_of_profile(results: Any) -> list[Change]:
    """Returns the allocations and releases of a profile on a CPU, at times in nanoseconds.

    Each is that of the operator that runs, or that called one which only allocates. The release of
    an older block is left out. `results` are `kineto_results`, as in `cpu.py`, whose own reading
    of them is carried by exported scripts and knows no operators.
    """
    events = []
    waiting = [(event, "", False) for event in results.experimental_event_tree()]
    while waiting:
        event, operator, gathers = waiting.pop()
        if event.tag == torch._C._profiler._EventType.Allocation:
            fields = event.extra_fields
            events.append((event.start_time_ns, fields.alloc_size, fields.ptr, operator, gathers))
            continue
        if event.tag == torch._C._profiler._EventType.TorchOp:
            only_allocates = operator and event.name in _ALLOCATIONS
            if not only_allocates and not event.name.startswith(_RANGES):
                operator = event.name
            gathers = gathers or event.name.startswith(_GATHERING)
        waiting.extend((child, operator, gathers) for child in event.children)
    changes = []
    alive = set()
    for at, size_bytes, address, operator, gathers in sorted(events):
        if size_bytes > 0:
            alive.add(address)
        elif address in alive:
            alive.remove(address)
        else:
            continue
        changes.append(
            Change(
                at=at,
                address=address,
                size_bytes=size_bytes,
                made_by=operator,
                gathers_weights=gathers,
            )
        )
    return changes


def read_changes(
    changes: Iterable[Change],
    *,
    resident: Mapping[Category, Sequence[tuple[int, int]]],
    phases: Sequence[tuple[str, int, int]],
    gradients: Iterable[tuple[int, int]],
    recomputations: Sequence[tuple[int, int]] = (),
) -> Recording:
    """Converts the allocations and releases of a step, in order, to a recording.

    `resident` is (address, size in bytes) of what stays alive from step to step, at the end of the
    step; `phases` is (name, begin, end), `recomputations` (begin, end) of forward passes within a
    backward pass, and `gradients` (address, time), by the clock of the changes. A block that is
    released here but was allocated before gets the category of a resident block of the same size
    that was allocated here, if there is one: the block that replaced it.
    """
    recording = Recording()
    alive: dict[int, Block] = {}
    moments: list[int] = []
    lives: list[tuple[int, int, Block]] = []
    scopes = [Scope() for _ in phases]
    scopes_of_recomputations = [Scope() for _ in recomputations]
    older: list[Block] = []
    for change in changes:
        address, at = change.address, change.at
        if change.size_bytes >= 0:
            phase_name = ""
            scope = None
            for phase, phase_scope in zip(phases, scopes, strict=True):
                name, began, ended = phase
                if began <= at <= ended:
                    phase_name = name
                    scope = phase_scope if name == "forward" else None
                    break
            for (began, ended), again in zip(recomputations, scopes_of_recomputations, strict=True):
                if began <= at <= ended:
                    scope = again
            block = Block(
                size_bytes=change.size_bytes,
                module="",
                operator=change.made_by,
                resident="gathered_weights" if change.gathers_weights else None,
                born=len(recording.events),
                scope=scope,
                in_phase=phase_name,
            )
            alive[address] = block
            lives.append((address, at, block))
            recording.events.append((+1, block))
        else:
            if address in alive:
                block = alive.pop(address)
            else:
                block = Block(size_bytes=-change.size_bytes, module="", operator="", born=-1)
                older.append(block)
            block.died = len(recording.events)
            recording.events.append((-1, block))
        moments.append(at)
    _mark_resident(recording, resident, alive=alive, older=older)
    _mark_phases(recording, phases, scopes, moments)
    for (_, ended), again in zip(recomputations, scopes_of_recomputations, strict=True):
        again.ended = sum(at <= ended for at in moments)
    _mark_gradients(lives, gradients, moments)
    return recording


def _mark_resident(
    recording: Recording,
    resident: Mapping[Category, Sequence[tuple[int, int]]],
    *,
    alive: Mapping[int, Block],
    older: Sequence[Block],
) -> None:
    """Sets the category of resident blocks, and adds those from before the trace to the recording.

    `alive` has the blocks allocated in the trace that are alive at its end, by address; `older`
    those that were allocated before the trace and released in it.
    """
    replacing: dict[int, list[Category]] = {}
    for category, blocks in resident.items():
        for address, size_bytes in blocks:
            if address in alive:
                alive[address].resident = category
                replacing.setdefault(alive[address].size_bytes, []).append(category)
            else:
                recording.resident.append(
                    Block(
                        size_bytes=size_bytes,
                        module="",
                        operator=category,
                        born=-1,
                        resident=category,
                    )
                )
    for block in older:
        categories = replacing.get(block.size_bytes)
        if categories:
            block.resident = categories.pop()
        recording.resident.append(block)


def _mark_phases(
    recording: Recording,
    phases: Sequence[tuple[str, int, int]],
    scopes: Sequence[Scope],
    moments: Sequence[int],
) -> None:
    for (name, began, ended), scope in zip(phases, scopes, strict=True):
        first = sum(at < began for at in moments)
        scope.ended = sum(at <= ended for at in moments)
        recording.phases.append(Phase(name=name, first_event=first, last_event=scope.ended))


def _mark_gradients(
    lives: Sequence[tuple[int, int, Block]],
    gradients: Iterable[tuple[int, int]],
    moments: Sequence[int],
) -> None:
    """Marks as a gradient each block that was alive at a gradient's address and time."""
    for address, at in gradients:
        for start, born, block in lives:
            dies = None if block.died is None else moments[block.died]
            was_alive = born <= at and (dies is None or at <= dies)
            if was_alive and start <= address < start + block.size_bytes:
                block.is_gradient = True


def _gathers_weights(frames: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether FSDP2 allocates memory for weights that it gathers.

    That is each weight's, and the buffer in which those of a block arrive together. Source:
    alloc_storage in torch/distributed/fsdp/_fully_shard/_fsdp_param.py, and foreach_all_gather in
    _fsdp_collectives.py
    """
    names = [str(frame.get("name", "")) for frame in frames]
    if not names or "_fully_shard" not in str(frames[0].get("filename", "")):
        return False
    return names[0] == "alloc_storage" or (
        names[0] == "allocate" and "foreach_all_gather" in names[1:]
    )


def _innermost_frame(frames: Sequence[Mapping[str, Any]]) -> str:
    """Returns the innermost Python frame as `function (file:line)`, empty where there is none."""
    if not frames:
        return ""
    frame = frames[0]
    file_name = Path(str(frame.get("filename", "?"))).name
    return f"{frame.get('name', '?')} ({file_name}:{frame.get('line', 0)})"


def _now() -> int:
    return time.time_ns() // 1000
