"""Configurations as rows of numbers, one a technique, for arithmetic over thousands of them."""

import math
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from autotune.spec.config import CHOICES, FIELD_ORDER, TrainingConfig

Array = NDArray[numpy.float64]

BUDGET, MICRO_BATCH = FIELD_ORDER.index("memory_budget"), FIELD_ORDER.index("micro_batch_size")
"""The columns whose numbers have an order, a micro batch's in doublings; the others are places in a
list of choices."""
_PLACES = [
    {value: float(place) for place, value in enumerate(CHOICES.get(field, ()))}
    for field in FIELD_ORDER
]


def features_of(configs: Sequence[TrainingConfig]) -> Array:
    """[configuration, technique]."""
    return numpy.array([_row(config) for config in configs], dtype=float).reshape(
        len(configs), len(FIELD_ORDER)
    )


def _row(config: TrainingConfig) -> list[float]:
    values = vars(config)
    row = [
        places.get(values[field], 0.0) for field, places in zip(FIELD_ORDER, _PLACES, strict=True)
    ]
    row[BUDGET], row[MICRO_BATCH] = config.memory_budget, math.log2(config.micro_batch_size)
    return row
