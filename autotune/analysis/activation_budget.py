"""Which results of operators each block keeps for its backward pass, so that a peak meets a budget.

The least time is looked for, in two steps, both exact up to rounding of sizes:

1. For one block the choices between time and memory: a knapsack over its operators, each with its
   bytes and the seconds that it takes to run again. Only the choices are left that no other one
   beats in both. To keep everything, without checkpointing, is one of them.
2. For all blocks in the order in which they run, one choice each, by dynamic programming over the
   bytes that are kept so far. What is kept of the blocks before is still there when a block is
   recomputed, and after all of them the loss is computed: each moment leaves them another room.

Pure functions, which know nothing of models. The knapsack over blocks is that of
https://arxiv.org/abs/1604.06174 made finer; `sac_ilp` of torch.distributed solves the same by a
linear program, for shares of modules instead of operators (`studies/activation_budget`).
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy
from numpy.typing import NDArray

Kept = frozenset[tuple[str, int]] | tuple[str, ...]
"""Calls of operators by name, each with its number within the block, whose results are kept; or the
names of parts of the block, of which nothing is (`shipped/granularity.py`)."""

_UNITS = 8192
"""Into so many the room of all blocks together is divided."""
_CHOICES = 160
"""Most choices that are looked at for one block."""
_PARTS = 4
"""Of so many parts of a block, the largest, some may be recomputed whole."""
_UNREACHED = numpy.inf


@dataclass(frozen=True, kw_only=True)
class BlockOperator:
    """An operator in the forward pass of a block."""

    name: str
    number: int
    """Of its calls within the block, from 0 on."""
    size_bytes: int
    """Of the memory that its results allocate."""
    seconds: float
    """For which it runs again."""
    can_be_kept: bool
    """Whether its result can stand in for another run of it."""


@dataclass(frozen=True, kw_only=True)
class BlockPart:
    """A module of the block that may be recomputed as a whole."""

    name: str
    size_bytes: int
    """Of what is saved in it."""
    seconds: float
    """For which it runs again, with what it takes to note what is saved in it."""


@dataclass(frozen=True, kw_only=True)
class BlockTrace:
    """What a block runs."""

    operators: tuple[BlockOperator, ...]
    """Those that run again where the block is recomputed: up to the last result that is saved."""
    saved_bytes: int
    """What is there after the forward pass if nothing is recomputed, but for the block's inputs."""
    seconds_of_choosing: float
    """What it takes to decide, for each operator, whether it runs again."""
    seconds_of_noting: float = 0.0
    """What it takes to note what is saved, where anything of the block runs again."""
    parts: tuple[BlockPart, ...] = ()
    passes: int = 1
    """How many forward passes of it wait for their backward pass at once."""

    @property
    def seconds(self) -> float:
        """What it takes to run all of it again."""
        return self.seconds_of_noting + sum(operator.seconds for operator in self.operators)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The most bytes alive while the same blocks have what they keep."""

    size_bytes: int
    """With every block recomputed."""
    blocks: int
    """How many blocks, the first ones, have what they keep."""


@dataclass(frozen=True)
class Choice:
    """What one block keeps: `kept`, or everything (None), without checkpointing."""

    kept_bytes: int
    seconds: float
    kept: Kept | None


@dataclass(frozen=True, kw_only=True)
class ActivationPlan:
    """A choice for each block."""

    choices: tuple[Choice, ...]

    @property
    def seconds(self) -> float:
        return sum(choice.seconds for choice in self.choices)

    @property
    def kept(self) -> tuple[Kept | None, ...]:
        return tuple(choice.kept for choice in self.choices)


def plan_activations(
    blocks: Sequence[BlockTrace], moments: Sequence[Moment], *, budget_bytes: int
) -> ActivationPlan | None:
    """Returns the plan of least time whose peak is within the budget; None where there is none.

    Each block has its own trace; equal ones are looked at once.
    """
    rooms = [budget_bytes - _most(moments, first=number) for number in range(len(blocks) + 1)]
    if min(rooms) < 0:
        return None
    unit = max(1, -(-max(rooms) // _UNITS))
    seconds = numpy.full(max(rooms) // unit + 1, _UNREACHED)
    seconds[0] = 0.0
    steps: list[tuple[tuple[Choice, ...], NDArray[numpy.int32]]] = []
    for number, block in enumerate(blocks, start=1):
        choices = _choices(block)
        seconds, chosen = _with_block(seconds, choices, unit=unit, passes=block.passes)
        seconds[rooms[number] // unit + 1 :] = _UNREACHED
        steps.append((choices, chosen))
    if not numpy.isfinite(seconds).any():
        return None
    units = int(numpy.argmin(seconds))
    plan: list[Choice] = []
    for (choices, chosen), block in zip(reversed(steps), reversed(blocks), strict=True):
        choice = choices[int(chosen[units])]
        plan.append(choice)
        units -= _units(choice, unit=unit, passes=block.passes)
    return ActivationPlan(choices=tuple(reversed(plan)))


def _most(moments: Sequence[Moment], *, first: int) -> int:
    """Returns the most bytes, without what is kept, while at least the `first` blocks keep it.

    What more blocks keep is at least as much, so that their moments are bounds as well.
    """
    return max((one.size_bytes for one in moments if one.blocks >= first), default=0)


def _with_block(
    seconds: NDArray[numpy.float64], choices: Sequence[Choice], *, unit: int, passes: int
) -> tuple[NDArray[numpy.float64], NDArray[numpy.int32]]:
    """Returns the least seconds by units kept after one more block, and the choices for them."""
    best = numpy.full_like(seconds, _UNREACHED)
    chosen = numpy.zeros(len(seconds), dtype=numpy.int32)
    for index, choice in enumerate(choices):
        shift = _units(choice, unit=unit, passes=passes)
        if shift >= len(seconds):
            continue
        with_choice = seconds[: len(seconds) - shift] + choice.seconds * passes
        is_better = with_choice < best[shift:]
        best[shift:][is_better] = with_choice[is_better]
        chosen[shift:][is_better] = index
    return best, chosen


def _units(choice: Choice, *, unit: int, passes: int) -> int:
    return -(-choice.kept_bytes * passes // unit)


@cache
def _choices(block: BlockTrace) -> tuple[Choice, ...]:
    """Returns the choices for a block that no other one beats in bytes and seconds."""
    everything = Choice(block.saved_bytes, 0.0, None)
    # {operators kept, as bits: (bytes, seconds)}, in ascending order of bytes
    found: list[tuple[int, float, int]] = [(0, block.seconds, 0)]
    limit = block.saved_bytes
    for index, operator in enumerate(block.operators):
        if operator.can_be_kept and 0 < operator.size_bytes < limit and operator.seconds > 0:
            kept = [
                (size + operator.size_bytes, seconds - operator.seconds, bits | 1 << index)
                for size, seconds, bits in found
                if size + operator.size_bytes < limit
            ]
            found = _thinned(_unbeaten([*found, *kept]), limit=limit)
    choices = [
        Choice(
            size,
            seconds + (block.seconds_of_choosing if bits else 0.0),
            frozenset(
                (one.name, one.number)
                for index, one in enumerate(block.operators)
                if bits >> index & 1
            ),
        )
        for size, seconds, bits in found
    ]
    choices += _choices_of_parts(block)
    return (*choices, everything)


def _choices_of_parts(block: BlockTrace) -> Iterator[Choice]:
    """Yields the choices that recompute parts of the block whole: nothing is chosen in these."""
    largest = sorted(block.parts, key=lambda part: -part.size_bytes)[:_PARTS]
    for number in range(1, len(largest) + 1):
        for parts in itertools.combinations(largest, number):
            kept_bytes = block.saved_bytes - sum(part.size_bytes for part in parts)
            seconds = sum(part.seconds for part in parts)
            yield Choice(kept_bytes, seconds, tuple(part.name for part in parts))


def _unbeaten(found: list[tuple[int, float, int]]) -> list[tuple[int, float, int]]:
    kept: list[tuple[int, float, int]] = []
    for one in sorted(found):
        if not kept or one[1] < kept[-1][1]:
            kept.append(one)
    return kept


def _thinned(found: list[tuple[int, float, int]], *, limit: int) -> list[tuple[int, float, int]]:
    """Returns the fastest of those whose bytes are nearly the same, if there are many."""
    if len(found) <= _CHOICES:
        return found
    fastest = {size * _CHOICES // limit: (size, seconds, bits) for size, seconds, bits in found}
    return [found[0], *(one for one in fastest.values() if one is not found[0])]
