"""Attention backend: which kernel stands behind scaled_dot_product_attention.

| value | saves | costs | needs |
|---|---|---|---|
| auto | torch's own choice, call by call | | |
| flash | the scores [batch, heads, sequence, sequence] (arXiv:2205.14135) | | 16-bit numbers; on CUDA no mask |
| efficient | the scores (arXiv:2112.05682) | slower than flash | CUDA; no grouped queries |
| cudnn | the scores; on Hopper often faster than flash | a plan at first use | 16-bit numbers; CUDA, Ampere or newer |
| math | nothing: scores and their softmax are kept | memory in the square of the sequence | nothing: the reference |

A setting of the whole process and no context around the forward pass: checkpointing calls the
kernel again in backward, where such a context has ended and another kernel would answer. Source:
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

from autotune.spec.config import Attention

_KERNELS_OF_16_BIT = ("flash", "cudnn")


def set_attention_backend(attention: Attention) -> None:
    """Leaves torch the one kernel to choose, or all of them. A setting of the whole process."""
    torch.backends.cuda.enable_flash_sdp(attention in ("auto", "flash"))
    torch.backends.cuda.enable_mem_efficient_sdp(attention in ("auto", "efficient"))
    torch.backends.cuda.enable_cudnn_sdp(attention in ("auto", "cudnn"))
    torch.backends.cuda.enable_math_sdp(attention in ("auto", "math"))


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """What decides which kernels can answer a call: shapes [batch, heads, sequence, head size], mask and flags."""

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
"""The least that a backend must do to be there at all."""


_LONGEST = 64
"""Tokens of a sequence in a call that is tried: which kernels take it does not depend on more."""


class CallsOfAttention(TorchFunctionMode):
    """Within it `calls` collects the distinct calls of scaled_dot_product_attention, on sequences made short."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[AttentionCall, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.calls[_call_of(*args, **(kwargs or {}))] = None
        return func(*args, **(kwargs or {}))


def unavailable(
    attention: Attention, *, device: torch.device, call: AttentionCall = PLAIN_CALL
) -> str | None:
    """Why no kernel of this backend answers `call` on `device`, found by making it, with backward; None if one does."""
    if attention == "auto":
        return None
    dtype = torch.bfloat16 if attention in _KERNELS_OF_16_BIT else torch.float32
    try:
        with _only(attention), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of every kernel that it does not take
            _make(call, device=device, dtype=dtype).sum().backward()
    except (RuntimeError, NotImplementedError) as error:
        return f"{str(error).splitlines()[0].partition('. ')[0]} ({_in_words(call)})"
    return None


@contextmanager
def _only(attention: Attention) -> Iterator[None]:
    set_attention_backend(attention)
    try:
        yield
    finally:
        set_attention_backend("auto")


def _make(call: AttentionCall, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    query, key, value = (
        torch.zeros(shape, device=device, dtype=dtype, requires_grad=True)
        for shape in (call.query, call.key, call.value)
    )
    mask = None
    if call.mask is not None:
        mask = torch.zeros(
            call.mask, device=device, dtype=dtype, requires_grad=call.mask_is_trained
        )
        mask = (
            torch.ones(call.mask, device=device, dtype=torch.bool) if call.mask_is_boolean else mask
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


def _in_words(call: AttentionCall) -> str:
    mask = (
        "trained mask"
        if call.mask_is_trained
        else "boolean mask"
        if call.mask_is_boolean
        else "additive mask"
    )
    words = [
        f"heads of {call.query[-1]}",
        *([mask] if call.mask else ["causal"] if call.is_causal else []),
    ]
    words += [f"dropout {call.dropout}"] if call.dropout else []
    return ", ".join([*words, "grouped queries"] if call.enable_gqa else words)
