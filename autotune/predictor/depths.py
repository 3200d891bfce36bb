"""Extrapolates the memory of a deep model from two shallower depths, and checks it at a third.

The blocks of a transformer are alike, so that each adds the same bytes wherever in the step it is
looked at: after the same operator, in the same module of any layer, in the same phase, the most
bytes alive are a linear function of the number of layers. Two depths give a line for each such
place, and the highest line at the whole depth is the peak. That may be another place than the one
of the peak at a shallow depth: logits of a large vocabulary are soon overtaken by the optimizer's
step.

Layers that alternate in kind, as local and global attention do, are counted in whole periods, and
so is checkpointing of every second or fourth block. `structure_of` compares every block of the
whole model, on the meta device, so that no pattern is assumed. A third, deeper depth shows how far
the lines are off; the caching allocator's rounding, for example, is not quite linear.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autotune.memory.attribution import (
    MOST_HOLDERS,
    AllocationSite,
    Maximum,
    bytes_by_category,
    group_holders,
    maximum_by_place,
    peak_at,
    sort_holders,
)
from autotune.memory.recording import Block, Recording
from autotune.models import build_model
from autotune.models.kinds import kinds_of
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Category, Holder
from autotune.spec.user_code import takes_size
from autotune.spec.workload import Workload

TOLERANCE = 0.01
"""Largest allowance for the extrapolation's error, as a share of the peak. Above it the model is
predicted at its whole depth."""
_SAFETY = 2
"""The allowance is so many times what the error at the check may grow to."""
_LEAST_ALLOWANCE = 0.005
"""Of the peak, where the check is off at all: what the CUDA allocator rounds up is not linear, and
made errors of up to 0.22 % in `studies/depth_extrapolation/`. Where the check was right to the
byte, so was the extrapolation."""
_FEWEST_LAYERS = 2
"""Of the shallowest depth: a single layer is the first and the last one at once."""
_FEWEST_RECOMPUTED_LAYERS = 4
"""Of the shallowest depth where a whole graph is compiled that recomputes: the order in which the
last and the first two layers are recomputed is another one than between them."""
_COMPILED_CHECK = 6
"""Fewest layers at the check where a whole graph is compiled. torch's partitioner ends chains of
operators that could be fused after 100 of them, and four layers may have fewer. Source:
`ban_if_long_fusible_chains` in torch/_functorch/partitioners.py"""
_WORTHWHILE = 0.7
"""Largest share of the whole depth that the three depths may have together. Above it little time
is saved."""
_RECOMPUTED_BLOCKS = {"every-2": 2, "every-4": 4}
"""Granularities of checkpointing that depend on a block's index, and their period."""


@dataclass(frozen=True, kw_only=True)
class Depths:
    """Numbers of layers: of the two predictions, of the check, and of the whole model."""

    first: int
    second: int
    check: int
    whole: int

    @property
    def predicted(self) -> tuple[int, int, int]:
        return self.first, self.second, self.check


@dataclass(frozen=True, kw_only=True)
class Extrapolated:
    """The peak at the whole depth, by the lines through two depths."""

    place: AllocationSite
    """Where in the step it is."""
    peak_bytes: int
    bytes_by_category: Mapping[Category, int]
    """Their sum is the peak."""
    holders: tuple[Holder, ...]
    check_error_bytes: int
    """How far the lines were from the prediction at the depth of the check."""
    allowance_bytes: int
    """How far the peak may be off by that, with a margin."""

    @property
    def is_trusted(self) -> bool:
        return self.allowance_bytes <= TOLERANCE * self.peak_bytes


# -- which depths ----------------------------------------------------------------------------------


def choose_depths(workload: Workload, config: TrainingConfig) -> Depths | None:
    """Returns the depths to predict, or None where the whole model must be or is as quick."""
    whole = workload.layers
    if whole is None or not takes_size(workload.model, "layers"):
        return None
    if config.checkpointing == "sqrt":
        return None  # the number and the length of its segments are not linear in the depth
    if config.compile == "block":
        return None  # one block is compiled for all, and would be for each depth
    if config.compile == "model" and config.memory_budget != 1.0:
        return None  # the layers that a budget recomputes are chosen among all
    structure = structure_of(workload)
    if structure is None or len(structure.blocks) != whole:
        return None
    pattern = find_pattern(structure.blocks)
    if pattern is None:
        return None
    period = math.lcm(pattern.period, _RECOMPUTED_BLOCKS.get(config.checkpointing, 1))
    fewest, least_check = _FEWEST_LAYERS, 0
    if config.compile == "model":
        least_check = _COMPILED_CHECK
        if config.checkpointing != "none":
            fewest = _FEWEST_RECOMPUTED_LAYERS
    depths = spread_depths(
        whole,
        period=period,
        irregular=pattern.irregular,
        fewest=fewest,
        least_check=least_check,
    )
    if depths is None:
        return None
    for depth in depths.predicted:
        shallow = structure_of(at_depth(workload, depth))
        if shallow is None or shallow.rest != structure.rest:
            return None
        if shallow.blocks != structure.blocks[:depth]:
            return None
    return depths


