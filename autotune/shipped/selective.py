"""What the values of checkpointing that choose by operator store: the rest is recomputed."""

from collections import Counter
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

_aten = torch.ops.aten
_MATRIX_PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._grouped_mm.default,
        _aten._scaled_mm.default,
    }
)
_ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
        torch.ops.higher_order.flex_attention,
    }
)
_OF_ATTENTION = ("flash_attn", "torch_attn")
"""Parts of the namespaces of the operators of packages: `flash_attn`, `flash_attn_3`, torch's
attention of sequences that are packed, and kernels of the hub."""


def selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_matrix_products)


def attention_contexts() -> Any:
    """Returns the contexts of `save-attention`, which keeps what attention kernels compute.

    Attention in single operators is recomputed: to keep its last product saves only this product,
    since the backward pass needs the softmax before it anyway.
    """
    return create_selective_checkpoint_contexts(_keep_attention)


def _keep_attention(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    is_of_package = any(part in getattr(operator, "namespace", "") for part in _OF_ATTENTION)
    if operator in _ATTENTION or is_of_package:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _keep_matrix_products(
    context: Any, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if operator in _MATRIX_PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    return _keep_attention(context, operator, *args, **kwargs)


def alternating_contexts() -> Any:
    """Returns the contexts of `selective-2`, which keeps the first, third, ... matrix product.

    It is what torchtitan does (torchtitan/distributed/activation_checkpoint.py).
    """
    products: Counter[bool] = Counter()

    def keep_every_second(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        if operator in _MATRIX_PRODUCTS:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return _keep_matrix_products(context, operator, *args, **kwargs)

    return create_selective_checkpoint_contexts(keep_every_second)
