"""Recognizes the schedule of autotune in a list of learning rates."""

import functools

import pytest
import torch

from autotune.spec.config import TrainingConfig
from autotune.spec.workload import make_workload
from autotune.training.step import TrainingStep

CPU = torch.device("cpu")


def schedule_of(rates):
    """Returns {schedule, learning_rate, learning_rate_warmup_steps} for the rates of all steps."""
    return dict(_schedule_of(tuple(rates)))


def trial_rates(workload, optimizer="adamw"):
    """What a trial sets before each of its steps."""
    config = TrainingConfig(optimizer=optimizer)
    step = TrainingStep(None, workload=workload, config=config, device=CPU, marker=None)
    return [step.learning_rate(index) for index in range(workload.steps)]


@functools.cache
def _schedule_of(rates):
    rate = max(rates)
    for schedule in ("constant", "cosine"):
        for warmup in range(1, len(rates)):
            settings = {
                "schedule": schedule,
                "learning_rate_warmup_steps": warmup,
                "learning_rates": {"adamw": rate},
            }
            workload = make_workload("cpu", {"steps": len(rates), **settings})
            if trial_rates(workload) == pytest.approx(rates):
                return {
                    "schedule": schedule,
                    "learning_rate": pytest.approx(rate),
                    "learning_rate_warmup_steps": warmup,
                }
    return {"schedule": f"none of ours: {rates}"}
