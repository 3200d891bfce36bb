"""Computes the feed-forward parts of blocks one tile of tokens after the other.

What a feed-forward part computes of a token depends on no other token. So all that lies between its
input and its output is needed of one tile at a time, if it is computed again in the backward pass.
Source: TiledMLP, arXiv:2506.13996, section 3.1.1.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from autotune.shipped.changed_method import Method, change_method
from autotune.shipped.checkpointing import run_recomputed


def feed_forward_of(block: nn.Module, attention_name: str | None) -> nn.Module | None:
    """Returns the part of a block that is its feed-forward; None if there is none.

    It is the last child that has several matrices, or stacks of them as experts are, and no
    attention in it. The weights of convolutions are none.
    """
    found = None
    for name, child in block.named_children():
        if (
            len(matrices_of(child)) > 1
            and name != attention_name
            and not _has_attention(name, child)
        ):
            found = child
    return found


def matrices_of(part: nn.Module) -> list[nn.Parameter]:
    """Returns the matrices of a part, and stacks of them, that are not of a convolution."""
    found = {
        parameter: None
        for module in part.modules()
        if not isinstance(module, nn.modules.conv._ConvNd)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() in (2, 3)
    }
    return list(found)


def _has_attention(name: str, module: nn.Module) -> bool:
    names = [name, *(f"{path} {type(part).__name__}" for path, part in module.named_modules())]
    return any(word in one.lower() for one in names for word in ("attn", "attention"))


def tile_blocks(blocks: Iterable[nn.Module], attention_name: str | None) -> None:
    """Computes the feed-forward part of each block in tiles, where it has one.

    A tile of an input [..., tokens, width] has as many tokens as the input is wide: the rule of the
    source.
    """
    found = (feed_forward_of(block, attention_name) for block in blocks)
    for part in dict.fromkeys(part for part in found if part is not None):
        change_method(part, "forward", _in_tiles)


def _in_tiles(forward: Method) -> Method:
    def tiled(self: nn.Module, hidden: Tensor, *others: Any, **kwargs: Any) -> Any:
        width = hidden.shape[-1]
        is_short = hidden.dim() < 2 or hidden.shape[-2] <= width
        has_others = others or any(isinstance(one, Tensor) for one in kwargs.values())
        if is_short or has_others or not torch.is_grad_enabled():
            return forward(self, hidden, *others, **kwargs)

        def compute(tile: Tensor, **named: Any) -> Any:
            # Mixtures make one list of tokens by `view`. What is kept is the tile, not its copy.
            return forward(self, tile.contiguous(), **named)

        tiles = hidden.split(width, dim=-2)
        outputs = [run_recomputed((self,), compute, (tile,), kwargs, {}) for tile in tiles]
        if not isinstance(outputs[0], Tensor):
            raise TypeError(
                "feed_forward tiled puts tiles of hidden states together, and the feed-forward "
                f"part {type(self).__name__} gives a {type(outputs[0]).__name__}"
            )
        return torch.cat(outputs, dim=-2)

    return tiled
