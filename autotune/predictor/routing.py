"""Expected values of integers and booleans that route tokens, where a fake tensor has none.

A model with experts chooses some of them for each token and finds the tokens of an expert by
`nonzero`, by a boolean mask or by counting. How many there are decides the shapes that follow. So
what is known of such tensors is passed on from operator to operator:

| operator | what is known of its result |
|---|---|
| topk, sort or argmax over E numbers | indices below E |
| a comparison of such indices | true for one in E |
| scatter at such indices into zeros | zero but for the share that was chosen, also if scaled |
| scatter at such indices into -inf | -inf but for that share, and zero after softmax |
| any, sum | the expected share or number of true elements |
| nonzero, index by a mask | as many rows as expected: equal parts, tokens x k / E for an expert |

Equal parts are what a trained router aims at. In the other extremes all tokens choose the same
experts, the first of the model or its last: these get every token, the others none, or as few as
one: what is stored for the first is then still in memory when all others have gradients.

What is known of a tensor ends where an operator writes to it in another way.

A mask of which nothing is known, such as that of a causal attention, counts as all true.
"""

import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_aten = torch.ops.aten

CHOOSE = {_aten.topk: 2, _aten.sort: 1, _aten.argsort: 1, _aten.argmax: 1, _aten.argmin: 1}
"""Operators that return indices, with the position of the dimension in their arguments."""
_SAME_ELEMENTS = (
    *(_aten.view, _aten._unsafe_view, _aten.permute, _aten.transpose, _aten.t, _aten.squeeze),
    *(_aten.unsqueeze, _aten.select, _aten.slice, _aten.clone, _aten._to_copy, _aten.detach),
    *(_aten.expand, _aten.alias, _aten.unbind, _aten.split, _aten.index, _aten.index_select),
    *(_aten.reshape, _aten.lift_fresh, _aten.gather, torch.ops.prims.convert_element_type),
)
PASSED_ON = (*_SAME_ELEMENTS, _aten.sum, _aten.scatter)
"""Operators of which something may be known even where they return floating-point numbers."""
_POSITIVE = (_aten.gt, _aten.ne)
_PRODUCTS = (_aten.mul, _aten.mul_)
_SCALED = (*_PRODUCTS, _aten.div, _aten.div_)
"""Operators after which what was not chosen is zero as before."""
_SCATTERS = (_aten.scatter, _aten.scatter_)
_ZEROS = (_aten.zeros, _aten.zeros_like, _aten.new_zeros, _aten.zero_)
_FILLS = {_aten.full: 1, _aten.full_like: 1, _aten.new_full: 2, _aten.fill_: 1}
"""Operators that set all elements to one value, with the value's position in their arguments."""


Parts = Literal["equal", "to the first", "nearly all to the first", "to the last"]
UNEQUAL_PARTS: tuple[Parts, ...] = ("to the first", "nearly all to the first", "to the last")


@dataclass
class Source:
    """One choice of experts for a number of tokens."""

    experts: int
    total: int
    """Pairs of token and expert."""
    tokens: int
    """The most that one expert can get."""
    asked: int = 0
    """How many experts have been given their rows, and how many rows these are."""
    taken: int = 0
    counts: dict[Any, int] = field(default_factory=dict)
    """The number of rows of each expert whose number is known."""


@dataclass(frozen=True)
class Known:
    """What is known of the elements of a tensor."""

    mean: float | None = None
    below: int | None = None
    """Indices: each is below this number, and all are equally likely."""
    source: Source | None = None
    key: Any = None
    """Of a mask for one expert: its number."""
    is_sum: bool = False
    """Of numbers: whether `mean` is the size of each, not the share that is not zero."""
    rest: float = 0.0
    """Of numbers: the value of those that were not chosen."""
    filled: float | None = None
    """The value of all elements, where they are the same."""
    is_of_experts: bool = False
    """Of a mask that has an element for each expert: whether it was chosen at all."""


