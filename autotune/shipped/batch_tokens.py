"""Counts the tokens of a batch that a trainer has collated."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def count_tokens(batch: Any) -> int | Tensor:
    """Returns the tokens that a batch trains on, without padding where a mask tells it.

    Of a mapping these are the ones of `attention_mask`, or the elements of `input_ids`; of another
    batch the elements of its first tensor if those are integers, and its rows if they are not.
    Padding depends on the micro batch, so that a count with it would tell nothing of the step. A
    sum is returned as the batch's device computes it, so that nobody waits for the device here.
    """
    if isinstance(batch, Mapping):
        mask = batch.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            return mask.sum()
        token_ids = batch.get("input_ids")
        if isinstance(token_ids, Tensor):
            return token_ids.numel()
    first = first_tensor(batch)
    if first is None or first.dim() == 0:
        return 0
    if first.is_floating_point():
        return len(first)
    return first.numel()


def shape_of_tokens(batch: Any) -> tuple[int, int]:
    """Returns the rows of a batch and the places for tokens in each, counted as `count_tokens`."""
    found = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(found, Tensor):
        found = first_tensor(batch)
    if found is None or found.dim() == 0:
        return 0, 0
    return len(found), 1 if found.is_floating_point() else found[0].numel()


def first_tensor(batch: Any) -> Tensor | None:
    """Returns the first tensor in a batch, or in what it is made of; None where it has none."""
    if isinstance(batch, Tensor):
        return batch
    parts: Sequence[Any] = ()
    if isinstance(batch, Mapping):
        # Some collators put the labels first.
        parts = tuple(value for name, value in batch.items() if name not in ("label", "labels"))
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        parts = batch
    for part in parts:
        found = first_tensor(part)
        if found is not None:
            return found
    return None
