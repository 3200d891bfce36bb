"""Selects the trials that a surrogate is fitted to, when a study has thousands of them.

The time of a fit grows with the third power of the number of trials, so a fit uses some hundreds:
those near the front, where the expected hypervolume improvement is decided; the latest, so that
each new result changes the next choice; and trials spaced evenly over the rest of the study, so
that the effect of each technique stays known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy

from autotune.spec.config import TrainingConfig
from autotune.study.sampler.surrogate import MOST_SEEN

MOST_NEAR = MOST_LATEST = MOST_SEEN // 3


@dataclass(frozen=True, kw_only=True)
class TrainingSubset:
    """Selects at most `MOST_SEEN` trials of a study."""

    near: frozenset[str] = frozenset()
    """Fingerprints of the front's configurations and of those one technique away from it."""

    def indices(self, configs: Sequence[TrainingConfig]) -> Sequence[int]:
        """Returns the indices of the selected trials; all indices if there are few enough.

        `configs` are in the order of the study. The evenly spaced trials come first, because the
        scales of the surrogate's kernel are chosen by the first ones.
        """
        if len(configs) <= MOST_SEEN:
            return range(len(configs))
        latest_first = range(len(configs) - 1, -1, -1)
        near_front = (i for i in latest_first if configs[i].fingerprint in self.near)
        near = list(islice(near_front, MOST_NEAR))
        is_left = numpy.ones(len(configs), dtype=bool)
        is_left[near] = False
        latest = numpy.flatnonzero(is_left)[-MOST_LATEST:]
        is_left[latest] = False
        others = numpy.flatnonzero(is_left)
        count = MOST_SEEN - len(near) - len(latest)
        spaced = others[numpy.arange(count) * len(others) // count]
        return [*spaced.tolist(), *sorted([*near, *latest.tolist()])]
