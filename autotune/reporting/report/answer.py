"""The headline of a report: the pick, and what it saves and costs against the baseline."""

from dataclasses import dataclass, replace

from autotune.analysis.confirmed_speed import on_one_scale
from autotune.analysis.pick import savings
from autotune.reporting.study_view import StudyView
from autotune.reporting.trial_text import (
    advice_without_pick,
    format_speed,
    format_utilization,
    no_pick_reason,
    trial_label,
    utilization_sentence,
)
from autotune.spec.result import StudyResult, TrialRecord
from autotune.units import format_decimal, format_percent, format_size


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One number of the answer, shown large."""

    label: str
    value: str
    change: str
    """Change against the baseline; empty if there is nothing to compare with."""


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The top of the page: the pick, or why there is none."""

    found: bool
    headline: str
    sentence: str
    """What the pick saves and costs; without a pick, what came closest."""
    reason: str
    tiles: tuple[Tile, ...] = ()


def answer_of(view: StudyView) -> Headline:
    """Returns the answer of a study."""
    if view.pick is not None:
        return _picked(view, view.pick)
    return _nothing(view.result)


def _picked(view: StudyView, pick: TrialRecord) -> Headline:
    assert view.result.pick is not None
    comparison = savings(pick, view.baseline)
    if view.baseline is not None and view.baseline.number == pick.number:
        sentence = "It is the baseline itself: nothing that was tried does better."
    elif comparison:
        sentence = f"{comparison[0].upper()}{comparison[1:]}."
    else:
        sentence = "There is no baseline to compare with: it was neither measured nor predicted."
    headline = f"Train with #{pick.number}, {trial_label(pick)}."
    if doubt := view.result.pick.doubt:
        headline = f"Not to be trusted: train with #{pick.number}, {trial_label(pick)}."
        sentence = f"{doubt[0].upper()}{doubt[1:]}. {sentence}"
    # Comparison and doubt have a sentence of their own.
    reason = replace(view.result.pick, comparison="", doubt="").reason
    return Headline(
        found=True,
        headline=headline,
        sentence=sentence,
        reason=f"It is {reason}.",
        tiles=tuple(_tiles(view, pick)),
    )


def _tiles(view: StudyView, pick: TrialRecord) -> list[Tile]:
    assert pick.peak_memory_bytes is not None
    assert pick.tokens_per_second is not None
    assert pick.perplexity is not None
    baseline = None if view.baseline == pick else view.baseline
    tiles = [
        Tile(
            label="peak memory",
            value=format_size(pick.peak_memory_bytes),
            change=_memory_change(pick.peak_memory_bytes, baseline),
        ),
        Tile(
            label=pick.terms.speed_in_words,
            value=format_speed(pick.tokens_per_second, pick.tokens_per_second_spread),
            change=_joined(_speed_change(pick, baseline), _reuse_note(pick)),
        ),
        Tile(
            label=pick.terms.quality,
            value=pick.terms.text(pick.perplexity),
            change=_joined(_perplexity_change(pick, baseline), _perplexity_source(pick)),
        ),
    ]
    if pick.device_bytes is not None:
        cap = format_size(view.result.cap_bytes)
        share = f"{format_percent(pick.device_bytes / view.result.cap_bytes)} % of {cap}"
        tiles.append(
            Tile(
                label="of the cap",
                value=share,
                change=f"{format_size(pick.device_bytes)} on the device",
            )
        )
    if utilization := format_utilization(pick):
        tiles.append(
            Tile(
                label="model FLOPs utilization",
                value=utilization,
                change=utilization_sentence(pick, view.result.device),
            )
        )
    return tiles


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _memory_change(peak_bytes: int, baseline: TrialRecord | None) -> str:
    if baseline is None:
        return ""
    before = baseline.peak_memory_bytes or baseline.predicted_peak_memory_bytes
    if not before:
        return ""
    source = "" if baseline.peak_memory_bytes else " predicted"
    return f"for {format_size(before)}{source}, {_percent(peak_bytes, before)}"


def _speed_change(pick: TrialRecord, baseline: TrialRecord | None) -> str:
    if baseline is None:
        return ""
    compared, baseline = on_one_scale(pick, baseline)
    before = baseline.tokens_per_second or 0.0
    change = _change(compared.tokens_per_second or 0.0, before, words=f"{before:,.0f}")
    if change and compared.confirmations < pick.confirmations:
        return f"alone {compared.tokens_per_second:,.0f} {change}"
    return change


def _reuse_note(pick: TrialRecord) -> str:
    """Say which earlier trial was measured: speed is the number that differs on another day."""
    return f"measured as {pick.reused_from}" if pick.reused_from else ""


def _perplexity_change(pick: TrialRecord, baseline: TrialRecord | None) -> str:
    if pick.perplexity_says_nothing or baseline is None:
        return ""
    before = baseline.perplexity or 0.0
    if pick.terms.quality == "loss" and before and pick.perplexity:
        change = pick.terms.change(pick.perplexity / before).removeprefix("loss ")
        return f"for {pick.terms.text(before)}, {change or 'the same'}"
    return _change(pick.perplexity or 0.0, before, words=format_decimal(before))


def _perplexity_source(pick: TrialRecord) -> str:
    """Returns where the perplexity comes from, or an empty text if the trial measured it."""
    source = pick.perplexity_source
    if source is None or source.is_plain:
        return ""
    return str(source)


def _change(value: float, before: float, *, words: str) -> str:
    return f"for {words}, {_percent(value, before)}" if before else ""


def _percent(value: float, before: float) -> str:
    change = value / before - 1
    percent = format_percent(change, digits=1 if abs(change) < 0.1 else 0, sign=True)
    return "the same" if percent == "0" else f"{percent} %"


def _nothing(result: StudyResult) -> Headline:
    if not any(record.is_finished for record in result.trials):
        return Headline(found=False, headline=no_pick_reason(result), sentence="", reason="")
    advice = advice_without_pick(result)
    return Headline(
        found=False,
        headline=no_pick_reason(result),
        sentence=advice[0] if advice else "",
        reason=" ".join(advice[1:]),
    )
