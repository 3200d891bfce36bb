"""Outcomes of trials as text, for tables, figures and reports."""

from collections import Counter
from collections.abc import Mapping, Sequence

from autotune.spec.result import Outcome, TrialRecord

OUTCOME_LABELS: Mapping[Outcome, str] = {
    "ok": "ok",
    "dominated": "dominated",
    "out_of_memory": "out of memory",
    "over_cap": "over the cap",
    "predicted_over_cap": "predicted over the cap",
    "parity_failed": "parity failed",
    "diverged": "diverged",
    "timeout": "timeout",
    "crashed": "crashed",
    "interrupted": "interrupted",
}


def outcome_label(record: TrialRecord) -> str:
    """Returns how the trial ended as text, or `running` while a process works on it."""
    return "running" if record.is_running else OUTCOME_LABELS[record.outcome]


def outcome_reason(record: TrialRecord) -> str:
    """Returns why a trial that is not ok ended as it did; empty where its size says it already."""
    return "" if record.outcome == "over_cap" or record.is_running else record.message


def outcome_counts(records: Sequence[TrialRecord]) -> str:
    """Returns the number of trials by outcome: `16 trials: 11 ok, 5 over the cap`."""
    counts: Counter[str] = Counter(outcome_label(record) for record in records)
    labels = (*OUTCOME_LABELS.values(), "running")
    parts = [f"{counts[label]:,} {label}" for label in labels if counts[label]]
    trials = "1 trial" if len(records) == 1 else f"{len(records):,} trials"
    return f"{trials}: {', '.join(parts)}" if parts else trials
