"""Finds the memory that CPU kernels allocate while they run, which no fake tensor shows.

| kernel | allocates |
|---|---|
| flash attention | scores and sums for each thread |
| elementwise, of several dtypes | the tensors that are not in the common dtype, converted to it |
| sum, mean or norm in another dtype | the input, converted to it |
| LSTM of oneDNN | what its backward pass needs, and weights in another order |
| any other | what it allocates when it is run once on zeros: `measured_kernels.py` |

The first three are computed from the shapes; a GPU converts inside its kernels. A 16-bit product of
oneDNN is measured up to a size. What a larger one needs hardly grows (3.3 MiB were observed for
2,048 x 4,096 x 4,096 on two threads) and is left to the bounds in `accuracy.py`. Source:
aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, could_pack in aten/src/ATen/native/CPUBlas.cpp,
compute_types in aten/src/ATen/TensorIterator.cpp, and make_reduction in
aten/src/ATen/native/ReduceOpsUtils.h
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from autotune.predictor import recurrent
from autotune.predictor.measured_kernels import MeasuredKernels, NotMeasurable
from autotune.predictor.work import tensors_in
from autotune.units import format_size

_aten = torch.ops.aten

_KEYS_AT_ONCE = 512
_WITH_CONDITION = {_aten.where: 0, _aten.masked_fill: 1}
"""Elementwise operators with an argument, at this position, that is not converted."""
_REDUCTIONS = (_aten.sum, _aten.mean, _aten.prod, _aten.linalg_vector_norm)
_PRODUCTS = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm)
_INDEXED = (_aten.index, _aten.index_put, _aten.index_put_)
_HALVES = (torch.bfloat16, torch.float16)
_MOST_OPERATIONS = 5 * 10**9
"""Of a product that is computed once to see what it allocates: some 50 ms on two cores."""
_MOST_PRODUCT_BYTES = 64 * 1024**2
_WITHOUT_SCRATCH = (
    *(_aten.embedding, _aten.embedding_dense_backward, _aten._unsafe_view, _aten.detach),
    *(_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.new_zeros),
    *(_aten.new_empty, _aten.new_empty_strided, _aten.fill_, _aten.zero_),
)
"""Operators of which nothing need be measured: they write their results only."""
_NO_KERNELS = ("c10d", "_c10d_functional", "_dtensor", "fsdp", "inductor", "profiler")
"""Namespaces of operators whose memory is not that of a kernel on this device."""


class CpuKernels:
    """What the kernels of one prediction allocate inside."""

    def __init__(self) -> None:
        self._measured = MeasuredKernels()
        self._recurrent = recurrent.RecurrentKernels()
        self._runs_kernel: dict[Any, bool] = {}
        self.unknown: dict[str, int] = {}
        """Operators that could not be measured, with the bytes of the operands of their largest
        call: a kernel that copies all of them allocates as much."""

    def scratch_bytes(
        self,
        operator: Any,
        args: Sequence[Any],
        result: Any,
        kwargs: Mapping[str, Any],
    ) -> int:
        """Returns the bytes that `operator` allocates besides `result`; 0 where unknown."""
        if operator not in self._runs_kernel:
            self._runs_kernel[operator] = _runs_kernel(operator)
        if not self._runs_kernel[operator]:
            return 0
        known_bytes = _computed_bytes(operator, args, result)
        if known_bytes is not None:
            return known_bytes
        try:
            return self._measured_bytes(operator, args, result, kwargs)
        except NotMeasurable:
            self._note_unknown(operator, (args, kwargs))
            return 0

    @property
    def unknown_bytes(self) -> int:
        """The most that an operator allocates that could not be measured: a copy of its operands.

        What kernels allocate inside is not alive at the same time.
        """
        return max(self.unknown.values(), default=0)

    def notes(self) -> Iterator[str]:
        if self.unknown:
            operators = ", ".join(sorted(self.unknown))
            yield (
                f"what the kernel of {operators} allocates inside is unknown: the bounds allow for "
                f"a copy of its operands, {format_size(self.unknown_bytes)}"
            )

    def workspace_bytes(self, operator: Any, args: Sequence[Any]) -> int:
        """Returns the size of what a kernel keeps for its backward pass, and a fake one does not.

        It is the last result of the operator.
        """
        if operator is not recurrent.FORWARD:
            return 0
        try:
            return self._recurrent.workspace_bytes(args)
        except NotMeasurable:
            self._note_unknown(operator, args)
            return 0

    def _measured_bytes(
        self,
        operator: torch._ops.OpOverload,
        args: Sequence[Any],
        result: Any,
        kwargs: Mapping[str, Any],
    ) -> int:
        if operator in (recurrent.FORWARD, recurrent.BACKWARD):
            return self._recurrent.scratch_bytes(operator, args)
        if not _is_plain_product(operator, args):
            return self._measured.scratch_bytes(operator, args, kwargs, result)
        if not _is_measured_product(args, result):
            return 0
        return self._measured.scratch_bytes(operator, args, kwargs, result, at_once=True)

    def _note_unknown(self, operator: torch._ops.OpOverload, operands: Any) -> None:
        name = str(operator.overloadpacket)
        size_bytes = sum(one.numel() * one.element_size() for one in tensors_in(operands))
        self.unknown[name] = max(size_bytes, self.unknown.get(name, 0))


def _computed_bytes(operator: Any, args: Sequence[Any], result: Any) -> int | None:
    """Returns the bytes that shapes tell of a kernel; None if they must be measured."""
    if operator is _aten._scaled_dot_product_flash_attention_for_cpu.default:
        return _forward_bytes(query=args[0], key=args[1])
    if operator is _aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return _backward_bytes(gradient=args[0], query=args[1], key=args[2])
    if operator.overloadpacket in _INDEXED and any(_is_mask(index) for index in args[1]):
        return _found_bytes(args, result)
    if isinstance(operator, torch._ops.OpOverload) and isinstance(result, Tensor):
        if torch.Tag.pointwise in operator.tags:
            return _conversion_bytes(operator, args, result)
        if operator.overloadpacket in _REDUCTIONS:
            return _reduction_bytes(operator, args[0], result)
    return None


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _found_bytes(args: Sequence[Any], result: Tensor) -> int:
    """Returns the bytes of the indices of what a mask selects, for each of its dimensions.

    Where one number is written, a mask alone is filled in without them (canDispatchToMaskedFill in
    aten/src/ATen/native/TensorAdvancedIndexing.cpp).
    """
    rows = args[2] if len(args) > 2 else result
    masks = [index for index in args[1] if _is_mask(index)]
    adds = len(args) > 3 and args[3]
    is_alone = sum(index is not None for index in args[1]) == 1
    if len(args) > 2 and rows.numel() == 1 and is_alone and not adds:
        return 0
    found = rows.shape[0] if rows.dim() else masks[0].numel()
    size_bytes: int = sum(mask.dim() for mask in masks) * found * torch.int64.itemsize
    return size_bytes


def _runs_kernel(operator: Any) -> bool:
    """Returns whether an operator runs a kernel that may allocate something inside."""
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace in _NO_KERNELS:
        return False
    if operator.is_view or torch.Tag.inplace_view in operator.tags:
        return False
    if torch.Tag.dynamic_output_shape in operator.tags and operator is not _aten.index.Tensor:
        return False  # zeros give another shape
    if operator.overloadpacket in _WITHOUT_SCRATCH:
        return False
    return any("Tensor" in str(argument.type) for argument in operator._schema.arguments)


def _is_plain_product(operator: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Returns whether this is a product of matrices whose rows or columns are contiguous.

    BLAS takes these as they are; any other operand is copied. Source: addmm_impl_cpu_ and
    bmm_out_or_baddbmm_ in aten/src/ATen/native/LinearAlgebra.cpp
    """
    if operator.overloadpacket not in _PRODUCTS:
        return False
    for factor in [arg for arg in args if isinstance(arg, Tensor)][-2:]:
        rows, columns = factor.shape[-2:]
        row_stride, column_stride = factor.stride()[-2:]
        by_row = column_stride == 1 and row_stride >= columns
        by_column = row_stride == 1 and column_stride >= rows
        if not (by_row or by_column):
            return False
    return True


