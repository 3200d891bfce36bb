"""Axes of figures: peak memory, device memory, speed and perplexity of a trial."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from autotune.errors import InvalidInput, suggestion
from autotune.reporting.style import Unit, unit_for
from autotune.spec.result import TrialRecord
from autotune.spec.terms import TOKENS, Terms

AxisName = Literal["memory", "device-memory", "speed", "perplexity"]
AXES = get_args(AxisName)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One quantity of a trial as an axis. Values are in the unit of the figure."""

    name: AxisName
    title: str
    is_lower_better: bool
    unit: Unit | None
    """None if the quantity is not a size in bytes."""
    spread_is: str = ""
    """What the error bars of this axis mean."""
    _value: Callable[[TrialRecord], float | None]
    _spread: Callable[[TrialRecord], float | None]

    def of(self, record: TrialRecord) -> float | None:
        """Returns the value of a trial, or None if it was not measured or is not finite."""
        value = self._value(record)
        if value is None or not math.isfinite(value):
            return None
        if value <= 0 and self.title != "loss":  # which may be below zero
            return None
        return value if self.unit is None else self.unit.of(value)

    def spread_of(self, record: TrialRecord) -> float:
        """Returns the spread of the measurement, 0.0 if there is none."""
        return self._spread(record) or 0.0

    def is_better(self, one: float, other: float) -> bool:
        return one < other if self.is_lower_better else one > other


def make_axis(name: str, *, unit: Unit, terms: Terms = TOKENS) -> Axis:
    """Returns the axis of that name, memory in `unit`, speed and perplexity as `terms` call them.

    Raises InvalidInput for an unknown name.
    """
    if name not in AXES:
        raise InvalidInput(
            f"there is no axis {name!r}",
            hint=suggestion(name, AXES, otherwise=f"use one of {', '.join(AXES)}"),
        )
    title, is_lower_better, spread_is, value, spread = _MEASURES[name]  # type: ignore[index]
    title, spread_is = terms.worded(title), terms.worded(spread_is)
    is_memory = name in ("memory", "device-memory")
    return Axis(
        name=name,  # type: ignore[arg-type]
        title=f"{title}, {unit.name}" if is_memory else title,
        is_lower_better=is_lower_better,
        unit=unit if is_memory else None,
        spread_is=spread_is,
        _value=value,
        _spread=spread,
    )


def memory_unit(records: Sequence[TrialRecord], *, cap_bytes: int) -> Unit:
    """Returns the unit that suits the cap or, if that is smaller, the largest trial."""
    largest = max((record.device_bytes or 0 for record in records), default=0)
    return unit_for(min(cap_bytes, largest) if largest else cap_bytes)


def capped_axis(device_type: str) -> AxisName:
    """Returns the axis to which the cap applies.

    On a CPU that is peak memory, on CUDA the memory the device must have, which is more.
    """
    return "device-memory" if device_type == "cuda" else "memory"


_MEASURES: Mapping[
    AxisName,
    tuple[
        str, bool, str, Callable[[TrialRecord], float | None], Callable[[TrialRecord], float | None]
    ],
] = {
    "memory": ("peak memory", True, "", lambda r: r.peak_memory_bytes, lambda r: None),
    "device-memory": (
        "memory the device must have",
        True,
        "",
        lambda r: r.device_bytes,
        lambda r: None,
    ),
    "speed": (
        "tokens per second",
        False,
        "bars of speed: half the interquartile range over the steps, of confirmed trials half the "
        "95 % interval",
        lambda r: r.tokens_per_second,
        lambda r: r.tokens_per_second_spread,
    ),
    "perplexity": (
        "perplexity",
        True,
        "bars of perplexity: standard deviation over the seeds",
        lambda r: r.perplexity and r.terms.value(r.perplexity),
        lambda r: r.perplexity and r.terms.spread(r.perplexity_spread, at=r.perplexity),
    ),
}
