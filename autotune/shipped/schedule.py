"""The learning rate of each step: a linear warm-up, then a constant rate or a cosine."""

import math


def scheduled_rate(
    step: int, *, rate: float, steps: int, warmup_steps: int, schedule: str
) -> float:
    """Returns the learning rate at a step, counted from 0, of a training of `steps` steps.

    The warm-up rises to `rate` over `warmup_steps`; a cosine goes down to a tenth of it.
    """
    if step < warmup_steps:
        return rate * (step + 1) / warmup_steps
    if schedule == "constant":
        return rate
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
