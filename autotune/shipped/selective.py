"""What checkpointing `selective` stores and what it recomputes."""

from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

_aten = torch.ops.aten
_KEPT_OPERATORS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._grouped_mm.default,
        _aten._scaled_mm.default,
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
