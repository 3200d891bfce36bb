"""Features of configurations: a row of numbers each, one column for each technique."""

import math
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from autotune.spec.config import CHOICES, FIELD_ORDER, TrainingConfig

Array = NDArray[numpy.float64]

BUDGET, MICRO_BATCH, RANK = map(
    FIELD_ORDER.index, ("memory_budget", "micro_batch_size", "adapter_rank")
)
"""The ordered columns; a micro batch and a rank are given by their logarithms to base 2. The other
columns are categorical: indices into a list of choices."""
_INDICES = [
    {value: float(index) for index, value in enumerate(CHOICES.get(field, ()))}
    for field in FIELD_ORDER
]


def features_of(configs: Sequence[TrainingConfig]) -> Array:
    """Return the features, [configuration, technique]."""
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
    row[MICRO_BATCH] = math.log2(config.micro_batch_size)
    row[RANK] = math.log2(config.adapter_rank)
    return row
