"""What each technique buys: alone, on top of the others, and over all pairs of trials that differ in nothing else.

Pure functions over records and predictions. Memory is measured where both sides were measured, else
predicted for both; speed and perplexity are measured or not known.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from autotune.spec.config import FIELD_ORDER, Circumstances, TrainingConfig, broken_rules
from autotune.spec.result import TrialRecord

PredictedPeak = Callable[[TrainingConfig], int | None]
Missing = Literal[
    "not tried", "not possible", "not in the pick", "baseline not known", "no pick", "failed"
]


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A configuration with a technique against one without it.

    Shares are of the value without; None: not known.
    """

    with_it: TrainingConfig
    without: TrainingConfig
    with_number: int | None
    without_number: int | None
    saved_bytes: int | None
    saved_share: float | None
    is_predicted: bool
    """Both peaks are predictions."""
    speed_share: float | None
    """0.2: 20 % faster."""
    speed_spread: float | None
    """Of `speed_share`: the two spreads over the steps together."""
    perplexity_share: float | None
    perplexity_spread: float | None


@dataclass(frozen=True, kw_only=True)
class Range:
    """Median and range over pairs."""

    median: float
    lowest: float
    highest: float


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """All pairs of measured trials which differ in this technique only.

    None: no pair has the number on both sides.
    """

    count: int
    saved_bytes: Range | None
    saved_share: Range | None
    speed_share: Range | None
    perplexity_share: Range | None


@dataclass(frozen=True, kw_only=True)
class AblationStep:
    """One value of a technique, in the place of its plain value."""

    technique: str
    value: Any
    plain: Any
    alone: Effect | Missing
    on_top: Effect | Missing
    """In the pick: what would be lost without it."""
    pairs: Pairs


def ladder(
    records: Sequence[TrialRecord],
    *,
    plain: TrainingConfig,
    pick: TrialRecord | None,
    predicted_peak: PredictedPeak,
    at: Circumstances,
) -> tuple[AblationStep, ...]:
    """A rung for every value that was tried and is not that of `plain`, the baseline's configuration."""
    known, measured = _Known(records, predicted_peak), _Measured(records)
    tried: dict[str, list[Any]] = {
        field: sorted(
            {getattr(r.config, field) for r in records} - {getattr(plain, field)},
            key=lambda value: (isinstance(value, str), value),
        )
        for field in FIELD_ORDER
    }

    def legal(config: TrainingConfig) -> bool:
        return not broken_rules(config.to_dict(), at)

    return tuple(
        AblationStep(
            technique=technique,
            value=value,
            plain=getattr(plain, technique),
            alone=_alone(known, plain, technique, value, legal=legal),
            on_top=_on_top(known, plain, pick, technique, value, legal=legal),
            pairs=_pairs(list(measured.pairs(technique, value, plain=plain))),
        )
        for technique, values in tried.items()
        for value in values
    )


def without(config: TrainingConfig, technique: str, *, plain: TrainingConfig) -> TrainingConfig:
    """The same with the plain value of `technique`; a memory budget goes with the compilation it steers."""
    reverted = replace(config, **{technique: getattr(plain, technique)})
    if technique == "compile" and reverted.compile == "none":
        return replace(reverted, memory_budget=1.0)
    return reverted


# -- one against one -------------------------------------------------------------------------------


class _Known:
    """What is known of a configuration: its record, and its peak as measured or predicted."""

    def __init__(self, records: Sequence[TrialRecord], predicted_peak: PredictedPeak) -> None:
        self._by_config = {record.config: record for record in records}
        self._predicted_peak = predicted_peak

    def effect(self, *, with_it: TrainingConfig, without: TrainingConfig) -> Effect | None:
        """None where neither memory nor speed can be compared."""
        one, other = self._by_config.get(with_it), self._by_config.get(without)
        peaks, is_predicted = self._peaks(with_it, without)
        saved = None if peaks is None else peaks[1] - peaks[0]
        speed = _change(one, other, "tokens_per_second")
        if saved is None and speed is None:
            return None
        return Effect(
            with_it=with_it,
            without=without,
            with_number=None if one is None else one.number,
            without_number=None if other is None else other.number,
            saved_bytes=saved,
            saved_share=None if peaks is None or saved is None else saved / peaks[1],
            is_predicted=is_predicted,
            speed_share=speed,
            speed_spread=_spread(one, other, "tokens_per_second"),
            perplexity_share=_change(one, other, "perplexity"),
            perplexity_spread=_spread(one, other, "perplexity"),
        )

    def was_tried(self, config: TrainingConfig) -> bool:
        return config in self._by_config

    def has_numbers(self, config: TrainingConfig) -> bool:
        record = self._by_config.get(config)
        return record is not None and bool(record.peak_memory_bytes or record.tokens_per_second)

    def _peaks(self, *configs: TrainingConfig) -> tuple[list[int] | None, bool]:
        """The peaks and whether they are predicted: never one of each, whose difference would be neither."""
        records = [self._by_config.get(config) for config in configs]
        measured = [
            record.peak_memory_bytes
            for record in records
            if record is not None and record.peak_memory_bytes
        ]
        if len(measured) == len(configs):
            return measured, False
        predicted = [peak for config in configs if (peak := self._peak_ahead(config))]
        return (predicted, True) if len(predicted) == len(configs) else (None, False)

    def _peak_ahead(self, config: TrainingConfig) -> int | None:
        record = self._by_config.get(config)
        return self._predicted_peak(config) or (
            None if record is None else record.predicted_peak_memory_bytes
        )


