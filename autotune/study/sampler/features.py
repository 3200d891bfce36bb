"""Features of configurations: a row of numbers each, one column for each technique."""

import math
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from autotune.spec.config import CHOICES, FIELD_ORDER, WHOLE_NUMBERS, TrainingConfig

Array = NDArray[numpy.float64]

BUDGET = FIELD_ORDER.index("memory_budget")
LOGARITHMIC = tuple(map(FIELD_ORDER.index, WHOLE_NUMBERS))
"""The ordered columns: the budget, and whole numbers given by their logarithms to base 2. The other
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
    for column, field in zip(LOGARITHMIC, WHOLE_NUMBERS, strict=True):
        row[column] = math.log2(values[field])
    return row
