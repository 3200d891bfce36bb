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

from collections.abc import Sequence

from torch import nn

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