def _alone(
    known: _Known,
    plain: TrainingConfig,
    technique: str,
    value: Any,
    *,
    legal: Callable[[TrainingConfig], bool],
) -> Effect | Missing:
    changed = replace(plain, **{technique: value})
    if not legal(changed):
        return "not possible"
    effect = known.effect(with_it=changed, without=plain)
    if effect is None and known.has_numbers(changed):
        return "baseline not known"
    return effect or ("failed" if known.was_tried(changed) else "not tried")


def _on_top(
    known: _Known,
    plain: TrainingConfig,
    pick: TrialRecord | None,
    technique: str,
    value: Any,
    *,
    legal: Callable[[TrainingConfig], bool],
) -> Effect | Missing:
    if pick is None:
        return "no pick"
    if getattr(pick.config, technique) != value:
        return "not in the pick"
    reverted = without(pick.config, technique, plain=plain)
    if not legal(reverted):
        return "not possible"
    effect = known.effect(with_it=pick.config, without=reverted)
    return effect or ("failed" if known.was_tried(reverted) else "not tried")


def _change(one: TrialRecord | None, other: TrialRecord | None, number: str) -> float | None:
    """`one` relative to `other`, less 1."""
    if one is None or other is None:
        return None
    new, old = getattr(one, number), getattr(other, number)
    if not new or not old or not math.isfinite(new) or not math.isfinite(old):
        return None
    return float(new / old - 1)


def _spread(one: TrialRecord | None, other: TrialRecord | None, number: str) -> float | None:
    """Of `_change`, from the spreads of both; None where one has none."""
    change = _change(one, other, number)
    if change is None or one is None or other is None:
        return None
    spreads = [getattr(record, f"{number}_spread") for record in (one, other)]
    if None in spreads:
        return None
    relative = [
        spread / getattr(record, number)
        for spread, record in zip(spreads, (one, other), strict=True)
    ]
    return float((1 + change) * math.hypot(*relative))


# -- all pairs -------------------------------------------------------------------------------------


class _Measured:
    """The trials with a measured peak or speed, by their choices: thousands are looked up for every rung."""

    def __init__(self, records: Sequence[TrialRecord]) -> None:
        measured = (
            record for record in records if record.peak_memory_bytes or record.tokens_per_second
        )
        self._by_choices = {_choices(record.config): record for record in measured}

    def pairs(
        self, technique: str, value: Any, *, plain: TrainingConfig
    ) -> Iterator[tuple[TrialRecord, TrialRecord]]:
        """(with it, without it) for each that differs from another in nothing else; see `without`."""
        place = FIELD_ORDER.index(technique)
        for choices, record in self._by_choices.items():
            if choices[place] == value:
                reverted = list(choices)
                reverted[place] = getattr(plain, technique)
                if technique == "compile" and plain.compile == "none":
                    reverted[_BUDGET] = 1.0
                if partner := self._by_choices.get(tuple(reverted)):
                    yield record, partner


_BUDGET = FIELD_ORDER.index("memory_budget")


def _choices(config: TrainingConfig) -> tuple[Any, ...]:
    return tuple(getattr(config, field) for field in FIELD_ORDER)


def _pairs(found: Sequence[tuple[TrialRecord, TrialRecord]]) -> Pairs:
    saved = [
        (other.peak_memory_bytes - one.peak_memory_bytes, other.peak_memory_bytes)
        for one, other in found
        if one.peak_memory_bytes and other.peak_memory_bytes
    ]
    speeds = [_change(one, other, "tokens_per_second") for one, other in found]
    perplexities = [_change(one, other, "perplexity") for one, other in found]
    return Pairs(
        count=len(found),
        saved_bytes=_range([size for size, _ in saved]),
        saved_share=_range([size / of for size, of in saved]),
        speed_share=_range([change for change in speeds if change is not None]),
        perplexity_share=_range([change for change in perplexities if change is not None]),
    )


def _range(values: Sequence[float]) -> Range | None:
    if not values:
        return None
    return Range(median=statistics.median(values), lowest=min(values), highest=max(values))
