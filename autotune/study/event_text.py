"""Texts of a search for terminals, files and notebooks: what it begins with, and its trials."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from autotune.reporting.outcomes import OUTCOME_LABELS
from autotune.reporting.trial_text import format_speed, perplexity_source_text, trial_label
from autotune.spec.result import TrialRecord
from autotune.spec.study import StudyDefinition
from autotune.units import format_duration, format_size

_STUDIES_SHOWN = 3


def opening_lines(
    definition: StudyDefinition,
    *,
    is_new: bool,
    excluded: Sequence[str],
    places: Iterable[str] = (),
    reused: Mapping[str, int] | None = None,
    default_time_budget_seconds: float | None = None,
    seconds_for_trials: float | None = None,
) -> Iterator[str]:
    """Yield what a search is of, under which limits, and what it takes over.

    `reused` has for a new study the number of records reused from each earlier one, newest first.
    """
    verb, device = "Study" if is_new else "Continuing study", definition.device
    training = definition.workload.describe()
    yield f"{verb} {definition.name}: {training}, under {definition.describe_cap()}"
    if names := ", ".join(places):
        yield f"Devices: {names}"
    if line := time_budget_line(default_time_budget_seconds, for_trials=seconds_for_trials):
        yield f"Time: {line}"
    if lines := excluded_lines(excluded):
        yield "Excluded:"
        yield from (f"  {line}" for line in lines)
    if line := reused_line(reused or {}):
        yield line
    if device.others:
        yield f"Warning: {device.device}: {device.others}"
    for note in device.notes:
        yield f"Note: {note}."


def excluded_lines(excluded: Sequence[str]) -> list[str]:
    """Returns one line for each reason, with the values that it excludes, below a heading.

    `Excluded` / `  checkpointing attention, block; compile block: the model has no list of ...`.
    A named configuration whose value has such a line is only counted.
    """
    values: dict[str, dict[str, list[str]]] = {}
    configurations: list[tuple[str, str]] = []
    for line in excluded:
        what, _, reason = line.partition(": ")
        field, _, value = what.partition(" ")
        if field == "configuration":
            configurations.append((what, reason))
        else:
            values.setdefault(reason, {}).setdefault(field, []).append(value)
    lines = [
        "; ".join(f"{field} {', '.join(listed)}" for field, listed in fields.items())
        + f": {reason}"
        for reason, fields in values.items()
    ]
    known = {line for line in excluded if not line.startswith("configuration ")}
    others = [f"{what}: {reason}" for what, reason in configurations if reason not in known]
    lines += others
    counted = len(configurations) - len(others)
    if counted:
        have = "1 configuration has" if counted == 1 else f"{counted} configurations have"
        lines.append(f"{have} one of these")
    return lines


def time_budget_line(seconds: float | None, *, for_trials: float | None) -> str:
    """Returns what a time budget that nobody has given means; empty without one.

    `for_trials` is the part of it in which trials begin.
    """
    if seconds is None or for_trials is None:
        return ""
    line = f"trials begin for at most {format_duration(for_trials)}"
    if for_trials < seconds:
        line += (
            f", which leaves {format_duration(seconds - for_trials)} of {format_duration(seconds)} "
            "to measure the finalists again"
        )
    return (
        f"{line}; --time-budget 1h sets another limit, --time-budget none lifts it, and so does "
        "--trials"
    )


def reused_line(counts: Mapping[str, int]) -> str:
    """Returns which studies results are reused from, or an empty text if none are.

    `Reused    12 results: 9 of study a, 3 of study b; --fresh measures them again`.
    """
    if not counts:
        return ""
    shown = [f"{count} of study {study}" for study, count in list(counts.items())[:_STUDIES_SHOWN]]
    rest = sum(list(counts.values())[_STUDIES_SHOWN:])
    total = sum(counts.values())
    if rest:
        shown.append(f"{rest} of older studies")
    results = "1 result" if total == 1 else f"{total} results"
    return f"Reused    {results}: {', '.join(shown)}; --fresh measures them again"


def record_line(record: TrialRecord) -> str:
    """Returns what was measured of a trial, and its outcome unless it is ok."""
    words = [f"#{record.number} {trial_label(record)}:"]
    if record.peak_memory_bytes is not None:
        words.append(format_size(record.peak_memory_bytes))
    if record.tokens_per_second is not None:
        speed = format_speed(record.tokens_per_second, record.tokens_per_second_spread) or "-"
        words.append(f"{speed} {record.terms.speed}")
    if record.perplexity is not None:
        source = perplexity_source_text(record)
        words.append(f"{record.terms.quality} {record.terms.text(record.perplexity)}")
        if source:
            words.append(f"({source})")
    if record.outcome != "ok":
        words.append(OUTCOME_LABELS[record.outcome])
        if record.message:
            words.append(f"({record.message})")
    return " ".join(words)
