"""Time limits of a trial: for the whole, for a pass that compiles, and from one step to the next.

Only the limit of the whole applies to the start (reading weights and text, creating the device's
context, a script's preparations): how long a script reads its data does not show whether it hangs,
and a start that hangs is rare enough to wait for. Reading gradients to compare trainings, about one
second a billion parameters, does not count towards the training's limits: the limit of the whole is
extended by its duration, which itself may not exceed that limit. Nor does the time that a training
waits for its turn (`training/turns.py`), which has no limit here: the search, which knows whose
turn it is, ends one that does not answer (`execution/in_turn.py`).
"""

from dataclasses import dataclass

from autotune.errors import InvalidInput
from autotune.units import LONGEST_SECONDS

COMPILE_SHARE = 1 / 2
STEP_SHARE = 1 / 5

REPORT_SECONDS = 0.1
"""A step that ends sooner than this after the last one that was reported is not reported."""


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """Three independent limits in seconds of wall-clock time.

    Raises InvalidInput for a limit that is not positive, too large or above that of the trial.
    """

    trial_seconds: float
    """From the request to the result."""
    compile_seconds: float
    """For a step or an evaluation batch in which code is compiled."""
    step_seconds: float
    """For every other step or evaluation batch."""

    def __post_init__(self) -> None:
        for name, seconds in (
            ("trial", self.trial_seconds),
            ("compile", self.compile_seconds),
            ("step", self.step_seconds),
        ):
            is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if not is_number or not 0 < seconds < LONGEST_SECONDS:
                raise InvalidInput(
                    f"a {name} time limit of {seconds!r} s is not possible",
                    hint="give a duration above zero, for example 10m",
                )
            if seconds > self.trial_seconds:
                raise InvalidInput(
                    f"a {name} time limit of {seconds:g} s is longer than the whole trial may "
                    f"take, {self.trial_seconds:g} s",
                    hint="raise --trial-time-limit, or choose a shorter one",
                )


def time_limits(
    trial_seconds: float, *, compile_seconds: float | None = None, step_seconds: float | None = None
) -> TimeLimits:
    """Returns the limits; by default, half of the whole for compilation and a fifth for a step.

    Raises InvalidInput.
    """
    if compile_seconds is None:
        compile_seconds = trial_seconds * COMPILE_SHARE
    if step_seconds is None:
        step_seconds = trial_seconds * STEP_SHARE
    return TimeLimits(
        trial_seconds=trial_seconds, compile_seconds=compile_seconds, step_seconds=step_seconds
    )
