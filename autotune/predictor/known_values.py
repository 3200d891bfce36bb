"""Values of fake tensors of whole numbers and booleans that depend on neither data nor weights.

A fake tensor has no values, but those of `torch.ones_like(tokens)` are known, and so is whether
`torch.all(mask == 1)` is true of it. Models choose by such values: one that finds nothing to mask
may leave the masking out. So the values of what `ones`, `arange` and others like them return are
noted, and each operator that has only such tensors is run on their values as well. Numbers of a
training are taken to be finite: nothing is NaN.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from autotune.predictor.measured_kernels import on_real_tensors
from autotune.predictor.work import tensors_in

_aten = torch.ops.aten

MOST_ELEMENTS = 2**20
"""Of a tensor whose values are noted: a mask of a million tokens takes a few milliseconds."""
_FILLED: Mapping[Any, Callable[[Sequence[Any]], Any]] = {
    **dict.fromkeys((_aten.zeros, _aten.zeros_like, _aten.new_zeros), lambda _: 0),
    **dict.fromkeys((_aten.ones, _aten.ones_like, _aten.new_ones), lambda _: 1),
    **dict.fromkeys((_aten.full, _aten.full_like), lambda args: args[1]),
    _aten.new_full: lambda args: args[2],
    _aten.scalar_tensor: lambda args: args[0],
}
"""Operators whose results have one value, whatever tensor gives them their shape."""
_WITHOUT_TENSORS = (_aten.arange, torch.ops.prims.iota)
_LITERALS = (_aten.lift_fresh, _aten.lift_fresh_copy)
"""Operators that make a fake tensor of a real one, which a program has written down."""
_NOT_COMPUTED = (
    *(_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty),
    *(_aten.new_empty_strided, _aten.as_strided, _aten.resize),
)
"""Operators whose results have any value, or those of another place in memory."""


class KnownValues:
    """Passes on what is known from operator to operator."""

    def __init__(self) -> None:
        self._known: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()

    def of(self, tensor: Tensor) -> Tensor | None:
        """Returns a real tensor with the values of a fake one, None where they are not known."""
        known = self._known.get(tensor)
        if known is None and isinstance(tensor, FakeTensor):
            return tensor.constant
        return known

    def note(self, tensor: Tensor, values: Tensor | None) -> None:
        """Notes the values of a fake tensor."""
        if values is not None:
            self._known[tensor] = values

    def forget_written(self, written: Iterable[Tensor]) -> None:
        """Forgets the values of these tensors, and of all that share their memory."""
        if not self._known:
            return
        storages = {_storage_of(tensor) for tensor in written}
        for tensor in [one for one in self._known if _storage_of(one) in storages]:
            del self._known[tensor]

    def pass_on(
        self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Notes what is known of the results of an operator."""
        if not isinstance(operator, torch._ops.OpOverload):
            return
        if operator._schema.is_mutable:
            self.forget_written(_written_by(operator, args, kwargs))
            return
        if not any(_may_be_known(one) for one in tensors_in(result)):
            return
        packet = operator.overloadpacket
        if packet in _FILLED:
            fill = _FILLED[packet](args)
            with on_real_tensors():
                self._known[result] = torch.full(result.shape, fill, dtype=result.dtype)
        elif packet in _LITERALS and not isinstance(args[0], FakeTensor):
            self._known[result] = args[0]
        elif (is_true := _of_finite_numbers(packet, args)) is not None:
            with on_real_tensors():
                self._known[result] = torch.full(result.shape, is_true)
        elif packet not in _NOT_COMPUTED:
            self._compute(operator, args, kwargs, result)

    def _compute(
        self,
        operator: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        """Runs an operator on the values of its arguments, where all of these are known."""
        if torch.Tag.nondeterministic_seeded in operator.tags:
            return
        leaves, structure = tree_flatten((args, dict(kwargs)))
        has_tensors = False
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                leaves[position] = self.of(leaf)
                has_tensors = True
                if leaves[position] is None:
                    return
        if not has_tensors and operator.overloadpacket not in _WITHOUT_TENSORS:
            return
        args, kwargs = tree_unflatten(leaves, structure)
        try:
            with on_real_tensors():
                values = operator(*args, **kwargs)
        except Exception:  # the real training will hear as well what a kernel says of them
            return
        for fake, real in zip(tensors_in(result), tensors_in(values), strict=True):
            if _may_be_known(fake) and fake.shape == real.shape:
                self._known[fake] = real


def _of_finite_numbers(packet: Any, args: Sequence[Any]) -> bool | None:
    """Returns what a question about numbers is answered with where none is NaN or infinite.

    None for any other question. `isfinite` asks whether a number is itself and not infinite.
    """
    if packet in (_aten.isnan, _aten.isinf):
        return False
    if packet in (_aten.eq, _aten.ne) and args[0].is_floating_point():
        if args[1] is args[0]:
            return packet is _aten.eq
        if isinstance(args[1], float) and math.isinf(args[1]):
            return packet is _aten.ne
    return None


def _may_be_known(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return False
    shape = tensor.shape
    return all(isinstance(size, int) for size in shape) and math.prod(shape) <= MOST_ELEMENTS


def _storage_of(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _written_by(
    operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[Tensor]:
    """Yields the arguments that an operator writes to."""
    for position, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from tensors_in(value)


@contextmanager
def taken_for_real() -> Iterator[None]:
    """Makes transformers read the values of fake tensors as it reads those of real ones.

    It takes a fake tensor for a sign that a graph is traced, where it must not read values: it then
    computes with masks that it leaves out in a training.
    """
    import_utils = sys.modules.get("transformers.utils.import_utils")
    if import_utils is None:
        yield
        return
    with patch.object(import_utils, "is_fake_tensor", lambda _: False, create=True):
        yield
