"""A trial in words, for the texts that figures show beside a mark."""

import html

from autotune.quantities import format_size
from autotune.recommendation.pick import savings
from autotune.result import StudyResult, TrialRecord


def described(record: TrialRecord) -> str:
    """Name and choices, as plain text."""
    return (f"{record.name}: " if record.name else "") + record.config.describe()


def in_words(record: TrialRecord) -> str:
    """How a trial ended that has no speed, as plain text."""
    size = f" at {format_size(record.device_bytes)}" if record.device_bytes else ""
    reason = "" if record.outcome == "over_cap" or not record.message else f" ({record.message})"
    return f"#{record.number} {described(record)}: {record.outcome.replace('_', ' ')}{size}{reason}"


def answer_of(result: StudyResult) -> str:
    """The pick and its reason in one sentence."""
    if result.pick is None:
        return f"Nothing that was tried trains under {format_size(result.cap_bytes)}."
    picked = result.trial(result.pick.number)
    return f"Pick: #{picked.number} {described(picked)} - {result.pick.reason}."


def about(result: StudyResult) -> str:
    """Workload, device and torch in one line."""
    workload, device = result.workload, result.device
    return (
        f"{workload.describe()}, {workload.steps} steps, on {device.device} ({device.name}), "
        f"torch {device.versions.get('torch', '?')}"
    )


def full_hover(record: TrialRecord, baseline: TrialRecord | None) -> str:
    """The whole configuration and all that was measured, as HTML lines."""
    lines = [f"<b>#{record.number} {html.escape(record.name or '')}</b>"]
    lines += [f"{field.replace('_', ' ')}: {value}" for field, value in record.config.to_dict().items()]
    lines += _measured(record)
    if against := savings(record, baseline).removeprefix("; "):
        lines.append(against)
    return "<br>".join(lines)


def short_hover(record: TrialRecord) -> str:
    """Number and choices on one line, then what was measured: for figures with thousands of marks."""
    return "<br>".join([f"<b>#{record.number}</b> {html.escape(described(record))}", *_measured(record)])


def _measured(record: TrialRecord) -> list[str]:
    lines = []
    if record.peak_memory_bytes is not None:
        lines.append(f"peak memory: {format_size(record.peak_memory_bytes)}, in {record.peak_phase}")
    if record.device_bytes is not None and record.device_bytes != record.peak_memory_bytes:
        lines.append(f"on the device: {format_size(record.device_bytes)}")
    if record.tokens_per_second is not None:
        spread = record.tokens_per_second_spread or 0.0
        lines.append(f"tokens/s: {record.tokens_per_second:,.0f} ± {spread:,.0f}")
    if record.perplexity is not None:
        source = record.perplexity_source or ""
        lines.append(f"perplexity: {record.perplexity:.3f}" + (f" ({html.escape(source)})" if source else ""))
    if record.compile_seconds is not None:
        lines.append(f"compiled in {record.compile_seconds:.1f} s")
    if record.outcome != "ok":
        lines.append(html.escape(f"{record.outcome.replace('_', ' ')}: {record.message}"))
    return lines
