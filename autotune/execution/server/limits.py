"""How long a trial may take: as a whole, for a pass that compiles, and from one finished step to the next.

Starting (reading weights and text, the device's context, a script's own preparations) is under the
limit of the whole only: how long a script reads its data says nothing about whether it hangs, and a
hung start is rare enough to be waited for. Reading gradients to compare trainings, about one second
a billion parameters, is under no limit of the training's: the limit of the whole goes on when it
has ended, and it may itself take no longer than that.
"""

from dataclasses import dataclass

from autotune.errors import InvalidInput
from autotune.units import LONGEST_SECONDS

DEFAULT_TRIAL_SECONDS = 600.0
COMPILE_SHARE = 1 / 2
STEP_SHARE = 1 / 5

REPORT_SECONDS = 0.1
"""A step that ends sooner than this after the last one that was reported is not reported."""


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """In seconds of wall-clock time, each a deadline of its own."""

    trial_seconds: float
    """From the request to the result."""
    compile_seconds: float
    """For a step or a batch of evaluation in which code is compiled."""
    step_seconds: float
    """For every other step, and every other batch of evaluation."""

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
                    f"a {name} time limit of {seconds:g} s is longer than the whole trial may take, "
                    f"{self.trial_seconds:g} s",
                    hint="raise --trial-time-limit, or choose a shorter one",
                )


def time_limits(
    trial_seconds: float, *, compile_seconds: float | None = None, step_seconds: float | None = None
) -> TimeLimits:
    """With what is not said as a share of the whole: half for compilation, a fifth for a step.

    Raises InvalidInput.
    """
    return TimeLimits(
        trial_seconds=trial_seconds,
        compile_seconds=trial_seconds * COMPILE_SHARE
        if compile_seconds is None
        else compile_seconds,
        step_seconds=trial_seconds * STEP_SHARE if step_seconds is None else step_seconds,
    )
