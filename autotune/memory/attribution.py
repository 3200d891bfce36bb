"""Computes the peak of a recording, what holds it, and its timeline. Pure functions."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autotune.memory.recording import Block, Recording
from autotune.spec.prediction import CATEGORIES, Category, Holder, Timeline

MOST_HOLDERS = 12
_OUTSIDE = "between"
"""Where no phase runs."""
TIMELINE_POINTS = 400
"""Most points of a timeline: more than a figure can show."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment of a recording with the most bytes alive."""

    size_bytes: int
    event: int
    """Index of the event that reaches the peak; -1 where what was alive at the start is never
    exceeded."""
    phase: str
    last_block: Block | None
    """The block whose allocation reaches the peak."""
    blocks: tuple[Block, ...]
    """The blocks alive at the peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationSite:
    """A place in the code of a step: it allocates there, in each of its alike layers."""

    phase: str
    module: str
    """Path of the module, with `*` for the numbers of layers."""
    operator: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Maximum:
    """The first moment with the most bytes alive, of those that one place allocates at."""

    size_bytes: int
    event: int


def find_peak(recording: Recording) -> Peak:
    """Returns the first moment with the most bytes alive."""
    live = sum(block.size_bytes for block in recording.resident)
    peak = live
    peak_event = -1
    for event, (sign, block) in enumerate(recording.events):
        live += sign * block.size_bytes
        if live > peak:
            peak, peak_event = live, event
    return peak_at(recording, Maximum(size_bytes=peak, event=peak_event))


def peak_at(recording: Recording, maximum: Maximum) -> Peak:
    """Returns what is alive at a moment of the recording."""
    event = maximum.event
    last = recording.events[event][1] if event >= 0 else None
    return Peak(
        size_bytes=maximum.size_bytes,
        event=event,
        phase=_phase_at(recording, event),
        last_block=last,
        blocks=tuple(_alive_after(recording, event)),
    )


def maximum_by_place(recording: Recording) -> dict[AllocationSite, Maximum]:
    """Returns the most bytes alive after an allocation at each place, and where none has been made.

    The peak of the recording is the largest of them.
    """
    live = sum(block.size_bytes for block in recording.resident)
    start = AllocationSite(phase=_phase_at(recording, -1), module="", operator="")
    found = {start: Maximum(size_bytes=live, event=-1)}
    places: dict[tuple[str, str, str], AllocationSite] = {}
    for event, (sign, block) in enumerate(recording.events):
        live += sign * block.size_bytes
        if sign < 0:
            continue
        key = (block.in_phase, block.module, block.operator)
        if key not in places:
            module = without_indices(block.module)
            phase = block.in_phase or _OUTSIDE
            places[key] = AllocationSite(phase=phase, module=module, operator=block.operator)
        place = places[key]
        if place not in found or live > found[place].size_bytes:
            found[place] = Maximum(size_bytes=live, event=event)
    return found


def bytes_by_category(blocks: tuple[Block, ...]) -> dict[Category, int]:
    """Returns the bytes of `blocks` in every category, 0 included."""
    sizes: Counter[Category] = Counter(dict.fromkeys(CATEGORIES, 0))
    for block in blocks:
        sizes[block.category] += block.size_bytes
    return dict(sizes)


def largest_holders(blocks: tuple[Block, ...]) -> tuple[Holder, ...]:
    """Returns the first of `group_holders`, as many as a table shows."""
    return group_holders(blocks)[:MOST_HOLDERS]


def group_holders(blocks: tuple[Block, ...]) -> tuple[Holder, ...]:
    """Returns `blocks` grouped by category, module and operator, the largest groups first.

    The same module in each layer of the model is one group.
    """
    sizes: Counter[tuple[Category, str, str]] = Counter()
    counts: Counter[tuple[Category, str, str]] = Counter()
    for block in blocks:
        group = (block.category, without_indices(block.module), block.operator)
        sizes[group] += block.size_bytes
        counts[group] += 1
    holders = []
    for group, size_bytes in sizes.items():
        if size_bytes:
            category, module, operator = group
            holders.append(
                Holder(
                    category=category,
                    module=module,
                    operator=operator,
                    count=counts[group],
                    size_bytes=size_bytes,
                )
            )
    return sort_holders(holders)


def sort_holders(holders: Iterable[Holder]) -> tuple[Holder, ...]:
    """Returns the holders, the largest first, and of equal ones in alphabetical order."""
    return tuple(sorted(holders, key=lambda one: (-one.size_bytes, one.module, one.operator)))


def without_indices(module: str) -> str:
    """Returns `blocks.*.attention` for `blocks.3.attention`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)


def make_timeline(recording: Recording, peak: Peak) -> Timeline:
    """Returns the live bytes by category over the events.

    Long recordings are cut into intervals, each represented by its moment with the most bytes.
    """
    interval = max(1, math.ceil(len(recording.events) / TIMELINE_POINTS))
    live = bytes_by_category(tuple(recording.resident))
    points: list[tuple[int, dict[Category, int]]] = [(-1, dict(live))]
    fullest: tuple[int, dict[Category, int]] | None = None
    for event, (sign, block) in enumerate(recording.events):
        live[block.category] += sign * block.size_bytes
        if fullest is None or sum(live.values()) > sum(fullest[1].values()):
            fullest = (event, dict(live))
        if (event + 1) % interval == 0 or event == len(recording.events) - 1:
            points.append(fullest)
            fullest = None
    return Timeline(
        events=tuple(event for event, _ in points),
        bytes_by_category={
            category: tuple(sizes[category] for _, sizes in points) for category in CATEGORIES
        },
        phases=tuple(
            (phase.name, phase.first_event, phase.last_event) for phase in recording.phases
        ),
        peak_event=peak.event,
    )


def _alive_after(recording: Recording, event: int) -> Iterator[Block]:
    allocated = [block for sign, block in recording.events[: event + 1] if sign > 0]
    for block in [*recording.resident, *allocated]:
        if block.died is None or block.died > event:
            yield block


def _phase_at(recording: Recording, event: int) -> str:
    for phase in recording.phases:
        if phase.first_event <= event < phase.last_event:
            return phase.name
    return _OUTSIDE
