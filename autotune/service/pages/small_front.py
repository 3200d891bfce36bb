"""The front of a study as a small picture: memory to the right, speed upwards, nothing to read.

A page with ten running searches shows ten of these. They are plain SVG, made from the records on
the server, so that the page needs no drawing library for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.spec.result import StudyResult, TrialRecord
from autotune.units import format_size

WIDTH, HEIGHT = 200, 96
_MARGIN = 8
MOST_DOTS = 150
"""Of the trials that are not on the front; more could not be told apart."""

Dot = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class SmallFront:
    """Positions in a box of `WIDTH` times `HEIGHT`, with y downwards as in SVG."""

    dots: tuple[Dot, ...]
    """Trials that are not on the front."""
    front: tuple[Dot, ...]
    pick: Dot | None
    line: str
    """The stepped line through the front as an SVG path; empty without a front."""
    cap: float | None
    """Where the cap is, in x; None where no trial was measured."""
    alternative: str
    """The picture in words."""


def small_front(result: StudyResult) -> SmallFront:
    """Returns the picture of a study; without any measured trial it has no marks."""
    measured = [record for record in result.trials if _memory(record) and record.tokens_per_second]
    on_front = [record for record in measured if record.number in set(result.front)]
    others = [record for record in measured if record not in on_front]
    every = max(1, -(-len(others) // MOST_DOTS))
    if not measured:
        return SmallFront(
            dots=(), front=(), pick=None, line="", cap=None, alternative=_words(result, measured)
        )
    most_bytes = max(float(result.cap_bytes), *(float(_memory(record)) for record in measured))
    most_speed = max(record.tokens_per_second or 0.0 for record in measured)

    def x_of(size_bytes: float) -> float:
        return round(_MARGIN + (WIDTH - 2 * _MARGIN) * size_bytes / most_bytes, 1)

    def position(record: TrialRecord) -> Dot:
        speed_share = (record.tokens_per_second or 0.0) / most_speed
        y = HEIGHT - _MARGIN - (HEIGHT - 2 * _MARGIN) * speed_share
        return x_of(_memory(record)), round(y, 1)

    front = tuple(sorted(map(position, on_front)))
    pick = None if result.pick is None else result.trial(result.pick.number)
    return SmallFront(
        dots=tuple(map(position, others[::every])),
        front=front,
        pick=None if pick is None or pick not in on_front else position(pick),
        line=_stepped(front),
        cap=x_of(result.cap_bytes),
        alternative=_words(result, measured),
    )


def _memory(record: TrialRecord) -> int:
    """Returns the bytes that are compared with the cap, 0 where they were not measured."""
    return record.device_bytes or record.peak_memory_bytes or 0


def _stepped(front: Sequence[Dot]) -> str:
    """Returns the path through the marks from left to right that are above all before them.

    Marks that are on the front for their perplexity lie below the line.
    """
    path = ""
    highest = float(HEIGHT)
    for x, y in front:
        if y >= highest:
            continue
        path += f"M{x} {y}" if not path else f"H{x}V{y}"
        highest = y
    return path


def _words(result: StudyResult, measured: Sequence[TrialRecord]) -> str:
    if not measured:
        return "No trial has been measured yet."
    count = "1 trial" if len(measured) == 1 else f"{len(measured):,} trials"
    cap = format_size(result.cap_bytes)
    words = f"Memory against speed of {count} under {cap}, {len(result.front)} on the front."
    if result.pick is None:
        return words
    pick = result.trial(result.pick.number)
    size, speed = format_size(_memory(pick)), f"{pick.tokens_per_second or 0:,.0f}"
    return f"{words} The pick, trial {pick.number}, needs {size} at {speed} tokens per second."
