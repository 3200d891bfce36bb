"""How long a search will still take, judged by the pace of its latest trials.

The first trials are no measure of the others: they compile what later ones find in a cache, and
train to the end what later ones share. So the pace is that of the latter half of the trials ended
so far.
"""

from collections.abc import Sequence


def eta_seconds(ended_at: Sequence[float], *, now: float, trials_left: int) -> float | None:
    """Seconds until `trials_left` more have ended, the running one among them; None before the first has ended.

    `ended_at`: when this run began, and when each of its trials ended, in seconds of any clock.
    """
    if len(ended_at) < 2:
        return None
    half = (len(ended_at) - 1) // 2
    pace = (ended_at[-1] - ended_at[half]) / (len(ended_at) - 1 - half)
    return max(0.0, pace * trials_left - (now - ended_at[-1])) if trials_left > 0 else 0.0
