"""What kernels on a CPU allocate for themselves while they run, which no fake tensor shows.

Only flash attention's buffers: they are ordinary tensors whose sizes follow from shapes and
threads. The scratch that oneDNN asks for in bf16 products depends on the blocking it chooses for
the processor and is left to the bounds in `accuracy.py`. Source:
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
    """Bytes that `operator` holds beside its arguments and results; 0 where that is not known."""
    if operator is _aten._scaled_dot_product_flash_attention_for_cpu.default:
        return _forward_bytes(query=args[0], key=args[1])
    if operator is _aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return _backward_bytes(gradient=args[0], query=args[1], key=args[2])
    return 0


def _forward_bytes(*, query: Tensor, key: Tensor) -> int:
    """For each thread scores, their row maxima and sums, and the result; 16-bit scores once more in their dtype."""
    rows, keys = _tile(query, key)
    is_packed = _is_packed(query, key)
    scores = rows * (_even(keys) if is_packed else keys)
    buffer = _accumulated(query) * (rows * keys + 2 * rows + rows * query.shape[3])
    packed = _packed_bytes(query, key) if is_packed else 0
    return torch.get_num_threads() * (buffer + _reduced(query) * scores) + packed


def _is_packed(query: Tensor, key: Tensor) -> bool:
    """Whether keys and values are packed first, for tiles of AMX, since there are products enough to make up for it."""
    fewest_keys, fewest_products = (64, 4) if query.dtype == torch.bfloat16 else (16, 1)
    if not _can_pack(query.dtype) or min(query.shape[2], key.shape[2]) < fewest_keys:
        return False
    rows, _ = _tile(query, key)
    tiles = query.shape[0] * query.shape[1] * -(-query.shape[2] // rows)
    tiles_of_a_thread = -(-tiles // torch.get_num_threads())
    # Each tile multiplies its rows by the keys up to its own place; a head's keys are packed once.
    products = tiles_of_a_thread * rows * min(query.shape[2], key.shape[2])
    return products / (key.shape[0] * key.shape[1] * key.shape[2]) >= fewest_products


def _can_pack(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return torch.cpu._is_amx_tile_supported()
    return dtype == torch.float16 and torch.cpu._is_amx_fp16_supported()


def _packed_bytes(query: Tensor, key: Tensor) -> int:
    """Keys and values once more, made even in length and size, and for each thread a tile that is being transposed."""
    rows, keys = _tile(query, key)
    batch, heads, length, size = key.shape
    tail = (length - 1) % keys + 1
    even_length = (length - 1) // keys * _even(keys) + _even(tail)
    padded_query = rows * _even(size) if size % 2 else 0
    packed = batch * heads * (_even(size) * length + even_length * size)
    return query.element_size() * (packed + torch.get_num_threads() * (keys * size + padded_query))


def _even(number: int) -> int:
    return number + number % 2


def _backward_bytes(*, gradient: Tensor, query: Tensor, key: Tensor) -> int:
    """For each thread scores and their gradients; one row of sums, since the profiler sees the main thread's only."""
    rows, keys = _tile(query, key)
    buffers = 2 * rows * keys * (_accumulated(query) + _reduced(query))
    return torch.get_num_threads() * buffers + _accumulated(query) * rows + _copied_bytes(gradient)


def _copied_bytes(gradient: Tensor) -> int:
    """The kernel wants [batch, sequence, heads, size] in one piece and copies what is laid out otherwise."""
    return (
        0
        if gradient.transpose(1, 2).is_contiguous()
        else gradient.numel() * gradient.element_size()
    )


def _tile(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Queries and keys that one thread takes at once."""
    length = query.shape[2]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(_KEYS_AT_ONCE, key.shape[2])


def _accumulated(query: Tensor) -> int:
    """Bytes of a number that sums are kept in."""
    return max(4, query.element_size())


def _reduced(query: Tensor) -> int:
    """Bytes of a 16-bit number; wider ones need no second buffer."""
    return query.element_size() if query.element_size() < 4 else 0
