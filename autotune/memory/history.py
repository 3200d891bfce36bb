"""Who holds the memory of a real step on CUDA: the caching allocator's own history, read as a recording.

torch keeps every allocation and free with its address, size, time and Python frames. Which address
is a parameter, optimizer state or a gradient, and when a phase began, the training says. Source:
https://docs.pytorch.org/docs/stable/torch_cuda_memory.html, torch/cuda/_memory_viz.py
"""

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

MOST_ENTRIES = 1_000_000
"""Allocations and frees that torch keeps; a step of the largest models has some ten thousand."""


@dataclass(kw_only=True)
class StepHistory:
    """A `PhaseMarker` that also notes when each phase was, and where gradients were.

    Times in microseconds.
    """

    marker: PhaseMarker
    phases: list[tuple[str, int, int]] = field(default_factory=list)
    gradients: list[tuple[int, int]] = field(default_factory=list)
    """(address, time) of every gradient an optimizer took."""
    trace: Sequence[Mapping[str, Any]] = ()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self.marker.phase(name):
            began = _now()
            yield
            self.phases.append((name, began, _now()))

    @contextmanager
    def recorded(self, device: torch.device, *, snapshot_file: Path) -> Iterator[None]:
        """Records the block it surrounds; keeps torch's snapshot in `snapshot_file`, for pytorch.org/memory_viz."""
        check_snapshots()
        self.phases.clear()
        handle = register_optimizer_step_pre_hook(self._note_gradients)
        torch.cuda.synchronize(device)
        # Frames of allocations only. A block is also freed while an exception unwinds the stack, as
        # when a checkpoint stops early, and collecting Python frames there loses that exception:
        # the training would crash.
        torch.cuda.memory._record_memory_history(
            max_entries=MOST_ENTRIES, stacks="python", context="alloc"
        )
        try:
            yield
            torch.cuda.synchronize(device)
            snapshot_file.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(snapshot_file))
            self.trace = torch.cuda.memory._snapshot(device)["device_traces"][device.index or 0]
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
            handle.remove()

    def _note_gradients(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        now = _now()
        for group in optimizer.param_groups:
            self.gradients += [
                (p.grad.data_ptr(), now) for p in group["params"] if p.grad is not None
            ]

    def recording(self, resident: Mapping[Category, Iterable[Tensor]]) -> Recording:
        """Returns what was recorded; `resident`: what stays alive from step to step, as it is after the recording."""
        blocks = {
            category: [
                (t.untyped_storage().data_ptr(), t.untyped_storage().nbytes())
                for t in distinct(tensors)
            ]
            for category, tensors in resident.items()
        }
        return read_trace(self.trace, resident=blocks, phases=self.phases, gradients=self.gradients)


def distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """One tensor for each storage."""
    return list({tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values())


def read_trace(
    trace: Sequence[Mapping[str, Any]],
    *,
    resident: Mapping[Category, Sequence[tuple[int, int]]],
    phases: Sequence[tuple[str, int, int]],
    gradients: Iterable[tuple[int, int]],
) -> Recording:
    """torch's list of allocations and frees as a recording.

    `resident`: (address, size in bytes) of what stays alive from step to step, at the end of the
    trace; `phases`: (name, began, ended) and `gradients`: (address, time), in microseconds. What is
    freed without having been allocated here was there before: if a block of the same size has taken
    its place, it had that block's category.
    """
    recording = Recording()
    alive: dict[int, Block] = {}
    moments: list[int] = []
    lives: list[tuple[int, int, Block]] = []
    scopes = [Scope() for _ in phases]
    older: list[Block] = []
    for entry in trace:
        address, at = int(entry["addr"]), int(entry["time_us"])
        if entry["action"] == "alloc":
            index = next(
                (i for i, (_, began, ended) in enumerate(phases) if began <= at <= ended), None
            )
            name = "" if index is None else phases[index][0]
            block = Block(
                size_bytes=int(entry["size"]),
                module="",
                operator=_place(entry.get("frames", ())),
                born=len(recording.events),
                scope=scopes[index] if index is not None and name == "forward" else None,
                in_phase=name,
            )
            alive[address] = block
            lives.append((address, at, block))
            recording.events.append((+1, block))
        elif entry["action"] == "free_requested":
            if address in alive:
                block = alive.pop(address)
            else:
                block = Block(size_bytes=int(entry["size"]), module="", operator="", born=-1)
                older.append(block)
            block.died = len(recording.events)
            recording.events.append((-1, block))
        else:
            continue
        moments.append(at)
    _mark_resident(recording, resident, alive=alive, older=older)
    _mark_phases(recording, phases, scopes, moments)
    _mark_gradients(lives, gradients, moments)
    return recording


def _mark_resident(
    recording: Recording,
    resident: Mapping[Category, Sequence[tuple[int, int]]],
    *,
    alive: Mapping[int, Block],
    older: Sequence[Block],
) -> None:
    """`alive`: blocks allocated in the trace that are alive at its end, by address; `older`: what only died in it."""
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
        if categories := replacing.get(block.size_bytes):
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
    """A gradient is the block that was at its address at its time."""
    for address, at in gradients:
        for start, born, block in lives:
            dies = None if block.died is None else moments[block.died]
            if (
                start <= address < start + block.size_bytes
                and born <= at
                and (dies is None or at <= dies)
            ):
                block.is_gradient = True


def _place(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost Python frame, as `function (file:line)`."""
    if not frames:
        return ""
    frame = frames[0]
    return f"{frame.get('name', '?')} ({Path(str(frame.get('filename', '?'))).name}:{frame.get('line', 0)})"


def _now() -> int:
    return time.time_ns() // 1000
