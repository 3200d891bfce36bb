"""Everything that is known of one trial, as pairs of a name and a text."""

from collections.abc import Iterator
from dataclasses import dataclass

from autotune.analysis.reasons import left_in_16_bits
from autotune.reporting.trial_text import (
    communication_text,
    format_perplexity,
    format_speed,
    perplexity_remarks,
    utilization_sentence,
)
from autotune.spec.config import FIELD_ORDER, TrainingConfig
from autotune.spec.prediction import kept_in_words
from autotune.spec.result import StudyResult, TrialRecord
from autotune.units import format_duration, format_percent, format_size

Facts = tuple[tuple[str, str], ...]


def technique_facts(config: TrainingConfig) -> Facts:
    """Returns the value of each technique."""
    return tuple((field.replace("_", " "), str(getattr(config, field))) for field in FIELD_ORDER)


def measured_facts(result: StudyResult, record: TrialRecord) -> Facts:
    """Returns what was measured of a trial, and what was predicted."""
    return tuple(_measured(result, record))


def memory_facts(record: TrialRecord) -> Facts:
    """Returns what holds the memory at the peak or, where that is not known, in all, largest first.

    Empty where neither was measured.
    """
    sizes = record.peak_bytes_by_category or record.bytes_by_kind or {}
    largest_first = sorted(sizes.items(), key=_smallness)
    return tuple((name.replace("_", " "), format_size(size)) for name, size in largest_first)


def _smallness(entry: tuple[str, int]) -> int:
    return -entry[1]


@dataclass(frozen=True, kw_only=True)
class RankPeak:
    """The peak of one device of a trial that had several."""

    rank: int
    text: str
    share: float
    """Of the largest peak."""
    is_largest: bool


def rank_peaks(record: TrialRecord) -> tuple[RankPeak, ...]:
    """Returns the peak of each device of a trial; empty where it had only one."""
    largest = max(record.peak_memory_bytes_by_rank, default=0)
    return tuple(
        RankPeak(
            rank=rank,
            text=format_size(peak_bytes),
            share=peak_bytes / max(1, largest),
            is_largest=peak_bytes == largest,
        )
        for rank, peak_bytes in enumerate(record.peak_memory_bytes_by_rank)
    )


def _measured(result: StudyResult, record: TrialRecord) -> Iterator[tuple[str, str]]:
    if record.peak_memory_bytes is not None:
        phase = f", in {record.peak_phase}" if record.peak_phase else ""
        yield "peak memory", f"{format_size(record.peak_memory_bytes)}{phase}"
    if record.devices > 1:
        yield "devices", f"{record.devices}, of which the largest peak counts"
    if record.device_bytes is not None:
        share = format_percent(record.device_bytes / result.cap_bytes)
        yield "on the device", f"{format_size(record.device_bytes)}, {share} % of the cap"
    if record.predicted_peak_memory_bytes is not None:
        yield "predicted peak", format_size(record.predicted_peak_memory_bytes)
    if record.tokens_per_second is not None:
        speed = format_speed(record.tokens_per_second, record.tokens_per_second_spread)
        yield record.terms.speed_in_words, speed
    if utilization := utilization_sentence(record, result.device):
        yield "model FLOPs utilization", utilization
    if communication := communication_text(record):
        yield "in collectives", communication
    if record.tokens_per_second_interval is not None:
        low, high = record.tokens_per_second_interval
        yield (
            "speed over further runs",
            f"{low:,.0f} to {high:,.0f} with 95 %, {record.confirmations} measured in turn",
        )
    if record.perplexity is not None:
        remarks = perplexity_remarks(record, result.initial_perplexity)
        yield (
            record.terms.quality,
            f"{format_perplexity(record)}{f' ({remarks})' if remarks else ''}",
        )
    if record.parity is not None:
        detail = f": {record.parity_message}" if record.parity_message else ""
        yield "compared with a plain training", f"{record.parity}{detail}"
    if left := left_in_16_bits(record.unquantized_share):
        yield "weights", left
    if kept := "; ".join(kept_in_words(record.kept)):
        yield "activations", kept
    if record.compile_seconds is not None:
        yield "compiling", format_duration(record.compile_seconds)
    if record.seconds is not None:
        yield "took", format_duration(record.seconds)
    if record.reused_from is not None:
        yield "measured as", str(record.reused_from)
