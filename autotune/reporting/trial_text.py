"""A trial in words: what tables, pages and figures say of one, and the texts that figures show beside a mark."""

from autotune.analysis.pick import savings
from autotune.reporting import style
from autotune.reporting.outcomes import OUTCOME_WORDS
from autotune.spec.result import StudyResult, TrialRecord
from autotune.units import format_size


def described(record: TrialRecord) -> str:
    """Name and choices, as plain text."""
    return (f"{record.name}: " if record.name else "") + record.config.describe()


def speed_words(tokens_per_second: float | None, spread: float | None) -> str:
    """`8,052 ±6%`; empty where it was not measured."""
    if not tokens_per_second:
        return ""
    return f"{tokens_per_second:,.0f} ±{100 * (spread or 0.0) / tokens_per_second:.0f}%"


def perplexity_words(record: TrialRecord) -> str:
    """`=23.91 ±0.05`, with its spread over seeds; `SHARED_MARK` before one that another trial was trained for."""
    if record.perplexity is None:
        return ""
    spread = "" if record.perplexity_spread is None else f" ±{record.perplexity_spread:.2f}"
    return f"{SHARED_MARK if is_shared(record) else ''}{record.perplexity:,.2f}{spread}"


def is_shared(record: TrialRecord) -> bool:
    return (record.perplexity_source or "").startswith("shared")


def perplexity_source_words(record: TrialRecord) -> str:
    """Where its perplexity comes from, for a table; empty where the trial measured it on the held-out text itself."""
    source = record.perplexity_source or ""
    if record.perplexity is None or source in ("", "measured"):
        return ""
    if is_shared(record):
        return f"of {source.removeprefix('shared with ')}"
    return source.removeprefix("measured, ")


SHARED_MARK = "="
SHARED_MARK_SAYS = (
    "= is the perplexity of the trial that was trained to the end for all its numerics"
)
"""What a table with such marks has below or above it."""


def in_words(record: TrialRecord) -> str:
    """How a trial ended that has no speed, as plain text."""
    size = f" at {format_size(record.device_bytes)}" if record.device_bytes else ""
    reason = "" if record.outcome == "over_cap" or not record.message else f" ({record.message})"
    return f"#{record.number} {described(record)}: {OUTCOME_WORDS[record.outcome]}{size}{reason}"


def no_answer(result: StudyResult) -> str:
    """Why there is no pick; empty where there is one."""
    if result.pick is not None:
        return ""
    if not any(record.is_finished for record in result.trials):
        return "No trial has finished yet."
    return f"Nothing that was tried trains under {format_size(result.cap_bytes)}."


def answer_of(result: StudyResult) -> str:
    """The pick and its reason in one sentence."""
    if result.pick is None:
        return no_answer(result)
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
    lines = [f"<b>#{record.number} {style.wrapped(record.name or '', width=_LINE, lines=6)}</b>"]
    lines += [
        f"{field.replace('_', ' ')}: {value}" for field, value in record.config.to_dict().items()
    ]
    lines += _measured(record)
    if against := savings(record, baseline).removeprefix("; "):
        lines.append(style.wrapped(against, width=_LINE))
    return "<br>".join(lines)


def short_hover(record: TrialRecord) -> str:
    """Number and choices on one line, then what was measured: for figures with thousands of marks."""
    return "<br>".join(
        [
            f"<b>#{record.number}</b> {style.wrapped(described(record), width=_LINE, lines=6)}",
            *_measured(record),
        ]
    )


_LINE = 42
"""Letters; a phone has no room for a longer line."""


def _measured(record: TrialRecord) -> list[str]:
    lines = []
    if record.peak_memory_bytes is not None:
        lines.append(
            f"peak memory: {format_size(record.peak_memory_bytes)}, in {record.peak_phase}"
        )
    if record.device_bytes is not None and record.device_bytes != record.peak_memory_bytes:
        lines.append(f"on the device: {format_size(record.device_bytes)}")
    if record.tokens_per_second is not None:
        lines.append(
            f"tokens/s: {speed_words(record.tokens_per_second, record.tokens_per_second_spread)}"
        )
    if record.perplexity is not None:
        source = record.perplexity_source or ""
        spread = "" if record.perplexity_spread is None else f" ±{record.perplexity_spread:.3f}"
        lines.append(
            f"perplexity: {record.perplexity:,.3f}{spread}"
            + (f" ({style.escaped(source)})" if source else "")
        )
    if record.compile_seconds is not None:
        lines.append(f"compiled in {record.compile_seconds:.1f} s")
    if record.reused_from:
        lines.append(style.wrapped(f"measured as {record.reused_from}", width=_LINE, lines=6))
    if record.outcome != "ok":
        said = OUTCOME_WORDS[record.outcome] + (f": {record.message}" if record.message else "")
        lines.append(style.wrapped(said, width=_LINE, lines=6))
    return lines
