"""What the blocks of a training run, and how many bytes are alive meanwhile, on fake tensors.

`activation_budget.py` plans with both. The operators are those that selective checkpointing of
torch decides about (`shipped/selective.py`), in the same order.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS

from autotune.analysis.activation_budget import BlockOperator, BlockPart, BlockTrace, Moment
from autotune.memory.recording import Recording
from autotune.predictor.fake_mode import StorageWatch
from autotune.predictor.work import attention_flops, bytes_of, flops_of, tensors_in
from autotune.shipped.checkpointing import recompute
from autotune.shipped.selective import ATTENTION, arguments_of, draws, operator_name


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast a device runs operators. Only how they compare decides a plan."""

    flops_per_second: float
    bytes_per_second: float
    operator_seconds: float
    """For each operator, whatever its size."""
    choosing_seconds: float
    """For each operator of a block with a choice of what is recomputed."""
    noting_seconds: float
    """For each tensor that is saved where something is recomputed."""


class BlockMarks:
    """Recomputes blocks whole, and notes when each has run and when it runs again."""

    def __init__(self, watch: StorageWatch, blocks: Sequence[nn.Module]) -> None:
        self._watch = watch
        self._marks: list[tuple[Recording, int, int, bool]] = []
        """Recording, event, block, and whether the block runs again from there on."""
        self.passes = [1] * len(blocks)
        """How many forward passes of each block wait for their backward pass at once."""
        self.moments: list[Moment] = []
        """The most bytes alive between each two marks of the recording that was read."""
        for number, block in enumerate(blocks):
            block.forward = self._marked(block.forward, number)
            recompute(block)

    def read(self, recording: Recording) -> None:
        """Sets `moments` and `passes` to those of a recording."""
        marks = [mark[1:] for mark in self._marks if mark[0] is recording]
        waiting: Counter[int] = Counter()
        most: dict[int, int] = {}
        live = sum(block.size_bytes for block in recording.resident)
        start = 0
        for end, number, runs_again in [*marks, (len(recording.events), 0, False)]:
            first = max((one for one in waiting if waiting[one]), default=-1) + 1
            most[first] = max(most.get(first, 0), live)
            for sign, block in recording.events[start:end]:
                live += sign * block.size_bytes
                most[first] = max(most[first], live)
            start = end
            waiting[number] += -1 if runs_again else 1
            self.passes[number] = max(self.passes[number], waiting[number])
        self.moments = [Moment(size_bytes=size, blocks=first) for first, size in most.items()]

    def _marked(self, forward: Callable[..., Any], number: int) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            runs_again = torch._C._current_autograd_node() is not None
            if runs_again:
                self._mark(number, runs_again=True)
            output = forward(*args, **kwargs)
            if not runs_again and torch.is_grad_enabled():
                self._mark(number, runs_again=False)
            return output

        return run

    def _mark(self, number: int, *, runs_again: bool) -> None:
        recording = self._watch.recorded
        if recording is not None:
            self._marks.append((recording, len(recording.events), number, runs_again))


