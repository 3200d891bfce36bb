"""The learning rate of a script."""

from autotune.shipped.schedule import scheduled_rate
from autotune.shipped.script.written import LEARNING_RATE, LEARNING_RATE_WARMUP_STEPS, SCHEDULE


def learning_rate(step: int, *, steps: int) -> float:
    """Returns the rate at `step`, counted from 0, of a training of `steps` steps."""
    return scheduled_rate(
        step,
        rate=LEARNING_RATE,
        steps=steps,
        warmup_steps=LEARNING_RATE_WARMUP_STEPS,
        schedule=SCHEDULE,
    )
