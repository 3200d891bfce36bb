"""Attention backend: the kernel that scaled_dot_product_attention uses.

| value | saves | costs | needs |
|---|---|---|---|
| auto | torch chooses for each call | | |
| flash | scores [batch, heads, sequence, sequence] (arXiv:2205.14135) | | 16-bit; on CUDA no mask |
| efficient | the scores (arXiv:2112.05682) | slower than flash | CUDA; no grouped queries |
| cudnn | the scores; often faster on Hopper | a plan at first use | 16-bit; CUDA, Ampere or newer |
| math | nothing: stores the scores and their softmax | memory quadratic in the sequence | |

`math` is the reference. The backend is a setting of the whole process instead of a context around
the forward pass: checkpointing calls the kernel again in the backward pass, where such a context
has ended and another kernel would be chosen. Source:
https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autotune.errors import first_line_of
from autotune.spec.config import Attention

_KERNELS_OF_16_BIT = ("flash", "cudnn")


def set_attention_backend(attention: Attention) -> None:
    """Enables only the kernel of this backend, or all for auto, in the whole process."""
    torch.backends.cuda.enable_flash_sdp(attention in ("auto", "flash"))
    torch.backends.cuda.enable_mem_efficient_sdp(attention in ("auto", "efficient"))
    torch.backends.cuda.enable_cudnn_sdp(attention in ("auto", "cudnn"))
    torch.backends.cuda.enable_math_sdp(attention in ("auto", "math"))


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The properties of a call that decide which kernels support it.

    Shapes are [batch, heads, sequence, head size].
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: tuple[int, ...] | None = None
    mask_is_boolean: bool = False
    mask_is_trained: bool = False
    dropout: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False


PLAIN_CALL = AttentionCall(
    query=(1, 4, 64, 64), key=(1, 4, 64, 64), value=(1, 4, 64, 64), is_causal=True
)
"""A backend that does not support this call counts as unavailable."""


_LONGEST = 64
"""Longest sequence in a call that is tried: longer ones do not change which kernels support it."""


class CallsOfAttention(TorchFunctionMode):
    """Collects the distinct calls of scaled_dot_product_attention inside, with short sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[AttentionCall, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.calls[_call_of(*args, **kwargs)] = None
        return func(*args, **kwargs)


def unavailable(
    attention: Attention, *, device: torch.device, call: AttentionCall = PLAIN_CALL
) -> str | None:
    """Returns why no kernel of this backend supports `call` on `device`; None if one does.

    It is found by running the call, forward and backward.
    """
    if attention == "auto":
        return None
    dtype = torch.bfloat16 if attention in _KERNELS_OF_16_BIT else torch.float32
    try:
        with _only(attention), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns for every kernel that it rejects
            _run_call(call, device=device, dtype=dtype).sum().backward()
    except (RuntimeError, NotImplementedError) as error:
        return f"{first_line_of(error).partition('. ')[0]} ({_describe(call)})"
    return None


@contextmanager
def _only(attention: Attention) -> Iterator[None]:
    """Enables only this backend inside, all backends afterwards."""
    set_attention_backend(attention)
    try:
        yield
    finally:
        set_attention_backend("auto")


def _run_call(call: AttentionCall, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    query, key, value = (
        torch.zeros(shape, device=device, dtype=dtype, requires_grad=True)
        for shape in (call.query, call.key, call.value)
    )
    mask = None
    if call.mask is not None:
        if call.mask_is_boolean:
            mask = torch.ones(call.mask, device=device, dtype=torch.bool)
        else:
            mask = torch.zeros(
                call.mask, device=device, dtype=dtype, requires_grad=call.mask_is_trained
            )
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=call.dropout,
        is_causal=call.is_causal,
        enable_gqa=call.enable_gqa,
    )


def _call_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    return AttentionCall(
        query=_shortened(query, -2),
        key=_shortened(key, -2),
        value=_shortened(value, -2),
        mask=None if attn_mask is None else _shortened(attn_mask, -2, -1),
        mask_is_boolean=attn_mask is not None and attn_mask.dtype == torch.bool,
        mask_is_trained=attn_mask is not None and attn_mask.requires_grad,
        dropout=dropout_p,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
    )


def _shortened(tensor: Tensor, *dimensions: int) -> tuple[int, ...]:
    shape = list(tensor.shape)
    for dimension in dimensions:
        shape[dimension] = min(shape[dimension], _LONGEST)
    return tuple(shape)


def _describe(call: AttentionCall) -> str:
    properties = [f"heads of {call.query[-1]}"]
    if call.mask:
        if call.mask_is_trained:
            properties.append("trained mask")
        elif call.mask_is_boolean:
            properties.append("boolean mask")
        else:
            properties.append("additive mask")
    elif call.is_causal:
        properties.append("causal")
    if call.dropout:
        properties.append(f"dropout {call.dropout}")
    if call.enable_gqa:
        properties.append("grouped queries")
    return ", ".join(properties)