class BlockTraces:
    """Notes the operators of blocks while these run, and changes nothing."""

    def __init__(self, blocks: Sequence[nn.Module], rates: Rates) -> None:
        self._rates = rates
        self.traces: list[BlockTrace | None] = [None] * len(blocks)
        """Of the latest forward pass of each; None where it made none with gradients."""
        for number, block in enumerate(blocks):
            block.forward = self._traced(block.forward, number)
            for name, part in block.named_children():
                part.forward = self._in_part(part.forward, name)
        self._trace: _OperatorTrace | None = None

    def _traced(self, forward: Callable[..., Any], number: int) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            with _traced_forward(self._rates) as self._trace:
                output = forward(*args, **kwargs)
            self.traces[number] = self._trace.result()
            self._trace = None
            return output

        return run

    def _in_part(self, forward: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._trace is None or self._trace.part:
                return forward(*args, **kwargs)
            self._trace.part = name
            output = forward(*args, **kwargs)
            self._trace.part = ""
            return output

        return run


NOTHING_RUN = BlockTrace(operators=(), saved_bytes=0, seconds_of_choosing=0.0)
"""Of a block that no forward pass with gradients has called."""


@contextmanager
def _traced_forward(rates: Rates) -> Iterator["_OperatorTrace"]:
    trace = _OperatorTrace(rates)
    with torch.autograd.graph.saved_tensors_hooks(trace.note_saved, lambda tensor: tensor), trace:
        yield trace


@dataclass
class _Storage:
    """Memory that an operator of the block has allocated."""

    operator: int
    size_bytes: int
    part: str
    saved_in: set[str] = field(default_factory=set)
    """The parts of the block whose operators autograd keeps it for."""


@dataclass
class _Run:
    operator: BlockOperator
    part: str
    storages: list[_Storage] = field(default_factory=list)


class _OperatorTrace(TorchDispatchMode):
    """Sees the operators of one forward pass."""

    def __init__(self, rates: Rates) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rates = rates
        self._runs: list[_Run] = []
        self._calls: Counter[str] = Counter()
        self._storages: dict[int, _Storage] = {}
        self._last: dict[str, int] = {}
        """By part, how many operators had run when it saved the last tensor: recomputing it stops
        there."""
        self.part = ""
        """The name of the part of the block that runs."""
        self._saved: Counter[str] = Counter()
        """By part, how many tensors it saves."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        result = func(*args, **keywords)
        if func not in SAC_IGNORED_OPS:
            self._note(func, args, keywords, result)
        return result

    def note_saved(self, tensor: Tensor) -> Tensor:
        """Notes that autograd keeps a tensor for the backward pass, and returns it."""
        self._last[self.part] = len(self._runs)
        self._saved[self.part] += 1
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        if storage is not None:
            storage.saved_in.add(self.part)
        return tensor

    def result(self) -> BlockTrace:
        runs = self._runs[: max(self._last.values(), default=0)]
        saved = [one for run in self._runs for one in run.storages if one.saved_in]
        parts = [self._part(name) for name in dict.fromkeys(one.part for one in saved) if name]
        return BlockTrace(
            operators=tuple(run.operator for run in runs),
            saved_bytes=sum(one.size_bytes for one in saved),
            seconds_of_choosing=self._rates.choosing_seconds * (len(self._runs) + len(runs)),
            seconds_of_noting=self._rates.noting_seconds * self._saved.total(),
            parts=tuple(parts),
        )

    def _part(self, name: str) -> BlockPart:
        runs = [run for run in self._runs[: self._last.get(name, 0)] if run.part == name]
        return BlockPart(
            name=name,
            size_bytes=sum(
                one.size_bytes
                for run in self._runs
                for one in run.storages
                if one.part == name and one.saved_in == {name}
            ),
            seconds=self._rates.noting_seconds * self._saved[name]
            + sum(run.operator.seconds for run in runs),
        )

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        name = operator_name(func)
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        made: dict[int, _Storage] = {}
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                made[storage._cdata] = _Storage(len(self._runs), storage.nbytes(), self.part)
        written = list(_written(func, args, kwargs))
        for tensor in written:
            changed = self._storages.get(tensor.untyped_storage()._cdata)
            if changed is not None:  # it would not be what the operator has computed
                run = self._runs[changed.operator]
                run.operator = replace(run.operator, can_be_kept=False)
        self._storages |= made
        operator = BlockOperator(
            name=name,
            number=self._calls[name],
            size_bytes=sum(one.size_bytes for one in made.values()),
            seconds=self._seconds(func, args, kwargs, result) if made or written else 0.0,
            can_be_kept=bool(made) and not draws(func, args, kwargs),
        )
        self._calls[name] += 1
        self._runs.append(_Run(operator, self.part, list(made.values())))

    def _seconds(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> float:
        rates = self._rates
        packet = getattr(func, "overloadpacket", func)
        flops = flops_of(packet, args, kwargs, result)
        if not flops and operator_name(func) == ATTENTION:
            flops = attention_flops(*args[:3])
        moved = bytes_of((args, kwargs, result))
        return (
            max(flops / rates.flops_per_second, moved / rates.bytes_per_second)
            + rates.operator_seconds
        )


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields the tensors that an operator changes in place."""
    schema = getattr(func, "_schema", None)
    declared = schema.arguments if schema is not None else ()
    for one, (_, value) in zip(declared, arguments_of(func, args, kwargs), strict=True):
        if one.alias_info is not None and one.alias_info.is_write:
            yield from tensors_in(value)