def deeper_than(depths: Depths) -> Depths | None:
    """Returns the next depths to predict where the first lines of a compiled model are off.

    Inductor orders the operators of a graph in several ways and takes the one that needs the least
    memory. So two or three layers may be an exception, and odd numbers of layers may be on another
    line than even ones. Returns None if the depths that have not been predicted are hardly less
    than the whole.
    """
    period = depths.second - depths.first
    step = 2 * period
    first = depths.first + math.ceil(_FEWEST_LAYERS / period) * period
    first += (depths.whole - first) % step
    deeper = replace(depths, first=first, second=first + step, check=first + 2 * step)
    new = set(deeper.predicted) - set(depths.predicted)
    return deeper if sum(new) <= _WORTHWHILE * depths.whole else None


def at_depth(workload: Workload, layers: int) -> Workload:
    """Returns the workload with another number of layers. Its weights, if any, do not matter."""
    return replace(workload, layers=layers, pretrained=False)


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """How the kinds of layers repeat: after the first `irregular` ones, every `period` layers."""

    irregular: int
    period: int


def find_pattern(kinds: Sequence[Any]) -> Pattern | None:
    """Returns the pattern that the fewest layers show, and that is seen at least twice.

    Returns None if there is none.
    """
    found = []
    for period in range(1, len(kinds) // 2 + 1):
        irregular = len(kinds) - period
        while irregular and kinds[irregular - 1] == kinds[irregular - 1 + period]:
            irregular -= 1
        if irregular + 2 * period <= len(kinds):
            found.append(Pattern(irregular=irregular, period=period))
    return min(found, key=lambda one: (one.irregular + one.period, one.period), default=None)


def spread_depths(
    whole: int,
    *,
    period: int,
    irregular: int = 0,
    fewest: int = _FEWEST_LAYERS,
    least_check: int = 0,
) -> Depths | None:
    """Returns three depths, whole periods apart, that differ from the whole by whole periods.

    The shallowest one has every kind of layer, and `fewest` of those that repeat; the deepest one
    has `least_check` layers or more. Returns None if they are hardly less than the whole.
    """
    first = irregular + max(period, fewest)
    first += (whole - first) % period
    second, check = first + period, first + 2 * period
    while check < least_check:
        check += period
    if first + second + check > _WORTHWHILE * whole:
        return None
    return Depths(first=first, second=second, check=check, whole=whole)


@dataclass(frozen=True, kw_only=True)
class Structure:
    """What a model consists of, in a form that can be compared."""

    blocks: tuple[Any, ...]
    """The kind of each block: equal for alike ones."""
    rest: frozenset[tuple[str, tuple[int, ...]]]
    """Names and shapes of the parameters outside of the blocks."""


def structure_of(workload: Workload) -> Structure | None:
    """Returns the structure of the workload's model; None if it has no list of blocks.

    A kind is that of `kinds_of`, and the entries of the lists in the model's config that have one
    for each layer.
    """
    with torch.device("meta"):
        parts = build_model(workload)
    if parts.blocks_owner is None:
        return None
    blocks = list(parts.blocks)
    entries = _entries_by_layer(parts.model, layers=len(blocks))
    kinds = tuple(zip(kinds_of(blocks), entries, strict=True))
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    rest = frozenset(
        (name, tuple(parameter.shape))
        for name, parameter in parts.model.named_parameters(remove_duplicate=False)
        if id(parameter) not in inside
    )
    return Structure(blocks=kinds, rest=rest)


def _entries_by_layer(model: nn.Module, *, layers: int) -> list[tuple[str, ...]]:
    """Returns, for each layer, its entries in those lists of the configs that have as many."""
    configs = {
        id(config): config
        for config in (getattr(module, "config", None) for module in model.modules())
        if hasattr(config, "__dict__")
    }
    lists = [
        value
        for config in configs.values()
        for value in vars(config).values()
        if isinstance(value, list | tuple) and len(value) == layers
    ]
    return [tuple(repr(values[index]) for values in lists) for index in range(layers)]


# -- extrapolation ---------------------------------------------------------------------------------


def extrapolate(
    depths: Depths, first: Recording, second: Recording, check: Recording
) -> Extrapolated | None:
    """Returns the peak at the whole depth, without the workspaces, which have no layers.

    Returns None if the place of the peak is missing in one of the recordings.
    """
    maxima_first, maxima_second, maxima_check = (
        maximum_by_place(recording) for recording in (first, second, check)
    )
    lines = {
        place: _Line(depths=depths, first=maximum.size_bytes, second=other.size_bytes)
        for place, maximum in maxima_first.items()
        if (other := maxima_second.get(place)) is not None
    }
    highest = max(lines, key=lambda place: lines[place].whole)
    if highest not in maxima_check:
        return None
    # The highest bytes that any place may reach by its own error at the check.
    largest = lines[highest].whole
    for place, line in lines.items():
        if place in maxima_check:
            error = line.error(maxima_check[place].size_bytes)
            largest = max(largest, line.whole + line.grown(error))
    peak_error = abs(
        max(line.check for line in lines.values())
        - max(maximum.size_bytes for maximum in maxima_check.values())
    )
    line = lines[highest]
    check_error = max(line.error(maxima_check[highest].size_bytes), peak_error)
    sizes, holders = _holders_at(
        depths, _alive(first, maxima_first[highest]), _alive(second, maxima_second[highest])
    )
    return Extrapolated(
        place=highest,
        peak_bytes=sum(sizes.values()),
        bytes_by_category=sizes,
        holders=holders,
        check_error_bytes=check_error,
        allowance_bytes=_allowance(
            max(largest - line.whole, line.grown(check_error)), peak_bytes=line.whole
        ),
    )


def _allowance(error_bytes: int, *, peak_bytes: int) -> int:
    if error_bytes == 0:
        return 0
    return max(_SAFETY * error_bytes, round(_LEAST_ALLOWANCE * peak_bytes))


@dataclass(frozen=True, kw_only=True)
class _Line:
    """A line through the values at the first and second depth."""

    depths: Depths
    first: int
    second: int

    @property
    def whole(self) -> int:
        return self._at(self.depths.whole)

    @property
    def check(self) -> int:
        return self._at(self.depths.check)

    def error(self, value_at_check: int) -> int:
        return abs(self.check - value_at_check)

    def grown(self, error: int) -> int:
        """Returns the error at the whole depth, which grows with the distance like a slope's."""
        depths = self.depths
        return math.ceil(error * (depths.whole - depths.second) / (depths.check - depths.second))

    def _at(self, layers: int) -> int:
        rise = self.second - self.first
        run = self.depths.second - self.depths.first
        return self.first + round(rise * (layers - self.depths.first) / run)


def _alive(recording: Recording, maximum: Maximum) -> tuple[Block, ...]:
    return peak_at(recording, maximum).blocks


def _holders_at(
    depths: Depths, first: tuple[Block, ...], second: tuple[Block, ...]
) -> tuple[dict[Category, int], tuple[Holder, ...]]:
    """Returns bytes by category and the holders, the largest first, at the whole depth."""

    def whole(at_first: int, at_second: int) -> int:
        return max(0, _Line(depths=depths, first=at_first, second=at_second).whole)

    sizes_first, sizes_second = bytes_by_category(first), bytes_by_category(second)
    sizes = {name: whole(sizes_first[name], sizes_second[name]) for name in sizes_first}
    groups_first, groups_second = _by_group(group_holders(first)), _by_group(group_holders(second))
    holders = []
    for group in groups_first.keys() | groups_second.keys():
        count_first, size_first = groups_first.get(group, (0, 0))
        count_second, size_second = groups_second.get(group, (0, 0))
        category, module, operator = group
        holder = Holder(
            category=category,
            module=module,
            operator=operator,
            count=whole(count_first, count_second),
            size_bytes=whole(size_first, size_second),
        )
        if holder.count and holder.size_bytes:
            holders.append(holder)
    return sizes, sort_holders(holders)[:MOST_HOLDERS]


_Group = tuple[Category, str, str]


def _by_group(holders: Sequence[Holder]) -> dict[_Group, tuple[int, int]]:
    """Returns count and bytes of the holders by category, module and operator."""
    return {
        (holder.category, holder.module, holder.operator): (holder.count, holder.size_bytes)
        for holder in holders
    }
