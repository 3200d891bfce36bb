"""Says what the count of a batch is of: tokens, or rows where a model has none."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from autotune.shipped.batch_tokens import first_tensor
from autotune.spec.terms import Counted


def counted_in(batch: Any) -> Counted:
    """Returns what `count_tokens` counts in the batch."""
    named = (
        (batch.get("attention_mask"), batch.get("input_ids")) if isinstance(batch, Mapping) else ()
    )
    if any(isinstance(value, Tensor) for value in named):
        return "tokens"
    first = first_tensor(batch)
    return "rows" if first is not None and first.is_floating_point() else "tokens"
