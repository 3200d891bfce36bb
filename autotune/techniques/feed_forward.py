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

import copy
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autotune.errors import first_line_of
from autotune.models.parts import ModelParts
from autotune.shipped.tiled import feed_forward_of, matrices_of, tile_blocks
from autotune.spec.config import FeedForward

_TOKENS = 32
"""Tokens with which a part is tried, as a whole and in two halves."""
_MOST_BYTES = 64 * 2**20
"""Of the weights of a part that is computed with random ones."""
_MOST_DIFFERENCE = 0.01
"""Of the norm of an output in float32, which rounding does not reach."""


def set_feed_forward(parts: ModelParts, choice: FeedForward) -> None:
    """Computes the feed-forward part of each block in tiles, for the choice `tiled`."""
    if choice == "tiled":
        tile_blocks(parts.blocks, parts.attention_name)


def why_not(parts: ModelParts) -> str | None:
    """Returns why the model's feed-forward parts cannot be computed in tiles; None if they can."""
    if parts.blocks_owner is None or not _feed_forwards(parts):
        return "no feed-forward part was found in the model's blocks"
    if _gives_router_logits(parts.model):
        return (
            "output_router_logits is on in the model's config, and tiles have logits of their own"
        )
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
    holds_experts = isinstance(layer, nn.ParameterDict | nn.ParameterList) and "expert" in attribute
    return is_known or holds_experts or not has_weights


def _gives_router_logits(model: nn.Module) -> bool:
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(getattr(config, "output_router_logits", None) is True for config in configs)


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
    # A layer or a router has its inputs as columns, Conv1D of GPT-2 as rows.
    sizes = [size for matrix in matrices_of(part) for size in reversed(matrix.shape[-2:])]
    reasons = []
    for width in dict.fromkeys(sizes):
        reason = _why_not_of_width(part, width)
        if reason is None and sequence_length is not None and sequence_length <= width:
            return (
                f"a tile has as many tokens as the model is wide, {width}, and sequences have "
                f"{sequence_length}"
            )
        if reason is None:
            return None
        reasons.append(reason)
    # Inputs of another width are an error of every part.
    others = [reason for reason in reasons if not reason.startswith(_NO_FUNCTION)]
    return (others or reasons)[0]


_NO_FUNCTION = "the feed-forward part is not a function of hidden states"


def _why_not_of_width(part: nn.Module, width: int) -> str | None:
    """Returns why a part cannot have tiles of hidden states of this width.

    On the meta device a part is tried for its shapes. A part that is small is computed as well, by
    a copy with random weights.
    """
    first = matrices_of(part)[0]
    is_small = sum(parameter.nbytes for parameter in part.parameters()) <= _MOST_BYTES
    try:
        if first.is_meta or not is_small:
            hidden = first.new_empty(1, _TOKENS, width)
            if reason := _why_not_alone(_copied(part, is_random=False), hidden):
                return reason
        if is_small:
            return _why_not_by_parts(_copied(part, is_random=True), width)
    except NotImplementedError:  # of the meta device, which has no values
        return "which tokens the feed-forward part takes depends on values, so it cannot be tried"
    except Exception as error:  # any error of a part that is called in another way
        return f"{_NO_FUNCTION}: {first_line_of(error)}"
    return None


def _why_not_alone(part: nn.Module, hidden: Tensor) -> str | None:
    """Returns why a part does not map hidden states to the same, and does nothing else.

    Raises what the part raises.
    """
    before = {module: _versions(module) for module in part.modules()}
    output = part(hidden)
    if not isinstance(output, Tensor) or output.shape != hidden.shape:
        return "the feed-forward part does not give hidden states alone"
    for module, versions in before.items():
        if not _are_same(_versions(module), versions):
            return (
                f"{type(module).__name__} sets or changes a tensor of its own when it is called, "
                "which each tile would do"
            )
    return None


def _why_not_by_parts(part: nn.Module, width: int) -> str | None:
    """Returns why a part with numbers cannot be computed in tiles; raises what it raises."""
    device = matrices_of(part)[0].device
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, _TOKENS, width, generator=generator, device="cpu").to(device)
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        if reason := _why_not_alone(part, hidden):
            return reason
        part.eval()  # no dropout
        whole = part(hidden)
        halves = torch.cat([part(half.contiguous()) for half in hidden.chunk(2, dim=1)], dim=1)
    if not float((whole - halves).norm()) <= _MOST_DIFFERENCE * float(whole.norm()):  # nor NaN
        return (
            f"{type(part).__name__} computes a token from others: half of them give other numbers"
        )
    return None


def _copied(part: nn.Module, *, is_random: bool) -> nn.Module:
    """Returns a copy of a part in training mode, with its own weights or with random ones.

    What is random is in float32, and on the CPU where the part is on the meta device.
    """
    generator = torch.Generator().manual_seed(0)
    copies: dict[int, Tensor] = {}
    for module in part.modules():
        for tensor in _tensors_of(module):
            is_weight = isinstance(tensor, nn.Parameter)
            if is_random:
                copied = _with_numbers(tensor, generator)
                copies[id(tensor)] = (
                    nn.Parameter(copied, requires_grad=False) if is_weight else copied
                )
            else:
                copies[id(tensor)] = tensor if is_weight else tensor.detach().clone()
    return copy.deepcopy(part, copies).train()


def _with_numbers(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Returns random numbers for weights, and the same ones, or ones, for what is no weight."""
    device = torch.device("cpu") if tensor.is_meta else tensor.device
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    if not isinstance(tensor, nn.Parameter):
        if tensor.is_meta:
            return torch.ones(tensor.shape, dtype=dtype, device=device)
        return tensor.detach().to(dtype, copy=True)
    if tensor.dim() < 2:
        scales = torch.rand(tensor.shape, generator=generator, device="cpu") + 0.5
        return scales.to(device, dtype)
    numbers = torch.randn(tensor.shape, generator=generator, device="cpu")
    numbers /= math.sqrt(tensor.shape[-1])
    return numbers.to(device, dtype)


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yields the tensors in the attributes of a module, also in lists and dictionaries."""
    return (one for one in tree_leaves(vars(module)) if isinstance(one, Tensor))


def _are_same(one: list[tuple[Tensor, int]], other: list[tuple[Tensor, int]]) -> bool:
    """Returns whether they are the same tensors, to which nothing was written between."""
    return [(id(tensor), version) for tensor, version in one] == [
        (id(tensor), version) for tensor, version in other
    ]


def _versions(module: nn.Module) -> list[tuple[Tensor, int]]:
    return [(one, one._version) for one in _tensors_of(module)]


def _feed_forwards(parts: ModelParts) -> list[nn.Module]:
    found = (feed_forward_of(block, parts.attention_name) for block in parts.blocks)
    return [part for part in found if part is not None]
