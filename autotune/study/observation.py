"""What Optuna is told of a record: finite values of the three objectives and how far it is from feasible.

A trial that did not fit is told as complete, with a positive constraint: as failed every sampler would ignore it and
suggest its like again. The values told for what was not measured are for the sampler only; the record is what is
shown.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from autotune.result import TrialRecord

MEMORY_CONSTRAINT = "device_memory"
TRAINING_CONSTRAINT = "training"
_BEYOND = 1.01
"""A refused configuration would have needed at least what it held and asked for, and a little more."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    values: tuple[float, float, float]
    """Peak memory in bytes, tokens per second, perplexity: all finite."""
    constraints: dict[str, float]
    """Feasible at or below zero; always the same keys in the same order, as Optuna's GP sampler pairs them."""


def observe(record: TrialRecord, earlier: Iterable[TrialRecord], *, cap_bytes: int, vocab_size: int) -> Observation:
    """`earlier` gives the worst values seen; a model that has learned nothing has a perplexity of `vocab_size`."""
    known = list(earlier)
    slowest = min(_all_finite(other.tokens_per_second for other in known), default=1.0)
    least_sure = max(_all_finite(other.perplexity for other in known), default=float(vocab_size))
    needed_bytes = _needed_bytes(record, cap_bytes)
    refused = record.outcome in ("out_of_memory", "predicted_over_cap")
    values = (
        needed_bytes if refused else float(record.peak_memory_bytes or needed_bytes),
        _finite(record.tokens_per_second, slowest),
        _finite(record.perplexity, least_sure),
    )
    trained = record.outcome in ("ok", "dominated", "over_cap", "out_of_memory", "predicted_over_cap")
    constraints = {
        MEMORY_CONSTRAINT: needed_bytes / cap_bytes - 1,
        TRAINING_CONSTRAINT: 0.0 if trained else 1.0,
    }
    return Observation(values=values, constraints=constraints)


def _needed_bytes(record: TrialRecord, cap_bytes: int) -> float:
    """Device memory the configuration needs: measured, or the least it can be after what was refused."""
    if record.device_bytes is not None:
        return float(record.device_bytes)
    if record.outcome in ("out_of_memory", "predicted_over_cap"):
        refused_at = (record.peak_memory_bytes or 0) + (record.requested_bytes or 0)
        return _BEYOND * max(cap_bytes, refused_at, record.predicted_peak_memory_bytes or 0)
    return float(cap_bytes)


def _all_finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _finite(value: float | None, otherwise: float) -> float:
    return otherwise if value is None or not math.isfinite(value) else value
