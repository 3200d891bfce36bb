"""Converts a trial's record to Optuna's values: three finite objectives, and constraints.

A trial that did not fit is a complete trial with a positive constraint: samplers ignore failed
trials, and would suggest similar configurations again. The values that stand for what was not
measured are for the sampler only; reports show the record.
"""

import math
from dataclasses import dataclass

from autotune.analysis.feasibility import needed_bytes
from autotune.spec.result import TrialRecord

MEMORY_CONSTRAINT = "device_memory"
TRAINING_CONSTRAINT = "training"


@dataclass(frozen=True, kw_only=True)
class OptunaValues:
    """What a sampler is told of a trial."""

    values: tuple[float, float, float]
    """Peak memory in bytes, tokens per second, perplexity: all finite."""
    constraints: dict[str, float]
    """Feasible at or below zero. Always the same keys in the same order, because Optuna's GP
    sampler pairs them by position."""


def constraints_of(record: TrialRecord, *, cap_bytes: int) -> dict[str, float]:
    """Returns the constraints of a trial, each feasible at or below zero.

    The first is the memory over the cap, relative to it, so that both are of one size.
    """
    return {
        MEMORY_CONSTRAINT: needed_bytes(record, limit_bytes=cap_bytes) / cap_bytes - 1,
        TRAINING_CONSTRAINT: 1.0 if record.failed or not record.is_finished else 0.0,
    }


class ObjectiveEncoder:
    """Converts the records of a study, which must come in the order of their results.

    What was not measured gets the worst value so far. Until there is one, speed is 1 token per
    second and perplexity `vocab_size`, that of a model that has learned nothing. A perplexity that
    says nothing is 1 for all, so that memory and speed decide.
    """

    def __init__(self, *, cap_bytes: int, vocab_size: int) -> None:
        self._cap_bytes = cap_bytes
        self._vocab_size = vocab_size
        self._worst_speed: float | None = None
        self._worst_perplexity: float | None = None

    def to_optuna_values(self, record: TrialRecord) -> OptunaValues:
        speed = record.tokens_per_second
        if speed is None or not math.isfinite(speed):
            speed = 1.0 if self._worst_speed is None else self._worst_speed
        perplexity = 1.0 if record.perplexity_says_nothing else record.perplexity
        if perplexity is None or not math.isfinite(perplexity):
            perplexity = self._worst_perplexity
            if perplexity is None:
                perplexity = float(self._vocab_size)
        needed = needed_bytes(record, limit_bytes=self._cap_bytes)
        memory = needed
        if record.was_trained:
            memory = float(record.peak_memory_bytes or needed)
        self._note_worst(record)
        constraints = constraints_of(record, cap_bytes=self._cap_bytes)
        return OptunaValues(values=(memory, speed, perplexity), constraints=constraints)

    def _note_worst(self, record: TrialRecord) -> None:
        speed = record.tokens_per_second
        if speed is not None and math.isfinite(speed):
            worst = speed if self._worst_speed is None else self._worst_speed
            self._worst_speed = min(worst, speed)
        perplexity = record.perplexity
        if record.perplexity_says_nothing:
            return
        if perplexity is not None and math.isfinite(perplexity):
            worst = perplexity if self._worst_perplexity is None else self._worst_perplexity
            self._worst_perplexity = max(worst, perplexity)