def _is_measured_product(args: Sequence[Any], result: Tensor) -> bool:
    """Returns whether a product allocates inside, and is small enough to be computed once."""
    if result.dtype not in _HALVES:
        return False
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    operations = 2 * result.numel() * tensors[-1].shape[-2]
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*tensors, result))
    return operations <= _MOST_OPERATIONS and size_bytes <= _MOST_PRODUCT_BYTES


def _conversion_bytes(operator: torch._ops.OpOverload, args: Sequence[Any], result: Tensor) -> int:
    """Returns the bytes of the arguments that an elementwise kernel converts to a common dtype.

    A result that is written in place is computed in the common dtype, too.
    """
    condition = _WITH_CONDITION.get(operator.overloadpacket)
    values = [
        arg
        for position, arg in enumerate(args)
        if isinstance(arg, Tensor | int | float) and position != condition
    ]
    _, common = elementwise_dtypes(
        *values, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT
    )
    if result.is_floating_point() and not common.is_floating_point:
        common = result.dtype  # of whole numbers, such as a quotient
    tensors = [value for value in values if isinstance(value, Tensor)]
    if operator._schema.is_mutable:
        tensors.append(result)
    converted = sum(tensor.numel() for tensor in tensors if tensor.dtype != common)
    return converted * common.itemsize


