"""How trials ended, in words: one place for tables, pictures and reports."""

from collections import Counter
from collections.abc import Mapping, Sequence

from autotune.spec.result import Outcome, TrialRecord

OUTCOME_WORDS: Mapping[Outcome, str] = {
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


def outcome_counts(records: Sequence[TrialRecord]) -> str:
    """`16 trials: 11 ok, 5 over the cap`."""
    counts: Counter[str] = Counter(record.outcome for record in records)
    words = ", ".join(
        f"{counts[outcome]:,} {word}" for outcome, word in OUTCOME_WORDS.items() if counts[outcome]
    )
    trials = f"{len(records):,} trial{'' if len(records) == 1 else 's'}"
    return f"{trials}: {words}" if words else trials
