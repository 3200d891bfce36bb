"""Ablation: the effect of each technique alone, on top of the others, and over all pairs of trials.

A pair is two trials that differ in one technique only. Pure functions over records and predictions.
Memory is measured if both sides were measured, otherwise predicted for both; speed and perplexity
are measured or not known.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from autotune.analysis.confirmed_speed import on_one_scale
from autotune.spec.config import (
    DEPENDENT_FIELDS,
    FIELD_ORDER,
    LegalityContext,
    TrainingConfig,
    reverted,
    rule_violations,
)
from autotune.spec.result import VARIANT_NUMBER, TrialRecord

PredictedPeak = Callable[[TrainingConfig], int | None]
Missing = Literal[
    "not tried", "not possible", "not in the pick", "baseline not known", "no pick", "failed"
]


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A configuration with a technique compared with one without it.

    Shares are relative to the value without the technique; None: not known.
    """

    with_it: TrainingConfig
    without: TrainingConfig
    with_number: int | None
    without_number: int | None
    saved_bytes: int | None
    saved_share: float | None
    is_predicted: bool
    """Whether both peaks are predictions."""
    speed_share: float | None
    """0.2 is 20 % faster."""
    speed_spread: float | None
    """Spread of `speed_share`, from the spreads of both speeds over the steps."""
    perplexity_share: float | None
    perplexity_spread: float | None


@dataclass(frozen=True, kw_only=True)
class Range:
    """Median, lowest and highest value over pairs."""

    median: float
    lowest: float
    highest: float


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """All pairs of measured trials that differ in this technique only.

    None: no pair has the number on both sides.
    """

    count: int
    saved_bytes: Range | None
    saved_share: Range | None
    speed_share: Range | None
    perplexity_share: Range | None


@dataclass(frozen=True, kw_only=True)
class AblationStep:
    """One value of a technique, compared with its plain value."""

    technique: str
    value: Any
    plain: Any
    alone: Effect | Missing
    on_top: Effect | Missing
    """The effect in the pick, compared with the pick without the technique."""
    pairs: Pairs


def ablation_steps(
    records: Sequence[TrialRecord],
    *,
    plain: TrainingConfig,
    pick: TrialRecord | None,
    predicted_peak: PredictedPeak,
    at: LegalityContext,
) -> tuple[AblationStep, ...]:
    """Returns a step for every value that was tried, except those of `plain`, the baseline."""
    known = _Known(records, predicted_peak)
    measured = _Measured(records)

    def legal(config: TrainingConfig) -> bool:
        return not rule_violations(config.to_dict(), at)

    steps = []
    for technique in FIELD_ORDER:
        plain_value = getattr(plain, technique)
        tried = {getattr(record.config, technique) for record in records} - {plain_value}
        # Numbers before text, each in order.
        for value in sorted(tried, key=lambda value: (isinstance(value, str), value)):
            steps.append(
                AblationStep(
                    technique=technique,
                    value=value,
                    plain=plain_value,
                    alone=_alone(known, plain, technique, value, legal=legal),
                    on_top=_on_top(known, plain, pick, technique, value, legal=legal),
                    pairs=_pairs(list(measured.pairs(technique, value, plain=plain))),
                )
            )
    return tuple(steps)


# -- one pair --------------------------------------------------------------------------------------


class _Known:
    """The record of each configuration, and its peak, measured or predicted."""

    def __init__(self, records: Sequence[TrialRecord], predicted_peak: PredictedPeak) -> None:
        self._by_config = {record.config: record for record in records}
        self._predicted_peak = predicted_peak

    def effect(self, *, with_it: TrainingConfig, without: TrainingConfig) -> Effect | None:
        """Returns the effect; None if neither memory nor speed can be compared."""
        new = self._by_config.get(with_it)
        old = self._by_config.get(without)
        peaks, is_predicted = self._peaks(with_it, without)
        saved: int | None = None
        saved_share: float | None = None
        if peaks is not None:
            saved = peaks[1] - peaks[0]
            saved_share = saved / peaks[1]
        speed = _change(new, old, "tokens_per_second")
        if saved is None and speed is None:
            return None
        return Effect(
            with_it=with_it,
            without=without,
            with_number=_number(new),
            without_number=_number(old),
            saved_bytes=saved,
            saved_share=saved_share,
            is_predicted=is_predicted,
            speed_share=speed,
            speed_spread=_spread(new, old, "tokens_per_second"),
            perplexity_share=_change(new, old, "perplexity"),
            perplexity_spread=_spread(new, old, "perplexity"),
        )

    def was_tried(self, config: TrainingConfig) -> bool:
        return config in self._by_config

    def has_numbers(self, config: TrainingConfig) -> bool:
        record = self._by_config.get(config)
        return record is not None and bool(record.peak_memory_bytes or record.tokens_per_second)

    def _peaks(self, *configs: TrainingConfig) -> tuple[list[int] | None, bool]:
        """Returns the peaks, and whether they are predicted; None if any is not known.

        All are measured or all are predicted: the difference of a measured and a predicted peak
        would be neither.
        """
        measured = []
        for config in configs:
            record = self._by_config.get(config)
            if record is not None and record.peak_memory_bytes:
                measured.append(record.peak_memory_bytes)
        if len(measured) == len(configs):
            return measured, False
        predicted = []
        for config in configs:
            if peak := self._prediction_of(config):
                predicted.append(peak)
        if len(predicted) == len(configs):
            return predicted, True
        return None, False

    def _prediction_of(self, config: TrainingConfig) -> int | None:
        predicted = self._predicted_peak(config)
        record = self._by_config.get(config)
        if not predicted and record is not None:
            predicted = record.predicted_peak_memory_bytes
        return predicted


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
    if effect is not None:
        return effect
    if known.has_numbers(changed):
        return "baseline not known"
    return "failed" if known.was_tried(changed) else "not tried"


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
    without = reverted(pick.config, technique, plain=plain)
    if not legal(without):
        return "not possible"
    effect = known.effect(with_it=pick.config, without=without)
    if effect is not None:
        return effect
    return "failed" if known.was_tried(without) else "not tried"


