"""Measures for how long another process has said nothing, while this one was running itself.

time.monotonic() stands still while the machine is suspended. Where this process was stopped, or
found no processor to run on, the other one may have been as well: of the time between two calls, no
more counts than passes while both run.
"""

import time
from collections.abc import Callable


class Silence:
    """How long nothing was heard. `step_seconds` is how often `seconds` is called at least."""

    def __init__(self, *, step_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._largest_step_seconds = 2 * step_seconds
        self._clock = clock
        self._seconds = 0.0
        self._counted_at = clock()

    def end(self) -> None:
        """Begins again, as something was heard."""
        self._seconds = 0.0
        self._counted_at = self._clock()

    def seconds(self) -> float:
        """Returns the seconds of silence up to now."""
        now = self._clock()
        self._seconds += min(now - self._counted_at, self._largest_step_seconds)
        self._counted_at = now
        return self._seconds
