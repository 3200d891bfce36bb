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

import bisect
import copy
import gc
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autotune.errors import IllegalConfiguration, first_line_of
from autotune.models import build_model
from autotune.models.kinds import attributes_of, kinds_of
from autotune.models.parts import ModelParts
from autotune.shipped.tiled import feed_forward_of, matrices_of, tile_blocks
from autotune.spec.config import FeedForward, TrainingConfig
from autotune.spec.workload import Workload

_PIECES = (7, 9)
"""Tokens with which a part is tried: those of both pieces at once, then one piece after the other.
Whatever has a period of its own does not end where the first piece does."""
_MOST_DIFFERENCE = 0.001
"""Of the largest number of an output or gradient in float32, which rounding does not reach."""
_MOST_BYTES = 2 * 2**30
"""Of the largest matrix or vector of a part in float32, of which a try takes about two."""
_MOST_OWN_NUMBERS = 2**24
"""Of the weights with random numbers and gradients of their own; the largest ones share numbers."""
_PERIOD = 1_000_003
"""After how many the shared random numbers repeat: a prime, so that no two rows are alike."""
_SHIFT = 16
"""Shared numbers by which the next matrix begins later: kernels want 64 bytes."""


def set_feed_forward(parts: ModelParts, choice: FeedForward) -> None:
    """Computes the feed-forward part of each block in tiles, for the choice `tiled`."""
    if choice == "tiled":
        tile_blocks(parts.blocks, parts.attention_name)


def check_tiles_of(workload: Workload, config: TrainingConfig) -> None:
    """Raises IllegalConfiguration for tiles that the workload's model cannot have.

    A model on the meta device is tried, as in a search: what a trial's own model holds may be
    quantized, divided or fake.
    """
    if config.feed_forward == "tiled":
        with torch.device("meta"):
            parts = build_model(workload)
        check_tiles(parts, config)


def check_tiles(parts: ModelParts, config: TrainingConfig) -> None:
    """Raises IllegalConfiguration for tiles that the model's feed-forward parts cannot have."""
    if config.feed_forward != "tiled":
        return
    reason = why_not(parts) or why_nothing_is_saved(parts, sequence_length=None)
    if reason is not None:
        raise IllegalConfiguration(
            f"feed_forward tiled cannot be applied: {reason}", hint="use another feed_forward"
        )


def why_not(parts: ModelParts) -> str | None:
    """Returns why a model cannot have tiles, by its structure; None if nothing is known."""
    if parts.blocks_owner is None or not _feed_forwards(parts):
        return "no feed-forward part was found in the model's blocks"
    if _gives_router_logits(parts.model):
        return (
            "output_router_logits is on in the model's config, and tiles have logits of their own"
        )
    return None


def _gives_router_logits(model: nn.Module) -> bool:
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(getattr(config, "output_router_logits", None) is True for config in configs)


def why_nothing_is_saved(parts: ModelParts, *, sequence_length: int | None) -> str | None:
    """Returns why tiles would save nothing in a model, or be wrong; None if neither is known.

    How long the sequences of a script are is not known. One part of each kind is tried, with random
    weights of its sizes.
    """
    found = _feed_forwards(parts)
    for part in dict(zip(kinds_of(found), found, strict=True)).values():
        if reason := _why_nothing_is_saved(part, sequence_length=sequence_length):
            return reason
    return None


def _why_nothing_is_saved(part: nn.Module, *, sequence_length: int | None) -> str | None:
    name = type(part).__name__
    if any(isinstance(weight, DTensor) for weight in part.parameters()):
        return (
            f"the weights of {name} are divided over devices (DTensor), and what a part computes "
            "is tried before they are"
        )
    matrices = matrices_of(part)
    if 4 * max(weight.shape[-2:].numel() for weight in part.parameters()) > _MOST_BYTES:
        return f"a matrix of {name} is too large to try what it computes"
    # A layer or a router has its inputs as columns, Conv1D of GPT-2 as rows.
    widths = dict.fromkeys(size for one in matrices for size in reversed(one.shape[-2:]))
    device = torch.device("cpu") if matrices[0].is_meta else matrices[0].device
    drawn = torch.Generator(device).manual_seed(0)
    reasons = []
    own_random = torch.random.fork_rng([] if device.type == "cpu" else [device])
    with torch.device(device), own_random, _whole_products():
        try:
            copied = _with_random_weights(part, drawn)
        except Exception as error:  # any error of what a part holds
            return f"{name} cannot be copied to try it: {first_line_of(error)}"
        for width in widths:
            reason = _why_not_of_width(copied, width, drawn)
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


