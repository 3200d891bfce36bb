"""Computes what torch's sums and means over rows allocate on a GPU, besides their result.

A sum over the rows of a matrix, such as the gradient of a bias or a mean of Adafactor, is split
among many thread blocks where there are many rows. Each writes a partial sum for every thread to a
buffer in the device's memory. It grows with the columns: of 16,384 rows and 3,072 columns the
buffer has 132 MiB on an H200. Sums within a row need none, nor do norms, whose kernels are others.

Source: setReduceConfig and global_memory_size in aten/src/ATen/native/cuda/Reduce.cuh.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autotune.predictor.gpu import Gpu

_SUMS = frozenset((torch.ops.aten.sum.dim_IntList, torch.ops.aten.mean.dim))
_THREADS = 512
_WARP = 32
_FEWEST_VALUES, _MOST_VALUES = 16, 256
"""Values that each thread should add up."""


def partial_sums_bytes(operator: Any, args: Sequence[Any], *, gpu: Gpu) -> int:
    """Returns the bytes of the buffer of a sum over all dimensions but the last; 0 for others."""
    if operator not in _SUMS or not isinstance(args[0], Tensor):
        return 0
    tensor, dims = args[0], args[1]
    if not dims or not tensor.is_contiguous() or tensor.dim() < 2:
        return 0
    summed = {dim % tensor.dim() for dim in dims}
    kept = [dim for dim in range(tensor.dim()) if dim not in summed and tensor.shape[dim] > 1]
    if kept != [tensor.dim() - 1]:
        return 0
    columns = tensor.shape[-1]
    element_bytes = max(4, tensor.element_size())
    return element_bytes * _partial_sums(tensor.numel() // columns, columns, gpu=gpu)


def _partial_sums(rows: int, columns: int, *, gpu: Gpu) -> int:
    """Returns how many partial sums of a matrix are kept; 0 where each is complete."""
    vector = math.gcd(columns, 4)  # columns that a thread adds up at once
    across, down = _power_of_two(columns // vector), _power_of_two(rows)
    most_threads = _THREADS // vector
    width = min(across, _WARP, most_threads)
    height = min(down, most_threads // width)
    width = min(across, most_threads // height)
    if not (rows >= 16 * height or rows >= _MOST_VALUES):
        return 0
    values = -(-rows // height)
    blocks = gpu.multiprocessors * (gpu.threads_of_a_multiprocessor // (width * height))
    blocks_across = -(-columns // (width * vector))
    if values < _MOST_VALUES or blocks_across > blocks:
        return 0
    parts = min(-(-blocks // blocks_across), -(-values // _FEWEST_VALUES))
    parts = max(parts, -(-values // _MOST_VALUES))
    return columns * parts * width * vector if parts > 1 else 0


def _power_of_two(number: int) -> int:
    """Returns the largest power of two that is not above the number."""
    return 1 << (max(1, number).bit_length() - 1)
