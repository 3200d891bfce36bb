"""From a recording to numbers: the peak, who holds it, and how it came about. Pure functions."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from autotune.memory.recording import Block, Recording
from autotune.spec.prediction import CATEGORIES, Category, Holder, Timeline

HOLDERS_KEPT = 12
TIMELINE_POINTS = 400
"""Most points a timeline keeps: more than a picture can show."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    size_bytes: int
    event: int
    """Number of the event after which it is reached; -1 where nothing exceeds what was alive at the
    start."""
    phase: str
    last_block: Block | None
    """The block whose birth reached it."""
    blocks: tuple[Block, ...]
    """Alive at the peak."""


def find_peak(recording: Recording) -> Peak:
    """The first moment with the most bytes alive."""
    live = peak = sum(block.size_bytes for block in recording.resident)
    peak_event = -1
    for event, (sign, block) in enumerate(recording.events):
        live += sign * block.size_bytes
        if live > peak:
            peak, peak_event = live, event
    last = recording.events[peak_event][1] if peak_event >= 0 else None
    return Peak(
        size_bytes=peak,
        event=peak_event,
        phase=_phase_at(recording, peak_event),
        last_block=last,
        blocks=tuple(_alive_after(recording, peak_event)),
    )


def bytes_by_category(blocks: tuple[Block, ...]) -> dict[Category, int]:
    """Bytes of `blocks` in every category, also those without any."""
    sizes: Counter[Category] = Counter(dict.fromkeys(CATEGORIES, 0))
    for block in blocks:
        sizes[block.category] += block.size_bytes
    return dict(sizes)


def largest_holders(blocks: tuple[Block, ...]) -> tuple[Holder, ...]:
    """`blocks` grouped by category, place and operator; the same place in each block of the model is one place."""
    sizes: Counter[tuple[Category, str, str]] = Counter()
    counts: Counter[tuple[Category, str, str]] = Counter()
    for block in blocks:
        place = (block.category, without_indices(block.module), block.operator)
        sizes[place] += block.size_bytes
        counts[place] += 1
    return tuple(
        Holder(
            category=place[0],
            module=place[1],
            operator=place[2],
            count=counts[place],
            size_bytes=size_bytes,
        )
        for place, size_bytes in sizes.most_common(HOLDERS_KEPT)
        if size_bytes
    )


def without_indices(module: str) -> str:
    """`blocks.*.attention` for `blocks.3.attention`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)


def make_timeline(recording: Recording, peak: Peak) -> Timeline:
    """Live bytes by category over the events, thinned out to the fullest moment of each stretch."""
    stretch = max(1, -(-len(recording.events) // TIMELINE_POINTS))
    live = bytes_by_category(tuple(recording.resident))
    kept: list[tuple[int, dict[Category, int]]] = [(-1, dict(live))]
    fullest: tuple[int, dict[Category, int]] | None = None
    for event, (sign, block) in enumerate(recording.events):
        live[block.category] += sign * block.size_bytes
        if fullest is None or sum(live.values()) > sum(fullest[1].values()):
            fullest = (event, dict(live))
        if (event + 1) % stretch == 0 or event == len(recording.events) - 1:
            kept.append(fullest)
            fullest = None
    return Timeline(
        events=tuple(event for event, _ in kept),
        bytes_by_category={
            category: tuple(sizes[category] for _, sizes in kept) for category in CATEGORIES
        },
        phases=tuple(
            (phase.name, phase.first_event, phase.last_event) for phase in recording.phases
        ),
        peak_event=peak.event,
    )


def _alive_after(recording: Recording, event: int) -> Iterator[Block]:
    for block in [
        *recording.resident,
        *(block for sign, block in recording.events[: event + 1] if sign > 0),
    ]:
        if block.died is None or block.died > event:
            yield block


def _phase_at(recording: Recording, event: int) -> str:
    return next(
        (p.name for p in recording.phases if p.first_event <= event < p.last_event), "between"
    )
