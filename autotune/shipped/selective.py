"""What checkpointing `selective` and `selective-2` store and what they recompute."""

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
_KEPT_OPERATORS = _MATRIX_PRODUCTS | frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""The operators whose results `selective` stores: matrix products and attention kernels."""


def selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_matrix_products)


def _keep_matrix_products(
    _context: Any, operator: Any, *_args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    if operator in _KEPT_OPERATORS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


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
