"""Checkpoints, compiles or shards the transformer blocks of a model, as trials of autotune do.

    from autotune_blocks import prepare_blocks, shard_blocks
    prepare_blocks(model, checkpointing="every-2", compiled=True)
    shard_blocks(model)  # on several devices, by FSDP2

Call each once, after the weights are loaded and before an optimizer or a trainer gets the model.
It needs only torch (and torchao for fp8): put it next to your script. The blocks are the longest
list of modules of one class; name another with `path="model.layers"`. The names of parameters do
not change, except with checkpointing "sqrt".
"""

import itertools
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)

from autotune.shipped.blocks import BlockList, find_blocks
from autotune.shipped.fp8 import convert
from autotune.shipped.fsdp import fully_shard_blocks
from autotune.shipped.key_value_cache import stop_caching
from autotune.shipped.segments import Segment, segment_bounds
from autotune.shipped.selective import selective_contexts

EVERY = {"block": 1, "every-2": 2, "every-4": 4}
"""Blocks whose index is divisible by this number are recomputed."""


def prepare_blocks(
    model: nn.Module,
    *,
    checkpointing: str = "none",
    compiled: bool = False,
    fp8: bool = False,
    path: str | None = None,
) -> None:
    """Applies the techniques to `model` in place, in the order in which they work together.

    `path` names the list of blocks, such as "model.layers"; by default it is found by
    `find_blocks`. Raises ValueError if the model has no such blocks.
    """
    found = _block_list(model, path)
    if fp8:
        for block in found.blocks:
            convert(block)
    if checkpointing != "none":
        stop_caching(model)
    _checkpoint_in_blocks(found, checkpointing)
    if compiled:
        for block in found.blocks:
            block.compile(dynamic=False)
    if checkpointing == "sqrt":
        # After compiling, so that a segment holds compiled blocks and is not one graph itself.
        _checkpoint_segments(found)


def shard_blocks(model: nn.Module, *, path: str | None = None, **settings: Any) -> None:
    """Shares out the weights of `model` among the devices: each block by itself, then the rest.

    Call it after `prepare_blocks`, and make the optimizer after it. `settings` are those of
    `fully_shard_blocks`, `path` is that of `prepare_blocks`.
    """
    fully_shard_blocks(model, list(_block_list(model, path).blocks), **settings)


def _block_list(model: nn.Module, path: str | None) -> BlockList:
    """Returns the blocks at `path`, or else those that are found. Raises ValueError for none."""
    if path is not None:
        owner, _, name = path.rpartition(".")
        return BlockList(owner=model.get_submodule(owner), name=name)
    found = find_blocks(model)
    if found is None:
        raise ValueError(
            f"{type(model).__name__} has no list of blocks of one class: name it with path=..."
        )
    return found


def _checkpoint_in_blocks(found: BlockList, checkpointing: str) -> None:
    blocks = list(found.blocks)
    if checkpointing == "attention":
        name = found.attention_name
        if name is None:
            raise ValueError(f"no attention module was found in {type(blocks[0]).__name__}")
        for block in blocks:
            setattr(block, name, _recomputed(getattr(block, name)))
    elif checkpointing == "selective":
        found.replace([_recomputed(block, context_fn=selective_contexts) for block in blocks])
    elif checkpointing in EVERY:
        for index in range(0, len(blocks), EVERY[checkpointing]):
            blocks[index] = _recomputed(blocks[index])
        found.replace(blocks)
    elif checkpointing not in ("none", "sqrt"):
        known = ", ".join(["none", "attention", "selective", *EVERY, "sqrt"])
        raise ValueError(f"Invalid checkpointing: {checkpointing!r}. Choose one of {known}.")


def _checkpoint_segments(found: BlockList) -> None:
    """Recomputes the blocks in round(sqrt(layers)) segments of nearly equal length."""
    blocks = list(found.blocks)
    bounds = segment_bounds(len(blocks))
    found.replace(
        [_recomputed(Segment(blocks[start:end])) for start, end in itertools.pairwise(bounds)]
    )


def _recomputed(module: nn.Module, **options: Any) -> nn.Module:
    return checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **options)
