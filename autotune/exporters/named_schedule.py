"""Learning rate schedules that transformers knows by name (`transformers.optimization`).

Its warm-ups begin at a rate of 0; the warm-up of a trial begins one step further. Only
`warmup_stable_decay` can begin above 0. It has a single floor for warm-up and decay, so it can
express every constant rate, but a cosine down to a tenth only where the warm-up begins at a tenth
as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.exporters.reasons import Reason
from autotune.exporters.recipe import SMALLEST_RATE, Recipe

_FROM_ZERO = "{steps}, from a rate of 0"


@dataclass(frozen=True, kw_only=True)
class NamedSchedule:
    """A value of `lr_scheduler_type` and its arguments."""

    name: str
    warmup_steps: int
    keywords: Mapping[str, Any]


def warmup_reasons(recipe: Recipe, *, least: int = 1) -> dict[str, Reason]:
    """Returns {setting: reason} if no named schedule has the warm-up of the trial.

    `least` is the shortest warm-up, other than none, that the trainer accepts.
    """
    steps = recipe.workload.learning_rate_warmup_steps
    begins_right = recipe.workload.schedule == "constant" or steps in (1, round(1 / SMALLEST_RATE))
    if begins_right and not 0 < steps - 1 < least:
        return {}
    why = (
        "a warm-up of transformers begins at a rate of 0; that of the trial begins one step further"
    )
    return {"learning_rate_warmup_steps": (_FROM_ZERO.format(steps=steps), why)}


def named_schedule(effective: Mapping[str, Any]) -> NamedSchedule:
    """Returns the schedule that has the learning rates of `effective`.

    `effective` holds the settings of a recipe as the files will have them: those that cannot be
    expressed are replaced by what the files do instead.
    """
    warmup = effective["learning_rate_warmup_steps"]
    is_constant = effective["schedule"] == "constant"
    if isinstance(warmup, int):
        if is_constant:
            keywords = {"num_decay_steps": 0, "min_lr_ratio": 1 / warmup}
        else:
            decay_steps = max(0, effective["steps"] - warmup)
            keywords = {"num_decay_steps": decay_steps, "min_lr_ratio": SMALLEST_RATE}
        return NamedSchedule(name="warmup_stable_decay", warmup_steps=warmup - 1, keywords=keywords)
    steps = int(warmup.partition(",")[0])  # the text of `_FROM_ZERO`
    if is_constant:
        return NamedSchedule(name="constant_with_warmup", warmup_steps=steps, keywords={})
    return NamedSchedule(
        name="cosine_with_min_lr", warmup_steps=steps, keywords={"min_lr_rate": SMALLEST_RATE}
    )
