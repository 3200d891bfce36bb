"""Which schedule of ours a schedule of transformers is, found by running it."""

import functools
import json

import pytest
import torch
import transformers

from autotune.spec.workload import make_workload
from tests.exporters.readers.rates import schedule_of, trial_rates


def schedule_named(name, *, warmup, steps, keywords):
    """Returns {schedule, learning_rate_warmup_steps}, the latter as text if it begins at 0."""
    rates = _rates(name, warmup, steps, json.dumps(keywords))
    found = schedule_of(rates)
    if "learning_rate_warmup_steps" in found:
        return {word: found[word] for word in ("schedule", "learning_rate_warmup_steps")}
    assert rates[:warmup] == pytest.approx([step / warmup for step in range(warmup)])
    for schedule in ("constant", "cosine"):
        settings = {"steps": steps, "schedule": schedule, "learning_rate_warmup_steps": warmup}
        wanted = trial_rates(make_workload("cpu", {**settings, "learning_rates": {"adamw": 1.0}}))
        if wanted[warmup:] == pytest.approx(rates[warmup:]):
            return {
                "schedule": schedule,
                "learning_rate_warmup_steps": f"{warmup}, from a rate of 0",
            }
    return {"schedule": f"none of ours: {rates}"}


@functools.cache
def _rates(name, warmup, steps, keywords):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    words = {
        "num_warmup_steps": warmup,
        "num_training_steps": steps,
        "scheduler_specific_kwargs": json.loads(keywords),
    }
    scheduler = transformers.get_scheduler(name, optimizer, **words)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return tuple(rates)
