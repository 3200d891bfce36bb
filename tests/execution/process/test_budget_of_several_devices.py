"""Activation budgets of trainings on several devices: none of them needs more."""

import re

import pytest

from autotune.errors import BudgetTooSmall
from autotune.execution.process import answers
from autotune.execution.server.forked import run_in_fork
from autotune.execution.tasks import Predict
from autotune.predictor import predict as predictor
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Prediction, PredictionRequest
from autotune.spec.reading import parse
from autotune.spec.workload import make_workload
from autotune.units import parse_size

DEVICES = 3
SIZES = {"layers": 4, "width": 64, "heads": 4, "sequence_length": 256, "global_batch": 6}
WORKLOAD = make_workload("cpu", {**SIZES, "devices_per_trial": DEVICES})


@pytest.fixture(autouse=True)
def _predictions_are_kept_here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def predicted(**choices):
    config = TrainingConfig(micro_batch_size=2, **choices)
    request = PredictionRequest(workload=WORKLOAD, config=config, device="cpu")
    return parse(Prediction, run_in_fork(lambda: answers.predict(Predict(request=request))))


pytestmark = pytest.mark.slow

SHARDED = ("ddp", "zero1", "zero2", "zero3")


@pytest.mark.parametrize("sharding", SHARDED)
def test_no_device_needs_more_than_the_budget(sharding):
    whole = predicted(sharding=sharding).peak_memory_bytes
    least = predicted(sharding=sharding, checkpointing="block").peak_memory_bytes
    budget = (whole + least) // 2
    found = predicted(sharding=sharding, activation_budget=str(budget))
    assert len(found.peak_memory_bytes_by_rank) == DEVICES
    assert 0.9 * budget < max(found.peak_memory_bytes_by_rank) <= budget


@pytest.mark.parametrize("sharding", SHARDED)
def test_a_budget_that_is_too_small_names_what_is_enough_on_every_device(sharding, monkeypatch):
    with pytest.raises(BudgetTooSmall, match=r"of 1\.00 KiB is less than the") as first:
        predicted(sharding=sharding, activation_budget="1KiB")
    [least] = re.findall(r"than the (\S+ \S+) that", str(first.value))
    found = predicted(sharding=sharding, activation_budget=least.replace(" ", ""))
    assert 0.99 * parse_size(least) < max(found.peak_memory_bytes_by_rank) <= parse_size(least)

    def predicted_again(*_, **__):
        raise AssertionError("it was predicted again")

    monkeypatch.setattr(predictor, "predict_rank", predicted_again)
    with pytest.raises(BudgetTooSmall) as second:
        predicted(sharding=sharding, activation_budget="2KiB")
    assert str(second.value) == str(first.value).replace("1.00 KiB", "2.00 KiB")
