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
    "parity_failed": "another training",
    "diverged": "diverged",
    "timeout": "timeout",
    "crashed": "crashed",
    "interrupted": "interrupted",
}


def outcome_reason(record: TrialRecord) -> str:
    """Return why a trial that is not ok ended as it did; empty where its size says it already."""
    return "" if record.outcome == "over_cap" else record.message


def outcome_counts(records: Sequence[TrialRecord]) -> str:
    """Return the number of trials by outcome: `16 trials: 11 ok, 5 over the cap`."""
    counts: Counter[str] = Counter(record.outcome for record in records)
    parts = [
        f"{counts[outcome]:,} {text}" for outcome, text in OUTCOME_LABELS.items() if counts[outcome]
    ]
    trials = "1 trial" if len(records) == 1 else f"{len(records):,} trials"
    return f"{trials}: {', '.join(parts)}" if parts else trials
