"""What kernels on a CPU allocate for themselves while they run, which no fake tensor shows.

Only flash attention's buffers: they are ordinary tensors whose sizes follow from shapes and threads. The scratch that
oneDNN asks for in bf16 products depends on the blocking it chooses for the processor and is left to the bounds in
`accuracy.py`, as are buffers with which half-precision attention packs its keys on processors that have AMX.
Source: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp
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
    buffer = _accumulated(query) * (rows * keys + 2 * rows + rows * query.shape[3])
    return torch.get_num_threads() * (buffer + _reduced(query) * rows * keys)


def _backward_bytes(*, gradient: Tensor, query: Tensor, key: Tensor) -> int:
    """For each thread scores and their gradients; one row of sums, since the profiler sees the main thread's only."""
    rows, keys = _tile(query, key)
    buffers = 2 * rows * keys * (_accumulated(query) + _reduced(query))
    return torch.get_num_threads() * buffers + _accumulated(query) * rows + _copied_bytes(gradient)


def _copied_bytes(gradient: Tensor) -> int:
    """The kernel wants [batch, sequence, heads, size] in one piece and copies what is laid out otherwise."""
    return 0 if gradient.transpose(1, 2).is_contiguous() else gradient.numel() * gradient.element_size()


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
