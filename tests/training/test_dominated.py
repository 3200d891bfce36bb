"""A training that another one of the same numerics dominates ends early and reports it."""

import dataclasses
import time

import pytest

from autotune.spec.config import TrainingConfig
from autotune.spec.early_stopping import PruningBound
from autotune.spec.training_request import TrainingRequest
from autotune.training.trainer import train

UNBEATABLE = PruningBound(number=3, peak_memory_bytes=1, tokens_per_second=1e12)
HOPELESS = PruningBound(number=4, peak_memory_bytes=1, tokens_per_second=1e-3)


@pytest.fixture
def measure(workload, prepared):
    def measure(**changes):
        request = TrainingRequest(
            workload=workload,
            config=TrainingConfig(micro_batch_size=workload.global_batch),
            folder=prepared,
            device="cpu",
            cap_bytes=2**40,
            shares_perplexity=True,
            requested_at=time.monotonic(),
        )
        return train(dataclasses.replace(request, **changes))

    return measure


@pytest.fixture
def beaten(measure):
    return measure(pruning_bounds=(HOPELESS, UNBEATABLE))


def test_it_has_the_outcome_dominated_and_names_the_trial(beaten):
    assert (beaten.outcome, "trial 3" in beaten.message) == ("dominated", True)


def test_its_memory_and_speed_are_measured_and_its_perplexity_is_not(beaten):
    assert (beaten.peak_memory_bytes > 0, beaten.tokens_per_second > 0, beaten.perplexity) == (
        True,
        True,
        None,
    )


def test_a_dominated_trial_is_not_evaluated(beaten):
    assert beaten.seconds_by_part["evaluation"] == 0.0


def test_a_trial_that_no_other_dominates_runs_to_its_end(measure):
    assert measure(pruning_bounds=(HOPELESS,)).outcome == "ok"


def test_a_dominated_trial_over_the_cap_is_reported_as_over_the_cap(measure):
    assert measure(pruning_bounds=(UNBEATABLE,), cap_bytes=65536).outcome == "over_cap"


def test_the_parts_of_a_trial_add_up_to_the_time_it_took(measure):
    began = time.monotonic()
    parts = measure(requested_at=began).seconds_by_part
    assert set(parts) == {"startup", "compilation", "training", "evaluation"}
    assert 0 < sum(parts.values()) <= time.monotonic() - began
