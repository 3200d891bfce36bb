"""Estimated time left for the trials of a search, from the average duration of its latest trials.

The first trials say little of the others: they compile code that later ones find in a cache, and
are trained to the end where later ones share a perplexity. So the average is over the latter half
of the trials that have ended.
"""

from collections.abc import Sequence


def eta_seconds(ended_at: Sequence[float], *, now: float, trials_left: int) -> float | None:
    """Returns the seconds until `trials_left` more trials end; None before the first has ended.

    `trials_left` includes the running trial. `ended_at` holds when this run began, and when each of
    its trials ended, in seconds of any clock.
    """
    if len(ended_at) < 2:
        return None
    if trials_left <= 0:
        return 0.0
    half = (len(ended_at) - 1) // 2
    seconds_per_trial = (ended_at[-1] - ended_at[half]) / (len(ended_at) - 1 - half)
    seconds_since_last = now - ended_at[-1]
    return max(0.0, seconds_per_trial * trials_left - seconds_since_last)
