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
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autotune.models.parts import ModelParts
from autotune.spec.config import Checkpointing, segment_bounds

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


class Checkpointed(nn.Module):
    """`module` with its activations recomputed in the backward pass."""

    def __init__(self, module: nn.Module, *, context_fn: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.module = module
        self._options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.module, *args, use_reentrant=False, **self._options, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Looks up attributes in `module`, since models read them from their blocks."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class Segment(nn.Module):
    """Several consecutive blocks as one module.

    A block may return a tuple whose first element is the input of the next block.
    """

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        output: Any = x
        for block in self.blocks:
            output = block(output[0] if isinstance(output, tuple) else output, *args, **kwargs)
        return output


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
            [Checkpointed(block, context_fn=_selective_contexts) for block in parts.blocks]
        )
    elif granularity in _EVERY:
        every = _EVERY[granularity]
        blocks = list(parts.blocks)
        for index in range(0, len(blocks), every):
            blocks[index] = Checkpointed(blocks[index])
        parts.replace_blocks(blocks)


def stop_caching(model: nn.Module) -> None:
    """Turns off the cache of keys and values that transformers' models fill in each forward pass.

    A block that is recomputed would add to the cache a second time: the cache would hold twice the
    keys and values, and `selective` would meet operators that were not in the forward pass.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False


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


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_matrix_products)


def _keep_matrix_products(
    _context: Any, operator: Any, *_args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    if operator in _KEPT_OPERATORS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
