"""Activation checkpointing: frees activations in forward and recomputes them in backward.

| value | recomputed | stored |
|---|---|---|
| attention | the attention part of each block | all else |
| selective | all of a block but its matrix products and attention | the outputs of those |
| every-4, every-2 | whole blocks whose index is divisible by 4 or 2 | the other blocks |
| block | each block | one residual stream a block |
| sqrt | all blocks, in sqrt(layers) segments (arXiv:1604.06174) | a residual stream a segment |

Not ordered by memory: a segment of several blocks holds all their activations while it is
recomputed. Losses are bit-equal, since the same kernels run again. Always non-reentrant:
https://docs.pytorch.org/docs/stable/checkpoint.html,
https://pytorch.org/blog/activation-checkpointing-techniques/
"""

import itertools

from autotune.models.parts import ModelParts
from autotune.shipped.checkpointing import Checkpointed
from autotune.shipped.key_value_cache import stop_caching
from autotune.shipped.segments import Segment, segment_bounds
from autotune.shipped.selective import (
    selective_contexts,
)
from autotune.spec.config import Checkpointing


def checkpoint_in_blocks(parts: ModelParts, granularity: Checkpointing) -> None:
    """Applies every granularity within single blocks; `sqrt` is in `checkpoint_segments`."""
    if granularity != "none":
        stop_caching(parts.model)
    if granularity == "attention":
        assert parts.attention_name is not None
        for block in parts.blocks:
            setattr(block, parts.attention_name, Checkpointed(getattr(block, parts.attention_name)))
    elif granularity == "selective":
        parts.replace_blocks(
            [Checkpointed(block, context_fn=selective_contexts) for block in parts.blocks]
        )
    elif granularity in _EVERY:
        every = _EVERY[granularity]
        blocks = list(parts.blocks)
        for index in range(0, len(blocks), every):
            blocks[index] = Checkpointed(blocks[index])
        parts.replace_blocks(blocks)


def checkpoint_segments(parts: ModelParts, granularity: Checkpointing) -> None:
    """Applies `sqrt`: round(sqrt(layers)) segments of nearly equal length, recomputed whole."""
    if granularity != "sqrt":
        return
    assert parts.blocks_are_called_alike
    blocks = list(parts.blocks)
    bounds = segment_bounds(len(blocks))
    parts.replace_blocks(
        [Checkpointed(Segment(blocks[start:end])) for start, end in itertools.pairwise(bounds)]
    )


_EVERY = {"block": 1, "every-2": 2, "every-4": 4}
