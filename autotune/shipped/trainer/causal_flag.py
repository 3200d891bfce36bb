"""Keeps masks out of compiled attention of transformers."""

from typing import Any


def keep_causal_flag() -> None:
    """Makes transformers use the causal flag of the attention kernels in compiled code as well.

    It would make a mask there instead, and flash attention takes no mask.
    """
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def mask(
        *,
        q_length: int,
        kv_length: int,
        local_size: int | None = None,
        attention_mask: Any = None,
        **options: Any,
    ) -> Any:
        is_long = local_size is not None and kv_length >= local_size
        is_plain = attention_mask is None and options.get("allow_is_causal_skip", True)
        if is_plain and q_length == kv_length and not is_long:
            return None
        return sdpa_mask(
            q_length=q_length,
            kv_length=kv_length,
            local_size=local_size,
            attention_mask=attention_mask,
            **options,
        )

    AttentionMaskInterface.register("sdpa", mask)
