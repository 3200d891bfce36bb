"""Checkpoints, compiles or shards the transformer blocks of a model, as trials of autotune do.

    from autotune_blocks import prepare_blocks, shard_blocks
    prepare_blocks(model, checkpointing="every-2", compiled=True)
    shard_blocks(model)  # on several devices, by FSDP2

Call each once, after the weights are loaded and before an optimizer or a trainer gets the model.
It needs only torch (and torchao for fp8): put it next to your script. The blocks are the longest
list of modules of one class; name another with `path="model.layers"`. The names of parameters and
modules do not change.
"""

from typing import Any

from torch import nn

from autotune.shipped.blocks import BlockList, find_blocks
from autotune.shipped.compiling import compile_in_place
from autotune.shipped.fp8 import convert
from autotune.shipped.fsdp import fully_shard_blocks
from autotune.shipped.granularity import EVERY, SELECTIVE, recompute_in_blocks
from autotune.shipped.int8 import use_int8
from autotune.shipped.segments import recompute_segments


def prepare_blocks(
    model: nn.Module,
    *,
    checkpointing: str = "none",
    compiled: bool = False,
    fp8: bool = False,
    int8: bool = False,
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
    if int8:
        for block in found.blocks:
            use_int8(block)
    known = ("none", "attention", *SELECTIVE, *EVERY, "sqrt")
    if checkpointing not in known:
        raise ValueError(
            f"Invalid checkpointing: {checkpointing!r}. Choose one of {', '.join(known)}."
        )
    recompute_in_blocks(list(found.blocks), checkpointing, attention_name=found.attention_name)
    if compiled:
        for block in found.blocks:
            compile_in_place(block)
    if checkpointing == "sqrt":
        # After compiling, so that a segment runs compiled blocks and is not one graph itself.
        recompute_segments(list(found.blocks))


def shard_blocks(model: nn.Module, *, path: str | None = None, **settings: Any) -> None:
    """Shares out the weights of `model` among the devices: each block or segment, then the rest.

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
