"""Computes the memory that CPU kernels allocate while they run, which no fake tensor shows.

| kernel | allocates |
|---|---|
| flash attention | scores and sums for each thread |
| elementwise, of several dtypes | the tensors that are not in the common dtype, converted to it |
| sum, mean or norm in another dtype | the input, converted to it |
| 16-bit product, by oneDNN | tiles of its operands and results, as it chooses for the processor |

The first three are computed from the shapes; a GPU converts inside its kernels. The last is known
only to oneDNN, so that a small product is computed once on real zeros of that layout, while the
allocator is recorded. What a larger one needs hardly grows (3.3 MiB were observed for 2,048 x 4,096
x 4,096 on two threads) and is left to the bounds in `accuracy.py`. Source:
aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, could_pack in aten/src/ATen/native/CPUBlas.cpp,
compute_types in aten/src/ATen/TensorIterator.cpp, and make_reduction in
aten/src/ATen/native/ReduceOpsUtils.h
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.profiler import ProfilerActivity, profile, record_function

from autotune.memory.cpu import peak_of

_aten = torch.ops.aten

_KEYS_AT_ONCE = 512
_WITH_CONDITION = {_aten.where: 0, _aten.masked_fill: 1}
"""Elementwise operators with an argument, at this position, that is not converted."""
_REDUCTIONS = (_aten.sum, _aten.mean, _aten.prod, _aten.linalg_vector_norm)
_PRODUCTS = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm)
_HALVES = (torch.bfloat16, torch.float16)
_MOST_OPERATIONS = 5 * 10**9
"""Of a product that is computed once to see what it allocates: some 50 ms on two cores."""
_MOST_PRODUCT_BYTES = 64 * 1024**2

_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor."""


def scratch_bytes(operator: Any, args: Sequence[Any], result: Any) -> int:
    """Returns the bytes that `operator` allocates besides `result`; 0 where they are unknown."""
    if operator is _aten._scaled_dot_product_flash_attention_for_cpu.default:
        return _forward_bytes(query=args[0], key=args[1])
    if operator is _aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return _backward_bytes(gradient=args[0], query=args[1], key=args[2])
    if isinstance(operator, torch._ops.OpOverload) and isinstance(result, Tensor):
        if torch.Tag.pointwise in operator.tags:
            return _conversion_bytes(operator, args, result)
        if operator.overloadpacket in _REDUCTIONS:
            return _reduction_bytes(operator, args[0], result)
        if operator.overloadpacket in _PRODUCTS and result.dtype in _HALVES:
            return _product_bytes(operator.overloadpacket, args, result)
    return 0


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


def _product_bytes(product: Any, args: Sequence[Any], result: Tensor) -> int:
    """Returns the bytes that a product of matrices allocates besides its result; 0 if too large."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    operations = 2 * result.numel() * tensors[-1].shape[-2]
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*tensors, result))
    if not 0 < operations <= _MOST_OPERATIONS or size_bytes > _MOST_PRODUCT_BYTES:
        return 0
    layouts = tuple((tuple(one.shape), tuple(one.stride()), one.dtype) for one in tensors)
    return _measured_bytes(product, layouts)


@cache
def _measured_bytes(product: Any, layouts: tuple[_Layout, ...]) -> int:
    """Returns what a real product of tensors of these layouts allocates besides its result."""
    with unset_fake_temporarily(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        tensors = [_zeros(layout) for layout in layouts]
        activities = [ProfilerActivity.CPU]
        with (
            profile(activities=activities, profile_memory=True) as recording,
            record_function(product.__name__),
        ):
            result: Tensor = product(*tensors)
        peak_bytes, _ = peak_of(recording, within=product.__name__, alive_bytes=0)
        return peak_bytes - result.untyped_storage().nbytes()


def _zeros(layout: _Layout) -> Tensor:
    shape, strides, dtype = layout
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.zeros(last + 1, dtype=dtype).as_strided(shape, strides)


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