@contextmanager
def _whole_products() -> Iterator[None]:
    """Computes matrix products of float32 in no fewer bits, whatever the process has set."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # set by `fp32_precision` of a backend, which cannot be set both ways
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# -- what a part computes --------------------------------------------------------------------------

_NO_FUNCTION = "the feed-forward part is not a function of hidden states"


def _why_not_of_width(part: nn.Module, width: int, drawn: torch.Generator) -> str | None:
    """Returns why a part cannot be computed in tiles of hidden states of this width."""
    tokens = sum(_PIECES)
    scales = torch.randn(2, tokens, width, generator=drawn)
    # An expert gets all the tokens of the second sequence, which are the same.
    different, same = (torch.randn(count, width, generator=drawn) for count in (tokens, 1))
    hidden = torch.stack([different, same.expand(tokens, width)])
    effects = _Effects()
    try:
        with torch.enable_grad(), torch.autocast(drawn.device.type, enabled=False), effects:
            reason = _why_not_in_pieces(part, hidden, scales, after_first=effects.forget)
    except Exception as error:  # any error of a part that is called in another way
        return f"{_NO_FUNCTION}: {first_line_of(error)}"
    if reason is None and effects.has_left_any():
        return _changes(part)
    return reason


def _changes(part: nn.Module) -> str:
    return f"{type(part).__name__} keeps or changes values in each call, which each tile would do"


def _why_not_in_pieces(
    part: nn.Module, hidden: Tensor, scales: Tensor, *, after_first: Callable[[], None]
) -> str | None:
    """Returns why two pieces of some tokens do not give what the tokens give at once.

    Raises what the part raises.
    """
    whole = _computed(part, hidden, scales)
    if whole is None:
        return "the feed-forward part does not give hidden states alone"
    after_first()  # a part may keep what it makes once
    objects: dict[Hashable, int] = {}
    values = attributes_of(part, objects)
    pieces = [
        _computed(part, piece.contiguous(), scale)
        for piece, scale in zip(
            hidden.split(_PIECES, dim=1), scales.split(_PIECES, dim=1), strict=True
        )
    ]
    first, second = pieces
    if first is None or second is None:
        return "the feed-forward part does not give hidden states alone"
    joined = [torch.cat(both, dim=1) for both in zip(first[:2], second[:2], strict=True)]
    added = [one + other for one, other in zip(first[2:], second[2:], strict=True)]
    for one, other in zip(whole, [*joined, *added], strict=True):
        if not (one - other).abs().max() <= _MOST_DIFFERENCE * one.abs().max():  # nor NaN
            return (
                f"{type(part).__name__} gives other numbers for a sequence in two pieces: it "
                "computes a token from others, or in few bits"
            )
    return None if attributes_of(part, objects) == values else _changes(part)


def _computed(part: nn.Module, hidden: Tensor, scales: Tensor) -> list[Tensor] | None:
    """Returns the output, and the gradients of its product with `scales`; None if it is another.

    They are those of the hidden states and of the weights that need one.
    """
    hidden = hidden.detach().requires_grad_()
    output = part(hidden)
    if not isinstance(output, Tensor) or output.shape != hidden.shape:
        return None
    weights = [weight for weight in part.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad(
        (output.float() * scales).sum(), [hidden, *weights], materialize_grads=True
    )
    return [output.detach().float(), *gradients]


class _Effects(TorchDispatchMode):
    """Notes what a computation keeps and changes.

    Gives one number for all that is random, and float32 for floats of 16 bits: their rounding is
    more than what a few tokens may get from others.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: set[StorageWeakRef] = set()
        self._has_changed = False

    def forget(self) -> None:
        """Forgets what was kept and changed so far."""
        self._made.clear()
        self._has_changed = False

    def has_left_any(self) -> bool:
        """Returns whether a tensor that was made is there still, or one from before has changed."""
        gc.collect()
        return self._has_changed or any(not one.expired() for one in self._made)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") in (torch.bfloat16, torch.float16):
            kwargs = kwargs | {"dtype": torch.float32}
        given = _storages([args, kwargs])
        arguments = func._schema.arguments
        values = dict(zip((one.name for one in arguments), args, strict=False)) | kwargs
        for one in arguments:
            if one.alias_info is not None and one.alias_info.is_write:
                self._has_changed |= not _storages(values.get(one.name)) <= self._made
        if func.namespace == "aten" and torch.Tag.nondeterministic_seeded in func.tags:
            result = _without_chance(func, args, kwargs, values)
        else:
            result = func(*args, **kwargs)
        self._made |= _storages(result) - given
        return result


