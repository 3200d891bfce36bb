"""The learning rate of a trial, for LambdaLR."""

import math


def learning_rate_factor(step: int, *, steps: int, warmup_steps: int, schedule: str) -> float:
    """Returns the factor of the learning rate at a step, counted from 0.

    A linear warm-up is followed by a constant rate or by a cosine down to a tenth.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