def _reduction_bytes(operator: torch._ops.OpOverload, reduced: Tensor, result: Tensor) -> int:
    """Returns the bytes of the input in the dtype in which it is summed.

    The mean of 16-bit numbers is summed in fp32, and its result is converted.
    """
    dtype = result.dtype
    size_bytes = 0
    if operator.overloadpacket is _aten.mean and dtype in _HALVES:
        dtype = torch.float32
        size_bytes = result.numel() * dtype.itemsize
    if reduced.dtype != dtype:
        size_bytes += reduced.numel() * dtype.itemsize
    return size_bytes


def _forward_bytes(*, query: Tensor, key: Tensor) -> int:
    """Returns the bytes of the forward kernel.

    For each thread these are scores, their row maxima and sums, and the result; 16-bit inputs need
    the scores once more in their dtype.
    """
    rows, keys = _tile(query, key)
    is_packed = _is_packed(query, key)
    score_columns = _round_up_to_even(keys) if is_packed else keys
    scores = rows * score_columns
    buffer = _accumulator_size(query) * (rows * keys + 2 * rows + rows * query.shape[3])
    packed = _packed_bytes(query, key) if is_packed else 0
    return torch.get_num_threads() * (buffer + _reduced_size(query) * scores) + packed


def _is_packed(query: Tensor, key: Tensor) -> bool:
    """Returns whether keys and values are packed for AMX tiles first.

    That is done where there are enough products to make up for it.
    """
    if query.dtype == torch.bfloat16:
        fewest_keys, fewest_products = 64, 4
    else:
        fewest_keys, fewest_products = 16, 1
    if not _can_pack(query.dtype) or min(query.shape[2], key.shape[2]) < fewest_keys:
        return False
    rows, _ = _tile(query, key)
    tiles = query.shape[0] * query.shape[1] * -(-query.shape[2] // rows)
    tiles_of_a_thread = -(-tiles // torch.get_num_threads())
    # Each tile multiplies its rows by the keys up to its position; a head's keys are packed once.
    products = tiles_of_a_thread * rows * min(query.shape[2], key.shape[2])
    return products / (key.shape[0] * key.shape[1] * key.shape[2]) >= fewest_products


def _can_pack(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return torch.cpu._is_amx_tile_supported()
    return dtype == torch.float16 and torch.cpu._is_amx_fp16_supported()


def _packed_bytes(query: Tensor, key: Tensor) -> int:
    """Returns the bytes of the packed copies of keys and values, padded to even length and size.

    Each thread has one more tile, which it transposes.
    """
    rows, keys = _tile(query, key)
    batch, heads, length, size = key.shape
    tail = (length - 1) % keys + 1
    even_length = (length - 1) // keys * _round_up_to_even(keys) + _round_up_to_even(tail)
    padded_query = rows * _round_up_to_even(size) if size % 2 else 0
    packed = batch * heads * (_round_up_to_even(size) * length + even_length * size)
    tiles = torch.get_num_threads() * (keys * size + padded_query)
    return query.element_size() * (packed + tiles)


def _round_up_to_even(number: int) -> int:
    return number + number % 2


def _backward_bytes(*, gradient: Tensor, query: Tensor, key: Tensor) -> int:
    """Returns the bytes of the backward kernel: scores and their gradients for each thread.

    One row of sums is added, not one per thread: the profiler sees only the main thread's.
    """
    rows, keys = _tile(query, key)
    buffers = 2 * rows * keys * (_accumulator_size(query) + _reduced_size(query))
    sums = _accumulator_size(query) * rows
    return torch.get_num_threads() * buffers + sums + _copied_bytes(gradient)


def _copied_bytes(gradient: Tensor) -> int:
    """Returns the bytes of the copy that is made of a gradient with another layout than expected.

    The kernel expects a contiguous [batch, sequence, heads, size].
    """
    if gradient.transpose(1, 2).is_contiguous():
        return 0
    return gradient.numel() * gradient.element_size()


def _tile(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Returns how many queries and keys one thread processes at once."""
    length = query.shape[2]
    if length >= 768:
        rows = 256
    elif length >= 192:
        rows = 64
    else:
        rows = 32
    return min(rows, length), min(_KEYS_AT_ONCE, key.shape[2])


def _accumulator_size(query: Tensor) -> int:
    """Returns the bytes of a number in which sums are accumulated."""
    return max(4, query.element_size())


def _reduced_size(query: Tensor) -> int:
    """Returns the bytes of a 16-bit number, 0 for wider ones, which need no second buffer."""
    return query.element_size() if query.element_size() < 4 else 0
