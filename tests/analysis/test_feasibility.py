"""Whether a trial is feasible, and what its configuration needs, as far as the trial tells."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.analysis.feasibility import (
    MORE_THAN_KNOWN,
    is_feasible,
    least_needed_bytes,
    needed_bytes,
)
from autotune.spec.result import Outcome
from tests.building.results import MIB, out_of_memory, record

CAP = 100 * MIB
BYTES = st.none() | st.integers(0, 10**12)


def predicted_over_cap(**fields):
    unmeasured = {"memory": None, "speed": None, "perplexity": None}
    return record(0, outcome="predicted_over_cap", **{**unmeasured, **fields})


# -- what is known for sure ------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["ok", "over_cap", "dominated"])
def test_a_measured_size_is_known_and_no_other_counts(outcome):
    measured = record(
        0, outcome=outcome, memory=80, device_bytes=90, predicted_peak_memory_bytes=200
    )
    assert least_needed_bytes(measured) == 90


def test_of_what_was_not_trained_the_prediction_is_known():
    assert least_needed_bytes(predicted_over_cap(predicted_peak_memory_bytes=150)) == 150


@pytest.mark.parametrize(("predicted", "least"), [(None, 130), (120, 130), (140, 140)])
def test_what_ran_out_of_memory_needs_what_it_held_and_requested_or_the_prediction(
    predicted, least
):
    failed = out_of_memory(
        0, memory=100, device_bytes=None, requested_bytes=30, predicted_peak_memory_bytes=predicted
    )
    assert least_needed_bytes(failed) == least


def test_without_any_size_nothing_is_known():
    assert least_needed_bytes(out_of_memory(0)) == 0


# -- what a sampler is told ------------------------------------------------------------------------


@given(device_bytes=st.integers(0, 10**12))
def test_a_measured_size_is_told_as_it_is(device_bytes):
    over = record(0, outcome="over_cap", device_bytes=device_bytes)
    assert needed_bytes(over, limit_bytes=CAP) == device_bytes


@given(held=BYTES, requested=BYTES, predicted=BYTES)
def test_a_trial_rejected_unmeasured_is_told_over_the_limit_and_over_all_that_is_known(
    held, requested, predicted
):
    sizes = {"device_bytes": None, "predicted_peak_memory_bytes": predicted}
    for rejected in (
        out_of_memory(0, memory=held, requested_bytes=requested, **sizes),
        predicted_over_cap(**sizes),
    ):
        told = needed_bytes(rejected, limit_bytes=CAP)
        assert told == MORE_THAN_KNOWN * max(CAP, least_needed_bytes(rejected))


@pytest.mark.parametrize("outcome", ["crashed", "timeout", "diverged", "interrupted"])
def test_a_trial_that_ended_for_another_reason_is_told_at_the_limit(outcome):
    failed = record(0, outcome=outcome, memory=None, predicted_peak_memory_bytes=2 * CAP)
    assert needed_bytes(failed, limit_bytes=CAP) == CAP


# -- feasible --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "feasible"),
    [
        ({}, True),
        ({"device_bytes": CAP + 1}, False),
        ({"memory": CAP + 1}, True),
        ({"device_bytes": None}, False),
        ({"speed": None}, False),
        ({"perplexity": None}, False),
        ({"memory": None}, False),
    ],
)
def test_feasible_is_an_ok_trial_with_all_objectives_whose_device_is_within_the_cap(
    fields, feasible
):
    assert is_feasible(record(0, **{"device_bytes": CAP, **fields}), cap_bytes=CAP) is feasible


@pytest.mark.parametrize("outcome", [one for one in get_args(Outcome) if one != "ok"])
def test_no_other_outcome_is_feasible(outcome):
    assert not is_feasible(record(0, outcome=outcome, device_bytes=1), cap_bytes=CAP)
