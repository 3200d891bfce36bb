"""Activation checkpointing: frees activations in forward and recomputes them in backward.

| value | recomputed | stored |
|---|---|---|
| attention | the attention part of each block | all else |
| selective | all of a block but its matrix products and attention | the outputs of those |
| selective-2 | also every second matrix product | the outputs of the others and of attention |
| save-attention | all of a block but its attention kernels | their outputs |
| every-4, every-2 | whole blocks whose index is divisible by 4 or 2 | the other blocks |
| block | each block | one residual stream a block |
| sqrt | all blocks, in sqrt(layers) segments (arXiv:1604.06174) | a residual stream a segment |

With `activation_budget` in its place it is planned for each block which results of operators it
keeps, so that the predicted peak is within the budget (`predictor/activation_budget.py`).

Not ordered by memory: a segment of several blocks holds all their activations while it is
recomputed. Losses are bit-equal, since the same kernels run again. Always non-reentrant:
https://docs.pytorch.org/docs/stable/checkpoint.html,
https://pytorch.org/blog/activation-checkpointing-techniques/
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError

from autotune.models.parts import ModelParts
from autotune.shipped.granularity import Kept, recompute_but, recompute_in_blocks
from autotune.shipped.segments import recompute_segments
from autotune.spec.config import Checkpointing
from autotune.spec.prediction import KeptOfBlock


def checkpoint_in_blocks(parts: ModelParts, granularity: Checkpointing) -> None:
    """Applies every granularity within single blocks; `sqrt` is in `checkpoint_segments`."""
    if granularity != "none":
        recompute_in_blocks(list(parts.blocks), granularity, attention_name=parts.attention_name)


def checkpoint_segments(parts: ModelParts, granularity: Checkpointing) -> None:
    """Applies `sqrt`: round(sqrt(layers)) segments of nearly equal length, recomputed whole."""
    if granularity == "sqrt":
        assert parts.blocks_are_called_alike
        recompute_segments(list(parts.blocks))


def keep_in_blocks(blocks: Sequence[nn.Module], planned: Sequence[KeptOfBlock]) -> None:
    """Makes each block keep what is planned for it, and recompute the rest."""
    for block, kept in zip(blocks, planned, strict=True):
        recompute_but(block, kept_by(kept))


def kept_by(planned: KeptOfBlock) -> Kept | None:
    """Returns what a block keeps, as `recompute_but` takes it."""
    if planned.recomputed_parts or planned.operators is None:
        return planned.recomputed_parts or None
    calls = [operator.rpartition(" ") for operator in planned.operators]
    return frozenset((name, int(number)) for name, _, number in calls)


def in_words(kept: Kept | None) -> KeptOfBlock:
    """Returns what a block keeps, as it is stored and shown."""
    if isinstance(kept, frozenset):
        return KeptOfBlock(operators=tuple(f"{name} {number}" for name, number in sorted(kept)))
    return KeptOfBlock(recomputed_parts=kept or ())


def why_not_again(error: BaseException) -> str | None:
    """Returns why a forward pass cannot run a second time; None if the error says nothing of it."""
    text = str(error)
    if any(words in text for words in _CHANGED_IN_PLACE):
        return CHANGES_WHAT_IS_KEPT
    if isinstance(error, CheckpointError) or _OTHER_OPERATORS in text:
        return "it runs other operators the second time, as a forward pass that fills a cache does"
    return None


CHANGES_WHAT_IS_KEPT = "it changes in place a result of an operator that is kept"
_CHANGED_IN_PLACE = (
    "cached during selective activation checkpoint has been mutated",
    "kept for the backward pass was changed in place",
)
_OTHER_OPERATORS = "encountered during backward but not found in storage"
"""Parts of the messages of a bare RuntimeError of torch, and of `shipped/selective.py`."""


def why_not_recomputed(
    parts: ModelParts, granularity: Checkpointing, *, sequence_length: int
) -> str | None:
    """Returns why blocks of a model on the meta device cannot be recomputed so; None if they can.

    One block of each kind is tried, by a forward and a backward pass. None is returned, too, for
    blocks that do not run there, and for a model on another device.
    """
    for block, args, kwargs in _calls_of_blocks(parts, sequence_length):
        tried = copy.deepcopy(block)
        recompute_in_blocks([tried], granularity, attention_name=parts.attention_name)
        try:
            outputs = [one for one in tree_leaves(tried(*args, **kwargs)) if _is_learned(one)]
            torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
        except Exception as error:  # any error of a model that needs values
            if reason := why_not_again(error):
                return reason
    return None


def _calls_of_blocks(
    parts: ModelParts, sequence_length: int
) -> list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Returns a block of each kind with the arguments of its first call, none if it is not known.

    Blocks of one kind have modules of the same classes.
    """
    calls: dict[tuple[type[nn.Module], ...], Any] = {}

    def note(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(tuple(map(type, block.modules())), (block, args, kwargs))

    handles = [
        block.register_forward_pre_hook(note, with_kwargs=True)
        for block in dict.fromkeys(parts.blocks)
    ]
    tokens = torch.zeros(1, sequence_length, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            parts.model(tokens, tokens)  # an error on another device
    except Exception:  # as in `why_not_recomputed`
        return []
    finally:
        for handle in handles:
            handle.remove()
    return list(calls.values())


def _is_learned(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
