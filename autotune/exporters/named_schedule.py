"""Learning rates by the schedules that transformers knows by name (`transformers.optimization`).

Its warm-ups begin at a rate of 0, a trial's one step further. Only `warmup_stable_decay` can begin
above 0, and has one floor for warm-up and decay: every constant rate can be written with it, a
cosine down to a tenth where the warm-up begins at a tenth as well.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.exporters.export import Refusal
from autotune.exporters.recipe import SMALLEST_RATE, Recipe

_FROM_ZERO = "{steps}, from a rate of 0"


@dataclass(frozen=True, kw_only=True)
class NamedSchedule:
    """A value of `lr_scheduler_type`, and what it is called with."""

    name: str
    warmup_steps: int
    keywords: Mapping[str, Any]


def warmup_refusal(recipe: Recipe, *, least: int = 1) -> Iterator[Refusal]:
    """For a warm-up that no schedule has.

    `least`: the shortest warm-up that the trainer takes, besides none.
    """
    steps = recipe.workload.learning_rate_warmup_steps
    begins_right = recipe.workload.schedule == "constant" or steps in (1, round(1 / SMALLEST_RATE))
    if not begins_right or 0 < steps - 1 < least:
        why = "a warm-up of transformers begins at a rate of 0, a trial's one step further"
        instead = _FROM_ZERO.format(steps=steps)
        yield Refusal(setting="learning_rate_warmup_steps", value=steps, instead=instead, why=why)


def named_schedule(done: Mapping[str, Any]) -> NamedSchedule:
    """`done`: the settings of a recipe, with what stands in for those that were refused."""
    warmup, is_constant = done["learning_rate_warmup_steps"], done["schedule"] == "constant"
    if isinstance(warmup, int):
        keywords = {
            "num_decay_steps": 0 if is_constant else max(0, done["steps"] - warmup),
            "min_lr_ratio": 1 / warmup if is_constant else SMALLEST_RATE,
        }
        return NamedSchedule(name="warmup_stable_decay", warmup_steps=warmup - 1, keywords=keywords)
    steps = int(warmup.partition(",")[0])
    if is_constant:
        return NamedSchedule(name="constant_with_warmup", warmup_steps=steps, keywords={})
    return NamedSchedule(
        name="cosine_with_min_lr", warmup_steps=steps, keywords={"min_lr_rate": SMALLEST_RATE}
    )
