"""Computes the workspaces that torch allocates for cuBLAS and cublasLt in matrix products.

| torch | cuBLAS, 32 MiB on compute capability | elsewhere | cublasLt | allocated |
|---|---|---|---|---|
| to 2.11 | 9.0 | 8.125 MiB | a separate 1 MiB | from the first product on |
| 2.12, 2.13 | 9.x, 10.x, 12.x | 8.125 MiB | uses cuBLAS's | from the first product on |
| 2.14 | 9.x, 10.x, 11.x, 12.x | 8.125 MiB | uses cuBLAS's | from the first product on |
| from 2.15 | 9.x, 10.x, 11.x, 12.x | 8.125 MiB | a separate 1 MiB | while the product runs |

A persistent workspace belongs to a handle, and each thread has a handle: the forward pass and the
optimizer run in one thread, autograd's backward pass including recomputation in another.
Source: aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize and
parseCUDABlasLtWorkspaceSize; the table was read from releases 2.11 to 2.15, whose dispatcher and
allocator ran on a driver that computes nothing.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from autotune.predictor.gpu import Gpu
from autotune.units import format_size

Library = Literal["cuBLAS", "cublasLt"]

_LARGE_BYTES = 4096 * 8 * 1024
_SMALL_BYTES = (2 * 4096 + 8 * 16) * 1024
_LT_BYTES = 1024 * 1024

_BLACKWELL_SINCE = (2, 12)
_LT_SHARES_SINCE = (2, 12)
_THOR_SINCE = (2, 14)
_TEMPORARY_SINCE = (2, 15)

_aten = torch.ops.aten
_PRODUCTS = frozenset(
    (
        _aten.mm,
        _aten.bmm,
        _aten.addmm,
        _aten.baddbmm,
        _aten.mv,
        _aten.addmv,
        _aten.dot,
        _aten.vdot,
        _aten._scaled_mm,
    )
)


class CublasWorkspaces:
    """The workspaces that the products of a recorded step allocate.

    Call `bytes_during` for each operator, then read `persistent`.
    """

    def __init__(
        self,
        gpu: Gpu,
        environment: Mapping[str, str] = os.environ,
        note: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:
        """`note` is called with the bytes of each workspace that stays, when it is allocated."""
        self._gpu = gpu
        self._environment = environment
        self.note = note
        self._used: dict[tuple[Library, bool], int] = {}

    def bytes_during(self, operator: Any, args: Sequence[Any]) -> int:
        """Returns the bytes of a workspace that exists only while `operator` runs."""
        library = _library_of(operator, args)
        if library is None:
            return 0
        if self._is_shared:
            library = "cuBLAS"
        size_bytes = self._bytes_of(library)
        is_backward = torch._C._current_autograd_node() is not None
        if self._is_persistent and (library, is_backward) not in self._used:
            self.note(size_bytes)
        self._used[library, is_backward] = size_bytes
        return 0 if self._is_persistent else size_bytes

    @property
    def persistent(self) -> list[int]:
        """The bytes of each workspace that stays allocated: one per library and thread."""
        return list(self._used.values()) if self._is_persistent else []

    def describe(self) -> str:
        """Returns text for the notes of a prediction, empty where the step had no product."""
        sizes = [format_size(size_bytes) for size_bytes in self._used.values()]
        if not sizes:
            return ""
        if self._is_persistent:
            return f"workspaces of cuBLAS of {' + '.join(sizes)}, one a thread and library"
        largest = format_size(max(self._used.values()))
        return f"workspaces of cuBLAS of up to {largest} while a product runs"

    @property
    def _is_persistent(self) -> bool:
        is_cached_by_user = self._environment.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"
        return self._gpu.release < _TEMPORARY_SINCE or is_cached_by_user

    @property
    def _is_shared(self) -> bool:
        if self._gpu.release < _LT_SHARES_SINCE or not self._is_persistent:
            return False
        return self._environment.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE") != "0"

    def _bytes_of(self, library: Library) -> int:
        if library == "cublasLt":
            chosen = self._environment.get("CUBLASLT_WORKSPACE_SIZE", "")
            kibibytes = re.match(r"\s*[0-9]+", chosen)
            return _LT_BYTES if kibibytes is None else int(kibibytes[0]) * 1024
        chosen_bytes = chosen_by_user(self._environment)
        return chosen_bytes or default_bytes(self._gpu)


def default_bytes(gpu: Gpu) -> int:
    """Returns the default bytes of one cuBLAS workspace."""
    major, _ = gpu.capability
    if gpu.release < _BLACKWELL_SINCE:
        is_large = gpu.capability == (9, 0)
    else:
        is_large = major in (9, 10, 12) or (major == 11 and gpu.release >= _THOR_SINCE)
    return _LARGE_BYTES if is_large else _SMALL_BYTES


def chosen_by_user(environment: Mapping[str, str]) -> int | None:
    """Returns the bytes that CUBLAS_WORKSPACE_CONFIG specifies, such as :4096:2:16:8 (KiB, count).

    None where the variable is missing or has another format.
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if not pairs:
        return None
    return sum(int(size) * int(count) for size, count in pairs) * 1024


def _library_of(operator: Any, args: Sequence[Any]) -> Library | None:
    """Returns cublasLt for products with a bias and in fp8, cuBLAS for others.

    None where `operator` is not a matrix product.
    """
    packet = getattr(operator, "overloadpacket", operator)
    if packet not in _PRODUCTS:
        return None
    if packet is _aten._scaled_mm or (packet is _aten.addmm and _is_bias(args[0])):
        return "cublasLt"
    return "cuBLAS"


def _is_bias(added: Tensor) -> bool:
    """Returns whether `added` is one number per column, which the kernel adds in the same pass."""
    return added.dim() == 1 or (added.dim() == 2 and added.stride(0) == 0)