class Routing:
    """Passes on what is known; counts what routes tokens by it."""

    def __init__(self) -> None:
        self.parts: Parts = "equal"
        """How tokens choose: in equal parts, or all or nearly all of them the same experts."""
        self.was_used = False
        """Whether a number of rows followed from a choice of experts."""
        self.assumed_all = False
        """Whether a mask of which nothing is known was taken as all true."""
        self.unknown_is_all = True
        """Whether such a mask is all true, or all false."""
        self._known: MutableMapping[Tensor, Known] = WeakIdKeyDictionary()
        self._counts: MutableMapping[Tensor, int] = WeakIdKeyDictionary()

    def knows_mean(self, mask: Tensor) -> bool:
        """Returns whether it is known how many elements of a mask are expected to be true."""
        known = self._known.get(mask)
        return known is not None and known.mean is not None

    def rows(self, mask: Tensor) -> int:
        """Returns how many elements of a mask are expected to be true."""
        if mask not in self._counts:
            self._counts[mask] = self._rows(mask)
        return self._counts[mask]

    def _rows(self, mask: Tensor) -> int:
        known = self._known.get(mask)
        if known is None or known.mean is None:
            self.assumed_all = True
            return mask.numel() if self.unknown_is_all else 0
        expected = round(min(1.0, known.mean) * mask.numel())
        if known.source is None:
            return expected
        self.was_used = True
        if known.is_of_experts:
            # A mask may have an element more, for a token that chooses none.
            expected = min(expected, known.source.experts)
            fewest = -(-known.source.total // max(1, known.source.tokens))
            return min(expected, fewest) if self.parts == "to the first" else expected
        return self._share(known, expected, most=min(mask.numel(), known.source.tokens))

    def _share(self, known: Known, expected: int, *, most: int) -> int:
        """Returns the rows of one expert: together they are no more than were chosen."""
        source = known.source
        assert source is not None
        if known.key is not None and known.key in source.counts:
            return source.counts[known.key]
        source.asked += 1
        left = source.total - source.taken
        if self.parts == "to the last":
            expected = max(0, left - (source.experts - source.asked) * most)
        elif self.parts == "to the first":
            expected = most
        elif self.parts == "nearly all to the first":
            expected = max(0, min(most, left - (source.experts - source.asked)))
        share = min(expected, left)
        source.taken += share
        if known.key is not None:
            source.counts[known.key] = share
        return share

    def known(self, tensor: Tensor) -> Known | None:
        """Returns what is known of a tensor."""
        return self._known.get(tensor)

    def note(self, tensor: Tensor, known: Known | None) -> None:
        """Notes what is known of a tensor."""
        if known is not None:
            self._known[tensor] = known

    def value(self, tensor: Tensor) -> int | bool | None:
        """Returns the expected value of a tensor of one element, None where nothing is known."""
        known = self._known.get(tensor)
        if known is not None and known.below is not None:
            # Any expert will do, but the last ones may be without weights.
            return known.below - 1 if self.parts == "to the last" else 0
        if known is None or known.mean is None:
            return None
        if tensor.dtype == torch.bool:
            return known.mean > 0.5
        if tensor.is_floating_point():
            return None
        expected = round(known.mean)
        if known.source is None:
            return expected
        self.was_used = True
        return self._share(known, expected, most=known.source.tokens)

    def bins(self, indices: Tensor, least: int) -> int | None:
        """Returns the number of bins of a count of indices, None where they are not known."""
        known = self._known.get(indices)
        if known is None or known.below is None:
            return None
        return max(known.below, least)

    # -- operator by operator ----------------------------------------------------------------------

    def pass_on(
        self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Notes what is known of the results of an operator."""
        packet = getattr(operator, "overloadpacket", None)
        if packet in CHOOSE:
            self._choose(packet, args, kwargs, result)
            return
        if packet in _ZEROS or packet in _FILLS:
            known = _filled(packet, args, kwargs)
        elif not self._known or not args or isinstance(args[0], int | float):
            return
        else:
            known = self._of_result(packet, args, result)
        self._forget_written(operator, args, kwargs)
        if known is not None:
            for tensor in (result,) if isinstance(result, Tensor) else result or ():
                if isinstance(tensor, Tensor):
                    self._known[tensor] = known

    def _of_result(self, packet: Any, args: Sequence[Any], result: Any) -> Known | None:
        if packet in _SCATTERS:
            return self._scattered(args)
        known = self._known.get(args[0]) if isinstance(args[0], Tensor) else None
        if packet in _PRODUCTS and (known is None or known.mean is None):
            known = self._known.get(args[1]) if isinstance(args[1], Tensor) else None
        if known is None or packet in _SAME_ELEMENTS:
            return known
        return self._computed(packet, known, args, result)

    def _forget_written(
        self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Forgets what was known of tensors that an operator writes to, and of their views."""
        schema = getattr(operator, "_schema", None)
        if schema is None or not schema.is_mutable:
            return
        named = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
        named.update(kwargs)
        for argument in schema.arguments:
            if argument.is_write and isinstance(written := named.get(argument.name), Tensor):
                self._forget(written)

    def _forget(self, written: Tensor) -> None:
        self._known.pop(written, None)
        self._counts.pop(written, None)
        storage = written.untyped_storage()._cdata
        # Only what has a part that was chosen is looked through: it is little.
        for tensor, known in list(self._known.items()):
            if known.source is not None and tensor.untyped_storage()._cdata == storage:
                del self._known[tensor]
                self._counts.pop(tensor, None)

    def _choose(
        self, packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        scores = args[0]
        position = CHOOSE[packet]
        dim = kwargs.get("dim", args[position] if len(args) > position else -1)
        if not scores.is_floating_point() or dim is None or scores.dim() == 0:
            return
        indices = result if isinstance(result, Tensor) else result[1]
        chosen = 1 if packet in (_aten.argmax, _aten.argmin) else indices.shape[dim]
        below = scores.shape[dim]
        tokens = scores.numel() // max(1, below)
        self._known[indices] = Known(
            below=below, source=Source(experts=below, total=tokens * chosen, tokens=tokens)
        )

    def _computed(
        self, packet: Any, known: Known, args: Sequence[Any], result: Any
    ) -> Known | None:
        """Returns what is known of the result of an operator on a known tensor."""
        if packet is _aten.eq and known.below is not None:
            key = args[1] if isinstance(args[1], int) else None
            return Known(mean=1 / known.below, source=known.source, key=key)
        if packet is _aten.bincount:
            share = args[0].numel() / max(1, result.numel())
            return Known(mean=share, source=known.source, is_sum=True)
        if known.mean is None or not isinstance(result, Tensor):
            return None
        is_above = packet is _aten.gt and not isinstance(args[1], Tensor) and args[1] == 0
        if known.rest != 0:
            if packet is _aten._softmax or is_above:
                return replace(known, rest=0.0)
            return None
        reduced = args[0].numel() / max(1, result.numel())
        if packet is _aten.sum:
            return replace(known, mean=known.mean * reduced, is_sum=True)
        if packet in _SCALED and not known.is_sum:
            return known
        if packet is _aten.any:
            return replace(known, mean=min(1.0, known.mean * reduced))
        is_compared = packet in _POSITIVE and not isinstance(args[1], Tensor) and args[1] == 0
        if is_compared and not known.is_sum:
            return known
        if is_compared:
            return Known(
                mean=1.0 if known.mean > 0 else 0.0, source=known.source, is_of_experts=True
            )
        if packet is _aten.nonzero and args[0].dim() == 1:
            most = args[0].numel() if known.source is None else known.source.experts
            return Known(mean=None, below=min(args[0].numel(), most))
        if packet in (_aten.logical_not, _aten.bitwise_not) and result.dtype == torch.bool:
            return Known(mean=1 - known.mean)
        return None

    def _scattered(self, args: Sequence[Any]) -> Known | None:
        """Returns what is known of zeros, or -inf, into which ones or weights were scattered."""
        if len(args) < 4:
            return None
        into, source = self._known.get(args[0]), args[3]
        if into is None or into.filled not in (0.0, -math.inf):
            return None
        if not (source.is_floating_point() if isinstance(source, Tensor) else source == 1):
            return None
        indices = self._known.get(args[2])
        if indices is None or indices.below is None:
            return None
        share = args[2].numel() / max(1, args[0].numel())
        return Known(mean=share, source=indices.source, rest=into.filled)


def _filled(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Known | None:
    """Returns what is known of a tensor that is made, or written, with one value."""
    if packet in _ZEROS:
        return Known(filled=0.0)
    position = _FILLS[packet]
    value = args[position] if len(args) > position else kwargs.get("fill_value")
    return Known(filled=float(value)) if value in (0, -math.inf) else None
