"""Feed-forward parts: of a whole sequence at once, or in tiles of tokens.

| value | keeps of a feed-forward part | costs |
|---|---|---|
| whole | all that lies between its input and its output, of all tokens | |
| tiled | its input; what lies between of one tile at a time | computes it again in backward |

A tile has as many tokens as the model is wide, so that a sequence no longer than that has only one,
and is computed as a whole. Each tile is recomputed on its own, also within a block that is: where
blocks are recomputed it is the peak of one block that is lower. The result is the same but for the
order in which gradients of weights are added up. Source: TiledMLP, arXiv:2506.13996, section 3.1.1.
"""

import torch
from torch import Tensor, nn

from autotune.errors import first_line_of
from autotune.models.parts import ModelParts
from autotune.shipped.tiled import feed_forward_of, tile_blocks
from autotune.spec.config import FeedForward

_TOKENS = 2
"""Tokens with which a part is tried."""


def set_feed_forward(parts: ModelParts, choice: FeedForward) -> None:
    """Computes the feed-forward part of each block in tiles, for the choice `tiled`."""
    if choice == "tiled":
        tile_blocks(parts.blocks, parts.attention_name)


def why_not(parts: ModelParts) -> str | None:
    """Returns why the model's feed-forward parts cannot be computed in tiles; None if they can."""
    if parts.blocks_owner is None or not _feed_forwards(parts):
        return "no feed-forward part was found in the model's blocks"
    for part in _feed_forwards(parts):
        for path, layer in part.named_modules():
            if not _is_of_each_token(path.rpartition(".")[2], layer):
                return (
                    f"{type(part).__name__} may compute a token from others: it has weights in "
                    f"{type(layer).__name__}"
                )
    return None


_OF_EACH_TOKEN = ("linear", "norm", "expert", "router", "gate", "moe")
"""Parts of the names of classes whose weights are for each token on its own."""


def _is_of_each_token(attribute: str, layer: nn.Module) -> bool:
    has_weights = any(True for _ in layer.parameters(recurse=False))
    name = type(layer).__name__
    is_known = name == "Conv1D" or any(word in name.lower() for word in _OF_EACH_TOKEN)
    return is_known or "expert" in attribute or not has_weights


@torch.no_grad()
def why_nothing_is_saved(parts: ModelParts, *, sequence_length: int | None) -> str | None:
    """Returns why tiles would not save memory in a model; None if they do, or if it is not known.

    How long the sequences of a script are is not known. That a part maps hidden states
    [batch, tokens, width] to the same is tried with a few tokens.
    """
    for part in {type(part): part for part in _feed_forwards(parts)}.values():
        if reason := _why_nothing_is_saved(part, sequence_length=sequence_length):
            return reason
    return None


def _why_nothing_is_saved(part: nn.Module, *, sequence_length: int | None) -> str | None:
    matrix = next(parameter for parameter in part.parameters() if parameter.dim() in (2, 3))
    reason = None
    # A layer or a router has its inputs as columns, Conv1D of GPT-2 as rows.
    for width in reversed(matrix.shape[-2:]):
        reason = _why_not_alone(part, matrix.new_empty(1, _TOKENS, width))
        if reason is None and sequence_length is not None and sequence_length <= width:
            return (
                f"a tile has as many tokens as the model is wide, {width}, and sequences have "
                f"{sequence_length}"
            )
        if reason is None:
            return None
    return reason


def _why_not_alone(part: nn.Module, hidden: Tensor) -> str | None:
    """Returns why a part does not map hidden states to the same, and needs nothing else."""
    try:
        output = part(hidden)
    except NotImplementedError:  # of the meta device, which has no values
        return "which tokens the feed-forward part takes depends on values, so it cannot be tried"
    except Exception as error:  # any error of a part that is called in another way
        return f"the feed-forward part is not a function of hidden states: {first_line_of(error)}"
    if not isinstance(output, Tensor) or output.shape != hidden.shape:
        return "the feed-forward part does not give hidden states alone"
    return None


def _feed_forwards(parts: ModelParts) -> list[nn.Module]:
    found = (feed_forward_of(block, parts.attention_name) for block in parts.blocks)
    return [part for part in found if part is not None]
