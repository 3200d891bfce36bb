"""What Optuna is told of a record: finite values of the three objectives and how far it is from feasible.

A trial that did not fit is told as complete, with a positive constraint: as failed every sampler
would ignore it and suggest its like again. The values told for what was not measured are for the
sampler only; the record is what is shown.
"""

import math
from dataclasses import dataclass

from autotune.spec.result import TrialRecord

MEMORY_CONSTRAINT = "device_memory"
TRAINING_CONSTRAINT = "training"
_BEYOND = 1.01
"""A refused configuration would have needed at least what it held and asked for, and a little more.
"""


@dataclass(frozen=True, kw_only=True)
class OptunaValues:
    values: tuple[float, float, float]
    """Peak memory in bytes, tokens per second, perplexity: all finite."""
    constraints: dict[str, float]
    """Feasible at or below zero; always the same keys in the same order, as Optuna's GP sampler
    pairs them."""


class ObjectiveEncoder:
    """Makes the observations of a study, one record after the other in the order of their results.

    What was not measured is told as the worst seen until then; a model that has learned nothing has
    a perplexity of `vocab_size`.
    """

    def __init__(self, *, cap_bytes: int, vocab_size: int) -> None:
        self._cap_bytes, self._vocab_size = cap_bytes, vocab_size
        self._slowest: float | None = None
        self._least_sure: float | None = None

    def to_optuna_values(self, record: TrialRecord) -> OptunaValues:
        speed = _finite(record.tokens_per_second, 1.0 if self._slowest is None else self._slowest)
        perplexity = _finite(
            record.perplexity,
            float(self._vocab_size) if self._least_sure is None else self._least_sure,
        )
        needed_bytes = _needed_bytes(record, self._cap_bytes)
        refused = record.outcome in ("out_of_memory", "predicted_over_cap")
        memory = needed_bytes if refused else float(record.peak_memory_bytes or needed_bytes)
        trained = record.outcome in (
            "ok",
            "dominated",
            "over_cap",
            "out_of_memory",
            "predicted_over_cap",
        )
        self._take_down(record)
        constraints = {
            MEMORY_CONSTRAINT: needed_bytes / self._cap_bytes - 1,
            TRAINING_CONSTRAINT: 0.0 if trained else 1.0,
        }
        return OptunaValues(values=(memory, speed, perplexity), constraints=constraints)

    def _take_down(self, record: TrialRecord) -> None:
        if (speed := record.tokens_per_second) is not None and math.isfinite(speed):
            self._slowest = speed if self._slowest is None else min(self._slowest, speed)
        if (perplexity := record.perplexity) is not None and math.isfinite(perplexity):
            self._least_sure = (
                perplexity if self._least_sure is None else max(self._least_sure, perplexity)
            )


def _needed_bytes(record: TrialRecord, cap_bytes: int) -> float:
    """Device memory the configuration needs: measured, or the least it can be after what was refused."""
    if record.device_bytes is not None:
        return float(record.device_bytes)
    if record.outcome in ("out_of_memory", "predicted_over_cap"):
        refused_at = (record.peak_memory_bytes or 0) + (record.requested_bytes or 0)
        return _BEYOND * max(cap_bytes, refused_at, record.predicted_peak_memory_bytes or 0)
    return float(cap_bytes)


def _finite(value: float | None, otherwise: float) -> float:
    return otherwise if value is None or not math.isfinite(value) else value
