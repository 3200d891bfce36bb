"""Features of configurations: a row of numbers each, one column for each technique."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from autotune.analysis.expected_step import ExpectedStep
from autotune.spec.config import CHOICES, FIELD_ORDER, WHOLE_NUMBERS, TrainingConfig
from autotune.spec.setting import NO_LIMIT
from autotune.units import parse_size

Array = NDArray[numpy.float64]

BUDGET = FIELD_ORDER.index("memory_budget")
BYTE_BUDGET = FIELD_ORDER.index("activation_budget")
_NO_BUDGET = 40.0
"""Stands for the logarithm of an activation budget where there is none: that of 1 TiB."""
LOGARITHMIC = tuple(map(FIELD_ORDER.index, WHOLE_NUMBERS))
"""The ordered columns: the budgets, and whole numbers given by their logarithms to base 2. The
other columns are categorical: indices into a list of choices."""
_INDICES = [
    {value: float(index) for index, value in enumerate(CHOICES.get(field, ()))}
    for field in FIELD_ORDER
]


EXPECTATION = len(FIELD_ORDER)
"""A further column, where something is known beforehand: the expected logarithm."""

_WEIGHTS = {
    "precision": 2.0,
    "activation_offload": 2.0,
    "offload": 2.0,
    "micro_batch_size": 1.5,
    "optimizer_fusion": 0.5,
    "loss": 0.3,
    "allocator": 0.05,
}
TECHNIQUE_WEIGHTS = numpy.array([_WEIGHTS.get(field, 1.0) for field in FIELD_ORDER])
"""How far the effect of each technique may be from what is expected of it, relative to another."""


def with_expectation(features: Array, logarithms: Array) -> Array:
    """Returns the features with the logarithm that is expected of each row."""
    return numpy.concatenate([features[:, :EXPECTATION], logarithms[:, None]], axis=1)


def features_of(configs: Sequence[TrainingConfig]) -> Array:
    """Returns the features, [configuration, technique]."""
    return numpy.array([_row(config) for config in configs], dtype=float).reshape(
        len(configs), len(FIELD_ORDER)
    )


def _row(config: TrainingConfig) -> list[float]:
    values = vars(config)
    row = [
        indices.get(values[field], 0.0)
        for field, indices in zip(FIELD_ORDER, _INDICES, strict=True)
    ]
    row[BUDGET] = config.memory_budget
    row[BYTE_BUDGET] = _NO_BUDGET
    if config.activation_budget != NO_LIMIT:
        row[BYTE_BUDGET] = math.log2(parse_size(config.activation_budget))
    for column, field in zip(LOGARITHMIC, WHOLE_NUMBERS, strict=True):
        row[column] = math.log2(values[field])
    return row


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Configurations, and their features in the same order."""

    configs: Sequence[TrainingConfig]
    features: Array
    for_speed: Array
    for_memory: Array
    """The same, with what is expected of speed or memory where it is known."""

    @classmethod
    def of(
        cls, configs: Sequence[TrainingConfig], *, expected: ExpectedStep | None = None
    ) -> "Candidates":
        features = for_speed = for_memory = features_of(configs)
        if expected is not None:
            speeds = numpy.array([expected.logarithm_of_speed(config) for config in configs])
            peaks = numpy.array([expected.logarithm_of_peak(config) for config in configs])
            for_speed = with_expectation(features, speeds)
            for_memory = with_expectation(features, peaks)
        return cls(configs=configs, features=features, for_speed=for_speed, for_memory=for_memory)

    def at(self, indices: Sequence[int]) -> "Candidates":
        return Candidates(
            configs=[self.configs[index] for index in indices],
            features=self.features[indices],
            for_speed=self.for_speed[indices],
            for_memory=self.for_memory[indices],
        )

    @classmethod
    def joined(cls, parts: Sequence["Candidates"]) -> "Candidates":
        return cls(
            configs=[config for part in parts for config in part.configs],
            features=numpy.concatenate([part.features for part in parts]),
            for_speed=numpy.concatenate([part.for_speed for part in parts]),
            for_memory=numpy.concatenate([part.for_memory for part in parts]),
        )