_NOT_DRAWN = ("attention", "dropout", "rnn", "rrelu")
"""In names of operators with chance, of which the result is not what was drawn."""


def _without_chance(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], values: dict[str, Any]
) -> Any:
    """Returns what an operator gives that draws numbers, with the same one for each of them.

    `values` are its arguments by name. Attention and recurrent layers keep their dropout.
    """
    name = func.overloadpacket.__name__
    if name.startswith("rrelu"):
        slope = (values.get("lower", 1 / 8) + values.get("upper", 1 / 3)) / 2
        args = (*args[:2], slope, slope, *args[4:])
    result = func(*args, **kwargs)
    if name == "native_dropout":
        return args[0].clone(), torch.ones_like(result[1])
    if name == "randperm":
        return result.copy_(torch.arange(len(result)))
    if any(word in name for word in _NOT_DRAWN):
        return result
    return result.fill_(0.5 if result.is_floating_point() else values.get("low", 0))


def _storages(values: Any) -> set[StorageWeakRef]:
    return {
        StorageWeakRef(one.untyped_storage())
        for one in tree_leaves(values)
        if isinstance(one, Tensor)
    }


# -- weights to try it with ------------------------------------------------------------------------


def _with_random_weights(part: nn.Module, drawn: torch.Generator) -> nn.Module:
    """Returns a copy of a part in training mode, with random weights in float32.

    Matrices of the largest weights share their numbers, which takes the memory of one of them, and
    have no gradients. Weights of another class, as quantized ones, stay.
    """
    held = [
        one for one in tree_leaves([vars(one) for one in part.modules()]) if isinstance(one, Tensor)
    ]
    copies: dict[int, Tensor] = {id(one): _with_numbers(one) for one in held}
    weights = [
        one for one in part.parameters() if type(one) is nn.Parameter and one.is_floating_point()
    ]
    weights.sort(key=lambda one: one.numel())
    numbers = list(itertools.accumulate(weight.numel() for weight in weights))
    first_shared = bisect.bisect_right(numbers, _MOST_OWN_NUMBERS)
    for weight in weights[:first_shared]:
        copies[id(weight)] = nn.Parameter(_random(weight.shape, drawn))
    for weight, view in _views_of_shared(weights[first_shared:], drawn):
        copies[id(weight)] = nn.Parameter(view, requires_grad=False)
    return copy.deepcopy(part, copies).train()


def _with_numbers(tensor: Tensor) -> Tensor:
    """Returns a copy in float32 of what is no weight, with ones where it has no numbers."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    if tensor.is_meta:
        return torch.ones(tensor.shape, dtype=dtype)
    return tensor.detach().to(dtype, copy=True)


def _random(shape: torch.Size, drawn: torch.Generator) -> Tensor:
    if len(shape) < 2:
        return torch.rand(shape, generator=drawn) + 0.5
    return torch.randn(shape, generator=drawn) / math.sqrt(shape[-1])


def _views_of_shared(
    weights: Sequence[nn.Parameter], drawn: torch.Generator
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yields each weight, [..., rows, columns] or [numbers], with a view of what all share.

    Each matrix begins some numbers after the one before.
    """
    if not weights:
        return
    sizes = [weight.shape[-2:].numel() for weight in weights]
    matrices = [weight.numel() // size for weight, size in zip(weights, sizes, strict=True)]
    needed = max(sizes) + _SHIFT * sum(matrices)
    width = min(weight.shape[-1] for weight in weights)
    period = torch.randn(_PERIOD, generator=drawn) / math.sqrt(width)
    shared = period.repeat(math.ceil(needed / _PERIOD))
    begin = 0
    for weight, count in zip(weights, matrices, strict=True):
        rows, columns = weight.shape[-2:] if weight.dim() > 1 else (1, weight.numel())
        strides = (_SHIFT, columns, 1)
        stack = shared.as_strided((count, rows, columns), strides, storage_offset=begin)
        yield weight, stack if weight.dim() == 3 else stack.view(weight.shape)
        begin += _SHIFT * count


def _feed_forwards(parts: ModelParts) -> list[nn.Module]:
    found = (feed_forward_of(block, parts.attention_name) for block in parts.blocks)
    return [part for part in found if part is not None]
