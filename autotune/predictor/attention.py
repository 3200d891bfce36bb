"""Attention on a GPU: which kernel torch chooses for a call, and what that kernel holds while it runs.

torch tries the kernels in order and takes the first whose conditions hold: flash, memory-efficient,
plain operators (math); on compute capability 9.0 and 10.x cuDNN comes first.
`tests/predictor/test_attention_choice.py` compares this choice with torch's own. Source:
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, priority_order and can_use_*_attention; for
the kernels' own memory aten/.../transformers/cuda/flash_attn/flash_api.cpp and
attention_backward.cu, and cudnn-frontend's
include/cudnn_frontend/node/scaled_dot_product_flash_attention.h.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.errors import PredictionImpossible
from autotune.predictor.gpu import Gpu
from autotune.spec.config import Attention

Kernel = Literal["cudnn", "flash", "efficient", "math"]

_aten = torch.ops.aten
_16_BIT = (torch.bfloat16, torch.float16)

_CUDNN_FIRST_SINCE = (2, 11)
"""Before, the default builds came with a cuDNN that torch does not prefer."""
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
    """scaled_dot_product_attention of fake CPU tensors by the kernel that torch would choose on `gpu`.

    With a `backend` other than auto it is that one; raises PredictionImpossible where it does not
    take the call.
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        attn_mask = (
            attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask.to(dtype)
        )
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
            bias = None if attn_mask is None else _additive(attn_mask, query)
            attended = _aten._scaled_dot_product_cudnn_attention(
                query, key, value, bias, with_gradients, dropout_p, is_causal, scale=scale
            )[0]
        elif kernel == "flash":
            size = query.shape[-1]
            scale = size**-0.5 if scale is None else scale
            padded = [F.pad(t, (0, -size % 8)) if size % 8 else t for t in (query, key, value)]
            attended = _aten._scaled_dot_product_flash_attention(
                *padded, dropout_p, is_causal, scale=scale
            )[0]
            attended = attended[..., :size] if size % 8 else attended
        elif kernel == "efficient":
            bias = None if attn_mask is None else _expanded(_additive(attn_mask, query), query, key)
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


def _additive(mask: Tensor, query: Tensor) -> Tensor:
    """A boolean mask becomes numbers in the query's dtype."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _expanded(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """[batch, heads, queries, keys], without a copy."""
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


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
    """Shapes are [batch, heads, sequence, head size]. Raises PredictionImpossible."""
    order: tuple[Kernel, ...] = ("flash", "efficient", "math")
    if backend != "auto":
        order = (backend,)
    elif _prefers_cudnn(gpu):
        order = ("cudnn", *order)
    for kernel in order:
        if kernel == "cudnn":
            is_taken = _cudnn_takes(
                query, key, value, mask, dropout=dropout, enable_gqa=enable_gqa, gpu=gpu
            )
        elif kernel == "flash":
            is_taken = _flash_takes(
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
            is_taken = _efficient_takes(query, key, value, enable_gqa=enable_gqa, gpu=gpu)
        else:
            is_taken = True
        if is_taken:
            return kernel
    raise PredictionImpossible(
        f"attention {backend} does not take this model's calls on a GPU of {gpu.name}",
        hint="use attention auto, which takes the first kernel that does",
    )


def _prefers_cudnn(gpu: Gpu) -> bool:
    return gpu.capability[0] in (9, 10) and gpu.release >= _CUDNN_FIRST_SINCE and gpu.prefers_cudnn


def _cudnn_takes(
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
    sizes = query.shape[-1], value.shape[-1]
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


def _flash_takes(
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


def _efficient_takes(
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
    """Whether batch and heads go together, and the numbers of a head lie side by side."""
    heads = query.shape[1]
    for tensor in (query, key, value):
        if tensor.dim() != 4 or tensor.shape[0] != query.shape[0] or tensor.dtype != query.dtype:
            return False
        if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
            return False
        if tensor.shape[1] != heads and not (enable_gqa and heads % tensor.shape[1] == 0):
            return False
    return True


# -- memory of its own -----------------------------------------------------------------------------

OPERATORS: dict[Any, Kernel] = {
    _aten._scaled_dot_product_cudnn_attention.default: "cudnn",
    _aten._scaled_dot_product_flash_attention.default: "flash",
    _aten._scaled_dot_product_efficient_attention.default: "efficient",
}
"""What a chosen kernel is called as; math is plain operators."""


def bytes_during(operator: Any, args: Sequence[Any], *, gpu: Gpu) -> int:
    """Bytes that a kernel of attention takes from the allocator while it runs, beside its results."""
    if operator is _aten._scaled_dot_product_efficient_attention.default:
        return _efficient_forward_bytes(query=args[0], value=args[2])
    if operator is _aten._scaled_dot_product_flash_attention_backward.default:
        return _flash_backward_bytes(query=args[1], key=args[2])
    if operator is _aten._scaled_dot_product_efficient_attention_backward.default:
        return _efficient_backward_bytes(query=args[1], gpu=gpu)
    if operator is _aten._scaled_dot_product_cudnn_attention_backward.default:
        return cudnn_backward_bytes(query=args[1], key=args[2])
    return 0


def _flash_backward_bytes(*, query: Tensor, key: Tensor) -> int:
    """The query's gradient in fp32 and one sum a row, both padded; keys and values of grouped queries a head each."""
    batch, heads, length, size = query.shape
    rows = batch * heads * _up_to(length, 128)
    padded_size = next(padded for padded in (32, 64, 96, 128, 192, 256) if size <= padded)
    return 4 * rows * padded_size + 4 * rows + _ungrouped_bytes(query, key)


def _ungrouped_bytes(query: Tensor, key: Tensor) -> int:
    """Gradients of keys and values for every query head, before those of a group are added up."""
    batch, heads, _, size = query.shape
    if key.shape[1] == heads:
        return 0
    return 2 * batch * heads * key.shape[2] * size * query.element_size()


def _efficient_forward_bytes(*, query: Tensor, value: Tensor) -> int:
    """Heads over 128 are added up in fp32 before they are written in 16 bit."""
    batch, heads, length, _ = query.shape
    size = value.shape[-1]
    return 4 * batch * heads * length * size if query.element_size() == 2 and size > 128 else 0


def _efficient_backward_bytes(*, query: Tensor, gpu: Gpu) -> int:
    """The query's gradient in fp32 and two sums a row; for larger 16-bit heads a tile of keys and values a head."""
    batch, heads, length, size = query.shape
    rows = batch * heads * _up_to(length, 64)
    accumulated = 4 * rows * _up_to(size, 64) + 2 * 4 * rows
    keeps_tiles = query.element_size() == 2 and (
        size > 128 or (size > 64 and gpu.capability[0] == 8)
    )
    return accumulated + (3 * 4 * batch * heads * 128 * _up_to(size, 128) if keeps_tiles else 0)


def cudnn_backward_bytes(*, query: Tensor, key: Tensor) -> int:
    """The query's gradient in fp32 and one sum a row, and for grouped queries keys and values a head each.

    cuDNN may take more for itself: only it knows how much, when it has chosen its plan. So the
    bounds of a prediction count this once more.
    """
    batch, heads, length, size = query.shape
    rows = batch * heads * length
    return 4 * rows * size + 4 * rows + _ungrouped_bytes(query, key)


def _up_to(number: int, unit: int) -> int:
    return -(-number // unit) * unit
