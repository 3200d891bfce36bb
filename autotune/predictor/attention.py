"""Predicts which kernel torch chooses for attention on a GPU, and the memory that it allocates.

torch tries the kernels in order and uses the first whose conditions hold: flash, memory-efficient,
plain operators (math). On compute capability 9.0 and 10.x cuDNN comes first.
`tests/predictor/test_attention_choice.py` compares this choice with torch's own. Source:
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, priority_order and can_use_*_attention; for
the memory inside kernels aten/.../transformers/cuda/flash_attn/flash_api.cpp and
attention_backward.cu, and cudnn-frontend's
include/cudnn_frontend/node/scaled_dot_product_flash_attention.h.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.errors import PredictionImpossible
from autotune.predictor.fake_mode import Scratch
from autotune.predictor.gpu import Gpu
from autotune.spec.config import Attention

Kernel = Literal["cudnn", "flash", "efficient", "math"]

_aten = torch.ops.aten
_16_BIT = (torch.bfloat16, torch.float16)

_CUDNN_FIRST_SINCE = (2, 11)
"""The default builds of earlier releases come with a cuDNN that torch does not prefer."""
_CUDNN_DROPOUT_IN_SIXTEENTHS_SINCE = (2, 12)
_CUDNN_HEADS_ALIKE_SINCE = (2, 14)
_EFFICIENT_GROUPED_SINCE = (2, 14)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    gpu: Gpu,
    backend: Attention = "auto",
) -> Tensor:
    """Runs attention on fake CPU tensors with the kernel that torch would choose on `gpu`.

    The parameters are those of scaled_dot_product_attention. A `backend` other than auto prescribes
    the kernel; raises PredictionImpossible where that kernel does not support the call.
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask.to(dtype)
    with torch.autocast("cpu", enabled=False):
        kernel = chosen_kernel(
            query,
            key,
            value,
            attn_mask,
            dropout=dropout_p,
            is_causal=is_causal,
            enable_gqa=enable_gqa,
            gpu=gpu,
            backend=backend,
        )
        with_gradients = torch.is_grad_enabled() and any(
            t.requires_grad for t in (query, key, value)
        )
        attended: Tensor
        if kernel == "cudnn":
            bias = None
            if attn_mask is not None:
                bias = _to_additive(attn_mask, query)
            attended = _aten._scaled_dot_product_cudnn_attention(
                query, key, value, bias, with_gradients, dropout_p, is_causal, scale=scale
            )[0]
        elif kernel == "flash":
            size = query.shape[-1]
            if scale is None:
                scale = size**-0.5
            padded = [query, key, value]
            if size % 8:
                padded = [F.pad(tensor, (0, -size % 8)) for tensor in padded]
            attended = _aten._scaled_dot_product_flash_attention(
                *padded, dropout_p, is_causal, scale=scale
            )[0]
            if size % 8:
                attended = attended[..., :size]
        elif kernel == "efficient":
            bias = None
            if attn_mask is not None:
                bias = _to_additive(attn_mask, query).expand(
                    query.shape[0], query.shape[1], query.shape[2], key.shape[2]
                )
            attended = _aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, with_gradients, dropout_p, is_causal, scale=scale
            )[0]
        else:
            attended = _aten._scaled_dot_product_attention_math(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )[0]
    return attended


