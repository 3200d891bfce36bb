"""The time budget of a search: from its command to its end, set-up and confirmation included."""

import math
import time
from dataclasses import dataclass

from autotune.study.request import SearchRequest
from autotune.units import format_duration

_NOTABLE = 0.1
"""The share of the budget from which set-up is worth a sentence."""


@dataclass(frozen=True, kw_only=True)
class TimeBudget:
    """Moments of `time.monotonic()`."""

    trials_until: float = math.inf
    """After it no trial begins, except the first of a study."""
    ends: float = math.inf
    """After it nothing is measured, but a trial or a measurement that has begun ends."""
    setup_note: str = ""
    """What set-up took of it, in a sentence; empty where that is little."""

    @classmethod
    def of(cls, request: SearchRequest, *, began: float, seconds_waited: float) -> "TimeBudget":
        """Returns the budget of a search whose command began at `began`, and which is set up now.

        The `seconds_waited` for a device that another process used do not count. Trials and their
        confirmation share out what set-up has left.
        """
        whole, for_trials = request.time_budget, request.seconds_for_trials
        if whole is None or for_trials is None:
            return cls()
        setup = time.monotonic() - began - seconds_waited
        ends = began + seconds_waited + whole
        note = ""
        if setup > _NOTABLE * whole:
            note = (
                f"set-up took {format_duration(setup)} of the time budget of "
                f"{format_duration(whole)}; autotune search --name continues a study"
            )
        return cls(
            trials_until=ends - max(0.0, whole - setup) * (1.0 - for_trials / whole),
            ends=ends,
            setup_note=note,
        )

    @property
    def seconds_left(self) -> float | None:
        """Until its end from now; None without a budget."""
        return None if math.isinf(self.ends) else max(0.0, self.ends - time.monotonic())

    @property
    def seconds_for_trials(self) -> float | None:
        """For how long trials may begin from now; None without a budget."""
        if math.isinf(self.trials_until):
            return None
        return max(0.0, self.trials_until - time.monotonic())
