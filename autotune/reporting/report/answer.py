"""The answer of a study in a few words: the pick, and what it saves and costs against the baseline."""

from dataclasses import dataclass

from autotune.analysis.pick import closest_miss, needed_bytes, savings
from autotune.reporting.outcomes import OUTCOME_WORDS
from autotune.reporting.study_view import StudyView
from autotune.reporting.trial_text import described, no_answer, perplexity_source_words, speed_words
from autotune.spec.result import StudyResult, TrialRecord
from autotune.units import format_size


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One number of the answer, large."""

    label: str
    value: str
    change: str
    """Against the baseline; empty where there is nothing to compare with."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    found: bool
    headline: str
    sentence: str
    """What the pick saves and costs; where there is none, what came closest."""
    reason: str
    tiles: tuple[Tile, ...] = ()


def answer_of(view: StudyView) -> Answer:
    if view.pick is not None:
        return _picked(view, view.pick)
    return _nothing(view.result)


def _picked(view: StudyView, pick: TrialRecord) -> Answer:
    assert view.result.pick is not None
    against = savings(pick, view.baseline).removeprefix("; ")
    if against.startswith("against"):
        sentence = f"{against[0].upper()}{against[1:]}."
    elif against:
        sentence = "It is the baseline itself: nothing that was tried does better."
    else:
        sentence = "There is no baseline to compare with: it was neither measured nor predicted."
    reason = view.result.pick.reason
    clauses = [clause for clause in reason.split("; ") if clause != against]
    return Answer(
        found=True,
        headline=f"Train with #{pick.number}, {described(pick)}.",
        sentence=sentence,
        reason=f"It is {'; '.join(clauses)}.",
        tiles=tuple(_tiles(view, pick)),
    )


def _tiles(view: StudyView, pick: TrialRecord) -> list[Tile]:
    assert pick.peak_memory_bytes is not None
    assert pick.tokens_per_second is not None
    assert pick.perplexity is not None
    baseline = None if view.baseline == pick else view.baseline
    peak = (
        None
        if baseline is None
        else baseline.peak_memory_bytes or baseline.predicted_peak_memory_bytes
    )
    source = "" if baseline is None or baseline.peak_memory_bytes else " predicted"
    tiles = [
        Tile(
            label="peak memory",
            value=format_size(pick.peak_memory_bytes),
            change=f"for {format_size(peak)}{source}, {_percent(pick.peak_memory_bytes, peak)}"
            if peak
            else "",
        ),
        Tile(
            label="tokens per second",
            value=speed_words(pick.tokens_per_second, pick.tokens_per_second_spread),
            change="; ".join(
                filter(None, (_speed_change(pick, baseline), _measured_elsewhere(pick)))
            ),
        ),
        Tile(
            label="perplexity",
            value=f"{pick.perplexity:.2f}",
            change="; ".join(
                filter(None, (_perplexity_change(pick, baseline), _source_of_perplexity(pick)))
            ),
        ),
    ]
    cap = format_size(view.result.cap_bytes)
    if pick.device_bytes is not None:
        share = f"{100 * pick.device_bytes / view.result.cap_bytes:.0f} % of {cap}"
        tiles.append(
            Tile(
                label="of the cap",
                value=share,
                change=f"{format_size(pick.device_bytes)} on the device",
            )
        )
    return tiles


def _speed_change(pick: TrialRecord, baseline: TrialRecord | None) -> str:
    return _against(
        pick.tokens_per_second or 0.0,
        None if baseline is None else baseline.tokens_per_second,
        ",.0f",
    )


def _measured_elsewhere(pick: TrialRecord) -> str:
    """An earlier study's; of the three numbers it is the speed that another day changes."""
    return f"measured as {pick.reused_from}" if pick.reused_from else ""


def _perplexity_change(pick: TrialRecord, baseline: TrialRecord | None) -> str:
    return _against(
        pick.perplexity or 0.0, None if baseline is None else baseline.perplexity, ".2f"
    )


def _source_of_perplexity(pick: TrialRecord) -> str:
    """Which trial was trained to the end for this number, or what else it is made of; empty where it was measured."""
    return (pick.perplexity_source or "") if perplexity_source_words(pick) else ""


def _against(value: float, before: float | None, form: str) -> str:
    return f"for {before:{form}}, {_percent(value, before)}" if before else ""


def _percent(value: float, before: float) -> str:
    change = 100 * (value / before - 1)
    if abs(change) < 0.05:
        return "the same"
    return f"{change:+.1f} %" if abs(change) < 10 else f"{change:+.0f} %"


def _nothing(result: StudyResult) -> Answer:
    if not any(record.is_finished for record in result.trials):
        return Answer(found=False, headline=no_answer(result), sentence="", reason="")
    closest = closest_miss(result.trials)
    if closest is None:
        sentence = "No trial got as far as a number of what it needs."
    else:
        needed = format_size(needed_bytes(closest))
        outcome = OUTCOME_WORDS[closest.outcome]
        sentence = (
            f"The closest miss needs {needed}, {outcome}: #{closest.number} {described(closest)}."
        )
    return Answer(
        found=False,
        headline=no_answer(result),
        sentence=sentence,
        reason="Try a larger --max-mem, more --trials, a shorter --seq-len, a smaller --global-batch or a smaller "
        "model.",
    )
