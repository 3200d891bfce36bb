"""What a CUDA device does to memory that fake tensors on a CPU do not show, each with its source.

Where torch can use a GPU the fake device is cuda, torch chooses its operators itself, and only workspaces are added
here. What the allocator makes of every request is in `caching_allocator.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.config import Attention
from autotune.memory import nvml
from autotune.techniques import activation_offload

_aten = torch.ops.aten

_WORKSPACE_BYTES = (2 * 4096 + 8 * 16) * 1024
_HOPPER_WORKSPACE_BYTES = 4096 * 8 * 1024
"""cuBLAS's workspace for one handle: parseChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp."""

_HANDLES = 2
"""The thread of the forward pass and the one that autograd runs backward in have a handle each."""

FLASH_HEAD_SIZE = 256
"""Largest head of the flash kernel: check_head_dim_size_flash in aten/.../transformers/cuda/sdp_utils.cpp."""


def choose_fake_device() -> torch.device:
    """Return the device of the fake tensors in a prediction for CUDA: cuda if torch can use a GPU.

    Otherwise it is cpu. A torch built with CUDA is not enough: autograd asks the CUDA driver for the
    context of a tensor's device, even if the tensor is fake.
    """
    if torch.version.cuda and torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("cpu")


def workspaces() -> list[int]:
    """Bytes of what cuBLAS keeps allocated, one a handle: for the GPU there is, else for one before Hopper."""
    hopper = (nvml.compute_capability() or (0, 0))[0] >= 9
    return _HANDLES * [_HOPPER_WORKSPACE_BYTES if hopper else _WORKSPACE_BYTES]


def assumptions(
    *, fake_device: torch.device, compiled: bool, autocast: bool, torch_version: str | None
) -> Iterator[str]:
    """What a prediction for CUDA takes for granted, in words."""
    yield "the CUDA context and what the allocator holds in reserve come on top"
    if fake_device.type == "cuda":
        return
    release = f" of torch {torch_version}" if torch_version else ""
    yield f"attention and RMSNorm as by the CUDA kernels{release}; cuBLAS workspaces as before Hopper"
    if autocast:
        yield "autocast by the CPU's list of operators, since torch cannot use a GPU here"
    if compiled:
        yield "buffers of compiled code as inductor lays them out for a CPU"


FUSED_RMS_NORM_SINCE = (2, 9)
"""torch release that brought aten::_fused_rms_norm to CUDA; before, RMSNorm was several operators there, too."""


@contextmanager
def memory_of_the_host() -> Iterator[None]:
    """Lets what is offloaded leave the device: its shape is all that waits."""
    before = activation_offload.to_host, activation_offload.to_device
    activation_offload.to_host = _Elsewhere  # type: ignore[assignment]
    activation_offload.to_device = _Elsewhere.back  # type: ignore[assignment]
    try:
        yield
    finally:
        activation_offload.to_host, activation_offload.to_device = before


class _Elsewhere:
    def __init__(self, tensor: Tensor) -> None:
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._dtype, self._device = tensor.dtype, tensor.device

    def back(self) -> Tensor:
        return torch.empty_strided(self._shape, self._stride, dtype=self._dtype, device=self._device)


@contextmanager
def kernels_of_a_gpu(torch_version: str | None = None, *, attention: Attention = "auto") -> Iterator[None]:
    """Lets attention and RMSNorm on a fake CPU allocate what the CUDA kernels of that torch release would."""
    before = F.scaled_dot_product_attention, F.rms_norm
    release = tuple(int(part) for part in (torch_version or torch.__version__).split(".")[:2])

    def chosen(*args: Any, **kwargs: Any) -> Tensor:
        return _attention(*args, backend=attention, **kwargs)

    F.scaled_dot_product_attention = chosen
    if release >= FUSED_RMS_NORM_SINCE:
        F.rms_norm = _rms_norm
    try:
        yield
    finally:
        F.scaled_dot_product_attention, F.rms_norm = before


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: Attention = "auto",
) -> Tensor:
    """The kernel that a GPU since Ampere would choose: flash, else memory-efficient, else plain operators.

    Or that of `backend`; cuDNN's allocates as flash does.

    Flash takes 16-bit numbers and no mask, memory-efficient any dtype and an additive mask but no grouped queries.
    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        attn_mask = attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask.to(dtype)
    with torch.autocast("cpu", enabled=False):
        is_16_bit = query.dtype in (torch.bfloat16, torch.float16)
        takes_flash = is_16_bit and attn_mask is None and query.shape[-1] <= FLASH_HEAD_SIZE
        if takes_flash and backend in ("auto", "flash", "cudnn"):
            flash = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
            attended: Tensor = flash[0]
        elif enable_gqa or backend == "math":
            attended = _aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]
        else:
            bias = None if attn_mask is None else _bias(attn_mask, query, key)
            with_gradients = any(t.requires_grad for t in (query, key, value))
            attended = _aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, with_gradients, dropout_p, is_causal, scale=scale
            )[0]
    return attended


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """An additive bias [batch, heads, queries, keys]; a boolean mask becomes one in the query's dtype."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if torch.compiler.is_compiling() or weight is None:
        return torch.rms_norm(input, normalized_shape, weight, eps)  # inductor fuses it either way
    normed: Tensor = _FusedRMSNorm.apply(input, weight)  # type: ignore[no-untyped-call]
    return normed


class _FusedRMSNorm(torch.autograd.Function):
    """Allocates what aten::_fused_rms_norm does on CUDA (torch 2.9 and newer): the result and one float a row.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu. On a CPU it is several operators that keep their results.
    """

    @staticmethod
    def forward(context: Any, input: Tensor, weight: Tensor) -> Tensor:
        reciprocal_deviation = input.new_empty(*input.shape[:-1], 1, dtype=torch.float32)
        context.save_for_backward(input, weight, reciprocal_deviation)
        return torch.empty_like(input, dtype=torch.promote_types(input.dtype, weight.dtype))

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        input, weight, _ = context.saved_tensors
        return torch.empty_like(input), torch.empty_like(weight)
