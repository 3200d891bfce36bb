"""Which of many trials the surrogate sees: those near the front, the latest, and of the others evenly spaced ones.

A fit's time grows with the third power of what it sees, so a study of thousands shows it some
hundreds. The expected gain is decided beside the front: by what differs from it in one technique.
The latest are where the search is now, so that each result changes what follows. The others, from
the whole of the study, keep each technique's own effect known.
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
    near: frozenset[str] = frozenset()
    """Fingerprints of the front and of what differs from it in one technique."""

    def places(self, seen: Sequence[TrainingConfig]) -> Sequence[int]:
        """At most `MOST_SEEN` places in `seen`, which is in the order of the study; all of them where there are fewer.

        The evenly spaced come first: by them the scales are found.
        """
        if len(seen) <= MOST_SEEN:
            return range(len(seen))
        backwards = range(len(seen) - 1, -1, -1)
        taken = list(
            islice(
                (place for place in backwards if seen[place].fingerprint in self.near), MOST_NEAR
            )
        )
        is_free = numpy.ones(len(seen), dtype=bool)
        is_free[taken] = False
        latest = numpy.flatnonzero(is_free)[-MOST_LATEST:]
        is_free[latest] = False
        others = numpy.flatnonzero(is_free)
        count = MOST_SEEN - len(taken) - len(latest)
        spaced = others[numpy.arange(count) * len(others) // count]
        return [*spaced.tolist(), *sorted([*taken, *latest.tolist()])]
