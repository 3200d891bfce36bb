"""Which perplexities count: all but those of adapters over random weights.

Adapters over random, frozen weights take the memory and the time that they take over pretrained
ones, but what they learn says nothing about fine-tuning, and cannot be compared with the perplexity
of full training from scratch either. Such trials are compared in memory and speed only: their
perplexity is neither better nor worse than any other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autotune.spec.result import TrialRecord


def counts(record: TrialRecord, objective: str) -> bool:
    """Returns whether an objective of a trial counts: all do but perplexities that say nothing."""
    return objective != "perplexity" or not record.perplexity_says_nothing


def best_perplexity(records: Iterable[TrialRecord]) -> float | None:
    """Returns the lowest perplexity that counts; None where there is none."""
    counting = (
        record.perplexity
        for record in records
        if record.perplexity is not None and counts(record, "perplexity")
    )
    return min(counting, default=None)


def has_good_perplexity(record: TrialRecord, *, best: float | None, allowed: float) -> bool:
    """Returns whether a perplexity is at most the share `allowed` above the best, if it counts."""
    if best is None or record.perplexity_says_nothing:
        return True
    assert record.perplexity is not None
    return record.perplexity <= best * (1 + allowed)


def with_neutral_perplexities(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Returns the records for a sampler or a hypervolume, which know numbers alone.

    The best perplexity that counts stands for each that says nothing, and 1 where none counts.
    """
    best = best_perplexity(records)
    neutral = []
    for record in records:
        if record.perplexity is not None and record.perplexity_says_nothing:
            neutral.append(replace(record, perplexity=1.0 if best is None else best))
        else:
            neutral.append(record)
    return neutral
