"""Computes the memory that CPU kernels allocate while they run, which no fake tensor shows.

These are only the buffers of flash attention, ordinary tensors whose sizes follow from the shapes
and the number of threads. The scratch that oneDNN allocates in bf16 products depends on the
blocking that it chooses for the processor; the bounds in `accuracy.py` account for it. Source:
aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, and could_pack in
aten/src/ATen/native/CPUBlas.cpp
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten

_KEYS_AT_ONCE = 512


def scratch_bytes(operator: Any, args: Sequence[Any]) -> int:
    """Returns the bytes that `operator` allocates besides its results; 0 where they are unknown."""
    if operator is _aten._scaled_dot_product_flash_attention_for_cpu.default:
        return _forward_bytes(query=args[0], key=args[1])
    if operator is _aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return _backward_bytes(gradient=args[0], query=args[1], key=args[2])
    return 0


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
