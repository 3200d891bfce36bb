"""The attention mask of models of transformers."""

from typing import Any

from torch import Tensor
from transformers.masking_utils import sdpa_mask


def causal_mask(
    *,
    q_length: int,
    kv_length: int,
    local_size: int | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **options: Any,
) -> Tensor | None:
    """Returns transformers' mask for sdpa, or None if the causal flag of the kernel is enough.

    `attention_mask` is always ones here. `local_size` is the window of local attention.
    """
    if (
        allow_is_causal_skip
        and q_length == kv_length
        and (local_size is None or kv_length < local_size)
    ):
        return None
    mask: Tensor | None = sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        local_size=local_size,
        allow_is_causal_skip=False,
        **options,
    )
    return mask