def _to_additive(mask: Tensor, query: Tensor) -> Tensor:
    """Converts a boolean mask to 0 and -inf in the dtype of the query."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))


# -- the choice ------------------------------------------------------------------------------------


def chosen_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout: float,
    is_causal: bool,
    enable_gqa: bool,
    gpu: Gpu,
    backend: Attention = "auto",
) -> Kernel:
    """Returns the kernel that torch chooses. Tensors are [batch, heads, sequence, head size].

    Raises PredictionImpossible where `backend` does not support the call.
    """
    order: tuple[Kernel, ...] = ("flash", "efficient", "math")
    if backend != "auto":
        order = (backend,)
    elif _prefers_cudnn(gpu):
        order = ("cudnn", *order)
    for kernel in order:
        if kernel == "cudnn":
            is_supported = _cudnn_supports(
                query, key, value, mask, dropout=dropout, enable_gqa=enable_gqa, gpu=gpu
            )
        elif kernel == "flash":
            is_supported = _flash_supports(
                query,
                key,
                value,
                mask,
                dropout=dropout,
                is_causal=is_causal,
                enable_gqa=enable_gqa,
                gpu=gpu,
            )
        elif kernel == "efficient":
            is_supported = _efficient_supports(query, key, value, enable_gqa=enable_gqa, gpu=gpu)
        else:
            is_supported = True
        if is_supported:
            return kernel
    raise PredictionImpossible(
        f"attention {backend} does not support this model's calls on a GPU of {gpu.name}",
        hint="use attention auto, which chooses the first kernel that does",
    )


def _prefers_cudnn(gpu: Gpu) -> bool:
    return gpu.capability[0] in (9, 10) and gpu.release >= _CUDNN_FIRST_SINCE and gpu.prefers_cudnn


def _cudnn_supports(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout: float,
    enable_gqa: bool,
    gpu: Gpu,
) -> bool:
    if query.dtype not in _16_BIT or not _are_alike(query, key, value, enable_gqa=enable_gqa):
        return False
    if query.dtype == torch.bfloat16 and gpu.capability < (8, 0):
        return False
    if mask is not None and (mask.dim() not in (2, 4) or mask.requires_grad):
        return False
    if gpu.release >= _CUDNN_DROPOUT_IN_SIXTEENTHS_SINCE and 16 * dropout != int(16 * dropout):
        return False
    return (
        key.shape[-2] > 1 and gpu.capability >= (8, 0) and _cudnn_takes_heads(query, value, gpu=gpu)
    )


def _cudnn_takes_heads(query: Tensor, value: Tensor, *, gpu: Gpu) -> bool:
    sizes = (query.shape[-1], value.shape[-1])
    if sizes[0] % 8 or sizes[1] % 8:
        return False
    if max(sizes) <= 128:
        return True
    major = gpu.capability[0]
    if major not in (9, 10):
        return False
    if gpu.release >= _CUDNN_HEADS_ALIKE_SINCE:
        with_gradients = torch.is_grad_enabled() and query.requires_grad
        return sizes in ((192, 128), (256, 256)) or (not with_gradients and max(sizes) <= 256)
    return sizes == (192, 128) or (major == 9 and max(sizes) <= 256)


def _flash_supports(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout: float,
    is_causal: bool,
    enable_gqa: bool,
    gpu: Gpu,
) -> bool:
    size = query.shape[-1]
    if mask is not None or gpu.capability < (8, 0) or query.dtype not in _16_BIT or size > 256:
        return False
    if key.shape[-1] != size or value.shape[-1] != size:
        return False
    if is_causal and query.shape[-2] != key.shape[-2]:
        return False
    has_little_shared_memory = (8, 6) <= gpu.capability <= (8, 9) or gpu.capability[0] == 12
    with_gradients = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if (
        has_little_shared_memory
        and with_gradients
        and size > 192
        and (dropout > 0.0 or size <= 224)
    ):
        return False
    return _are_alike(query, key, value, enable_gqa=enable_gqa)


def _efficient_supports(
    query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool, gpu: Gpu
) -> bool:
    is_16_bit = query.dtype in _16_BIT
    if not is_16_bit and query.dtype != torch.float32:
        return False
    if query.dtype == torch.bfloat16 and gpu.capability < (8, 0):
        return False
    multiple = 1
    if is_16_bit:
        multiple = 8
    elif gpu.capability >= (8, 0):
        multiple = 4
    if key.shape[-1] != query.shape[-1] or query.shape[-1] % multiple or value.shape[-1] % multiple:
        return False
    return _are_alike(
        query, key, value, enable_gqa=enable_gqa and gpu.release >= _EFFICIENT_GROUPED_SINCE
    )


def _are_alike(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool) -> bool:
    """Returns whether batch size, heads and dtype fit, and each head is contiguous in memory."""
    heads = query.shape[1]
    for tensor in (query, key, value):
        if tensor.dim() != 4 or tensor.shape[0] != query.shape[0] or tensor.dtype != query.dtype:
            return False
        if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
            return False
        if tensor.shape[1] != heads and not (enable_gqa and heads % tensor.shape[1] == 0):
            return False
    return True


# -- memory that kernels allocate ------------------------------------------------------------------

OPERATORS: dict[Any, Kernel] = {
    _aten._scaled_dot_product_cudnn_attention.default: "cudnn",
    _aten._scaled_dot_product_flash_attention.default: "flash",
    _aten._scaled_dot_product_efficient_attention.default: "efficient",
}
"""The operator of each kernel; math has none, it consists of plain operators."""


def scratch_of_attention(operator: Any, args: Sequence[Any], *, gpu: Gpu) -> Scratch:
    """Returns what an attention kernel allocates while it runs, without its results."""
    if operator is _aten._scaled_dot_product_efficient_attention.default:
        size_bytes = _efficient_forward_bytes(query=args[0], value=args[2])
        return [[size_bytes]] if size_bytes else ()
    if operator is _aten._scaled_dot_product_flash_attention_backward.default:
        copies = _copied_bytes(args[0], args[4])
        return [[*copies, *_flash_backward_bytes(query=args[1], key=args[2])]]
    if operator is _aten._scaled_dot_product_efficient_attention_backward.default:
        return _efficient_backward_bytes(query=args[1], gpu=gpu)
    if operator is _aten._scaled_dot_product_cudnn_attention_backward.default:
        return [cudnn_backward_bytes(query=args[1], key=args[2])]
    return ()


def _flash_backward_bytes(*, query: Tensor, key: Tensor) -> list[int]:
    """Returns the bytes of one sum per row and of the query's gradient in fp32, both padded.

    For grouped queries the gradients of keys and values for each query head are added.
    """
    batch, heads, length, size = query.shape
    rows = batch * heads * _round_up(length, 128)
    padded_size = next(padded for padded in (32, 64, 96, 128, 192, 256) if size <= padded)
    return [4 * rows, 4 * rows * padded_size, *_ungrouped_bytes(query, key)]


def _copied_bytes(*tensors: Tensor) -> list[int]:
    """Returns the bytes of the copies that flash's backward pass makes of its two outputs.

    It needs the output and its gradient contiguous as [batch, sequence, heads, head size].
    """
    return [
        tensor.numel() * tensor.element_size()
        for tensor in tensors
        if not tensor.transpose(1, 2).is_contiguous()
    ]


def _ungrouped_bytes(query: Tensor, key: Tensor) -> list[int]:
    """Returns the bytes of key and value gradients for each query head, before the group sum."""
    batch, heads, _, size = query.shape
    if key.shape[1] == heads:
        return []
    return 2 * [batch * heads * key.shape[2] * size * query.element_size()]


def _efficient_forward_bytes(*, query: Tensor, value: Tensor) -> int:
    """Returns the bytes of the fp32 accumulator that 16-bit heads larger than 128 use, or 0."""
    batch, heads, length, _ = query.shape
    size = value.shape[-1]
    if query.element_size() == 2 and size > 128:
        return 4 * batch * heads * length * size
    return 0


def _efficient_backward_bytes(*, query: Tensor, gpu: Gpu) -> Scratch:
    """Returns the gradient's product with the output and its sum per row; then the kernel's own.

    These are the query's gradient in fp32 with a lock for each of its tiles, and, for larger 16-bit
    heads, tiles of keys and values. Source: _efficient_attention_backward in
    aten/src/ATen/native/transformers/cuda/attention_backward.cu, and workspace_size in
    mem_eff_attention/kernel_backward.h.
    """
    batch, heads, length, size = query.shape
    rows = batch * heads * _round_up(length, 64)
    sums_bytes = 4 * rows
    kernel_bytes = 4 * rows * _round_up(size, 64) + 16 * (rows // 64)
    keeps_tiles = query.element_size() == 2 and (
        size > 128 or (size > 64 and gpu.capability[0] == 8)
    )
    if keeps_tiles:
        kernel_bytes += 3 * 4 * batch * heads * 128 * _round_up(size, 128)
    product_bytes = query.element_size() * batch * heads * length * size
    return [[product_bytes, sums_bytes, sums_bytes], [sums_bytes, kernel_bytes]]


def cudnn_backward_bytes(*, query: Tensor, key: Tensor) -> list[int]:
    """Returns the bytes of the query's gradient in fp32 and of one sum per row.

    For grouped queries the gradients of keys and values for each query head are added. cuDNN may
    allocate more: only it knows how much, after it has chosen its plan. So the bounds of a
    prediction add this number once more.
    """
    batch, heads, length, size = query.shape
    rows = batch * heads * length
    return [4 * rows * size, 4 * rows, *_ungrouped_bytes(query, key)]


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