def _number(record: TrialRecord | None) -> int | None:
    """Returns the number of a trial; None for a variant of the pick, which is no trial."""
    if record is None or record.number == VARIANT_NUMBER:
        return None
    return record.number


def _change(new: TrialRecord | None, old: TrialRecord | None, number: str) -> float | None:
    """Returns new / old - 1 of a number of two records; None if one has not the number."""
    if new is None or old is None:
        return None
    new, old = on_one_scale(new, old)
    if number == "perplexity" and (new.perplexity_says_nothing or old.perplexity_says_nothing):
        return None
    new_value = getattr(new, number)
    old_value = getattr(old, number)
    if not new_value or not old_value:
        return None
    if not math.isfinite(new_value) or not math.isfinite(old_value):
        return None
    return float(new_value / old_value - 1)


def _spread(new: TrialRecord | None, old: TrialRecord | None, number: str) -> float | None:
    """Returns the spread of `_change` from the spreads of both; None if one has no spread.

    The relative spreads of a quotient add as squares: new / old * hypot(spread of new / new, spread
    of old / old).
    """
    change = _change(new, old, number)
    if change is None or new is None or old is None:
        return None
    new, old = on_one_scale(new, old)
    new_spread = getattr(new, f"{number}_spread")
    old_spread = getattr(old, f"{number}_spread")
    if new_spread is None or old_spread is None:
        return None
    relative = math.hypot(new_spread / getattr(new, number), old_spread / getattr(old, number))
    return float((1 + change) * relative)


# -- all pairs -------------------------------------------------------------------------------------


class _Measured:
    """The trials with a measured peak or speed, by a tuple of their choices.

    Tuples are faster to compare than configurations, and thousands are looked up for every step.
    """

    def __init__(self, records: Sequence[TrialRecord]) -> None:
        self._by_choices = {
            _choices(record.config): record
            for record in records
            if record.peak_memory_bytes or record.tokens_per_second
        }

    def pairs(
        self, technique: str, value: Any, *, plain: TrainingConfig
    ) -> Iterator[tuple[TrialRecord, TrialRecord]]:
        """Yield (with the technique, without it) for trials that differ in nothing else.

        What "without" means is defined by `spec/config.py: reverted`.
        """
        index = FIELD_ORDER.index(technique)
        plain_value = getattr(plain, technique)
        changes = {index: plain_value}
        if plain_value == "none":
            for field in DEPENDENT_FIELDS.get(technique, ()):
                changes[FIELD_ORDER.index(field)] = getattr(TrainingConfig(), field)
        for choices, record in self._by_choices.items():
            if choices[index] == value:
                without = list(choices)
                for position, changed in changes.items():
                    without[position] = changed
                if partner := self._by_choices.get(tuple(without)):
                    yield record, partner


def _choices(config: TrainingConfig) -> tuple[Any, ...]:
    return tuple(getattr(config, field) for field in FIELD_ORDER)


def _pairs(found: Sequence[tuple[TrialRecord, TrialRecord]]) -> Pairs:
    saved_bytes = []
    saved_shares = []
    for new, old in found:
        if new.peak_memory_bytes and old.peak_memory_bytes:
            saved = old.peak_memory_bytes - new.peak_memory_bytes
            saved_bytes.append(saved)
            saved_shares.append(saved / old.peak_memory_bytes)
    speeds = [_change(new, old, "tokens_per_second") for new, old in found]
    perplexities = [_change(new, old, "perplexity") for new, old in found]
    return Pairs(
        count=len(found),
        saved_bytes=_range(saved_bytes),
        saved_share=_range(saved_shares),
        speed_share=_range([change for change in speeds if change is not None]),
        perplexity_share=_range([change for change in perplexities if change is not None]),
    )


def _range(values: Sequence[float]) -> Range | None:
    if not values:
        return None
    return Range(median=statistics.median(values), lowest=min(values), highest=max(values))
