"""The order in which the sequences of a study are trained on."""

from collections.abc import Iterator

import numpy
from numpy.typing import NDArray


def training_order(
    *, sequences: int, global_batch: int, seed: int
) -> Iterator[NDArray[numpy.int64]]:
    """Yield global batches of sequence indices without end.

    Each epoch is shuffled anew; an incomplete last batch is dropped.
    """
    generator = numpy.random.default_rng(seed)
    while True:
        order = generator.permutation(sequences)
        for start in range(0, sequences - global_batch + 1, global_batch):
            yield order[start : start + global_batch]
