"""Runs CPU kernels once on zeros to see what they allocate besides their results.

What a kernel of oneDNN, MKL or ATen allocates inside depends on the processor, the number of
threads and the layout of every operand: no formula covers all of them. So a kernel is run on real
zeros of the same layouts while torch's allocator is recorded, once for each combination.

A large one is run on fewer rows. Every operand whose dimension has the scaled size is made
smaller, at three sizes: the bytes must be a line in that size, of which the whole size is another
point. Where they are not, another size is tried.

Kernels for which that does not work are named by the prediction (`CpuKernels.unknown`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten

MOST_BYTES = 16 * 1024**2
"""Of the operands and results of a kernel that is run at its whole size: a few ms on two cores."""
MOST_OPERATIONS = 5 * 10**8
"""Of a product or convolution that is run at its whole size: 5 to 30 ms on two cores."""
_SCALED_BYTES = 2 * 1024**2
_SCALED_OPERATIONS = 2 * 10**8
"""Of a kernel that is run smaller. Much less would be another kernel: ATen convolves 20,480 numbers
or fewer without oneDNN."""
_MOST_SCALED_BYTES = 128 * 1024**2
"""Where the operands that have no dimension of the scaled size are large themselves."""
_FEWEST_AS_NUMBER = 16
"""A number among the arguments is taken for a size only if it is at least as large: below, it may
as well be the index of a dimension."""
_LARGEST_CURVATURE = 0.02


class NotMeasurable(Exception):
    """A kernel cannot be run on zeros, or its bytes are not a line in any size."""


@dataclass(frozen=True)
class _Layout:
    """What a kernel sees of a tensor besides its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "_Layout":
        if tensor.layout != torch.strided:
            raise NotMeasurable
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def elements(self) -> int:
        """From the first to the last element in memory."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in steps)

    @property
    def size_bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def scaled(self, size: int, to: int) -> "_Layout":
        """Returns the layout with every dimension of `size` made smaller; its gaps shrink with it.

        A stride is a product of what lies inside it, so it shrinks once for each scaled dimension
        inside.
        """
        shape = tuple(to if one == size else one for one in self.shape)
        strides = []
        for stride in self.strides:
            inside = sum(
                other_size == size and 0 < other < stride
                for other_size, other in zip(self.shape, self.strides, strict=True)
            )
            strides.append(stride if inside == 0 else math.ceil(stride * (to / size) ** inside))
        return _Layout(shape, tuple(strides), self.dtype)


@dataclass(frozen=True)
class _Call:
    """An operator with the layouts of its tensors and the values of its other arguments."""

    operator: Any
    leaves: tuple[Any, ...]
    structure: Any = field(compare=False)
    results: tuple[_Layout | None, ...]
    """None where an operator leaves a result out, as the gradient of the images."""

    @classmethod
    def of(cls, operator: Any, args: Any, kwargs: Any, result: Any) -> "_Call":
        leaves, structure = tree_flatten((args, kwargs))
        described = tuple(
            _Layout.of(leaf) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves
        )
        results = tuple(
            _Layout.of(one) if isinstance(one, Tensor) else None for one in tree_iter(result)
        )
        return cls(operator, described, structure, results)

    @property
    def layouts(self) -> list[_Layout]:
        return [leaf for leaf in self.leaves if isinstance(leaf, _Layout)]

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in (*self.layouts, *self.returned))

    @property
    def returned(self) -> list[_Layout]:
        return [one for one in self.results if one is not None]

    @property
    def operations(self) -> int:
        """Floating-point operations of a product or convolution, 0 of any other operator."""
        formula = flop_registry.get(getattr(self.operator, "overloadpacket", None))
        if formula is None or not self.results:
            return 0
        meta = [
            torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
            if isinstance(leaf, _Layout)
            else leaf[1]
            for leaf in self.leaves
        ]
        args, kwargs = tree_unflatten(meta, self.structure)
        kwargs.pop("out", None)
        results = [
            None if one is None else torch.empty(one.shape, dtype=one.dtype, device="meta")
            for one in self.results
        ]
        out = results[0] if len(results) == 1 else tuple(results)
        return int(formula(*args, **kwargs, out_val=out))

    def scaled(self, size: int, to: int) -> "_Call":
        leaves: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, _Layout):
                leaves.append(leaf.scaled(size, to))
            elif leaf == (int, size) and size >= _FEWEST_AS_NUMBER:
                leaves.append((int, to))
            else:
                leaves.append(leaf)
        results = tuple(None if one is None else one.scaled(size, to) for one in self.results)
        return _Call(self.operator, tuple(leaves), self.structure, results)


class MeasuredKernels:
    """Measures each combination of operator and layouts once."""

    def __init__(self) -> None:
        self._known: dict[_Call, int | None] = {}
        self._zeros = _Zeros()

    def scratch_bytes(
        self,
        operator: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        *,
        at_once: bool = False,
    ) -> int:
        """Returns the bytes that a kernel allocates besides `result`; all tensors are fake.

        With `at_once` it is run at its whole size, however large. Raises NotMeasurable.
        """
        call = _Call.of(operator, args, dict(kwargs), result)
        try:
            known = self._known.get(call, -1)
        except TypeError as error:  # an argument that is not hashable
            raise NotMeasurable from error
        if known == -1:
            try:
                known = self._run(call) if at_once else self._measure(call)
            except NotMeasurable:
                known = None
            self._known[call] = known
        if known is None:
            raise NotMeasurable
        return known

    def _measure(self, call: _Call) -> int:
        if call.size_bytes <= MOST_BYTES and call.operations <= MOST_OPERATIONS:
            return self._run(call)
        for size in _sizes_to_scale(call):
            try:
                return self._from_smaller(call, size)
            except NotMeasurable:
                continue
        raise NotMeasurable

    def _from_smaller(self, call: _Call, size: int) -> int:
        """Returns the bytes at the whole size, by three smaller ones. Raises NotMeasurable."""
        step = _step_of(call, size)
        first, second, third = (self._run(call.scaled(size, count * step)) for count in (1, 2, 3))
        if abs(third - 2 * second + first) > _LARGEST_CURVATURE * max(third, 1):
            raise NotMeasurable
        slope = (third - second) / step
        return max(0, round(third + slope * (size - 3 * step)))

    def _run(self, call: _Call) -> int:
        """Runs a kernel and returns the bytes that it allocates besides its results."""
        schema = call.operator._schema
        written = any(
            argument.alias_info is not None and argument.alias_info.is_write
            for argument in schema.arguments
        )
        tensors = [
            self._zeros.tensor(leaf, fresh=written) if isinstance(leaf, _Layout) else leaf[1]
            for leaf in call.leaves
        ]
        args, kwargs = tree_unflatten(tensors, call.structure)
        with on_real_tensors():
            try:
                with allocations() as events:
                    result = call.operator(*args, **kwargs)
            except Exception as error:  # whatever a kernel says about zeros
                raise NotMeasurable from error
        results = [one for one in tree_iter(result) if isinstance(one, Tensor)]
        if [tuple(one.shape) for one in results] != [one.shape for one in call.returned]:
            raise NotMeasurable
        given = {one.untyped_storage()._cdata for one in tensors if isinstance(one, Tensor)}
        storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in results}
        kept = sum(one.nbytes() for key, one in storages.items() if key not in given)
        return max(0, peak_bytes(events) - kept)


def _sizes_to_scale(call: _Call) -> Iterator[int]:
    """Yields the sizes of dimensions that make the call small enough, the largest first."""
    sizes = {size for one in call.layouts for size in one.shape if size > 3}
    for size in sorted(sizes, reverse=True):
        smallest = call.scaled(size, 3)
        if smallest.size_bytes <= _MOST_SCALED_BYTES and smallest.operations <= MOST_OPERATIONS:
            yield size


def _step_of(call: _Call, size: int) -> int:
    """Returns a size of which three times as much is cheap to run, at least 1."""
    step = max(1, size // 6)
    while step > 1:
        tried = call.scaled(size, 3 * step)
        if tried.size_bytes <= _SCALED_BYTES and tried.operations <= _SCALED_OPERATIONS:
            break
        step //= 2
    return step


class _Zeros:
    """Tensors of zeros that share their memory, where they are only read."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def tensor(self, layout: _Layout, *, fresh: bool) -> Tensor:
        with on_real_tensors():
            if fresh:
                memory = torch.zeros(layout.size_bytes, dtype=torch.uint8)
            else:
                if self._memory.numel() < layout.size_bytes:
                    self._memory = torch.zeros(layout.size_bytes, dtype=torch.uint8)
                memory = self._memory[: layout.size_bytes]
            return memory.view(layout.dtype).as_strided(layout.shape, layout.strides)


@contextmanager
def on_real_tensors() -> Iterator[None]:
    """Makes operators run their kernels, as they are, inside a prediction."""
    with (
        unset_fake_temporarily(),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


@contextmanager
def allocations() -> Iterator[list[int]]:
    """Fills a list with the sizes that torch's CPU allocator allocates, and minus those it frees.

    By the profiler without kineto, which takes 0.1 ms instead of 16, and not a second at first.
    """
    interface = torch._C._autograd
    config = torch._C._profiler.ProfilerConfig(
        torch._C._profiler.ProfilerState.CPU,
        False,
        True,
        False,
        False,
        False,
        torch._C._profiler._ExperimentalConfig(),
    )
    sizes: list[int] = []
    interface._enable_profiler_legacy(config)
    try:
        yield sizes
    finally:
        for events in interface._disable_profiler_legacy():
            sizes += [
                event.cpu_memory_usage() for event in events if str(event.kind()) == "memory_alloc"
            ]


def peak_bytes(sizes: Sequence[int]) -> int:
    """Returns the most that was alive at a time."""
    live = peak = 0
    for size in sizes:
        live += size
        peak = max(peak, live)
    return peak
