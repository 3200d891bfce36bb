import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.spec.result import Outcome
from autotune.study.sampler.optuna_values import (
    MEMORY_CONSTRAINT,
    TRAINING_CONSTRAINT,
    ObjectiveEncoder,
)
from tests.building.results import MIB, OVER_RANDOM, out_of_memory, record

CAP = 100 * MIB
VOCABULARY = 256
OUTCOMES = get_args(Outcome)
FAILURES = ("diverged", "timeout", "crashed", "interrupted")

BYTES = st.none() | st.integers(0, 10**15)
NUMBERS = st.sampled_from([None, 0.0, 12.5, math.inf, -math.inf, math.nan])
RECORDS = st.builds(
    record,
    st.integers(0, 1000),
    outcome=st.sampled_from(OUTCOMES),
    memory=BYTES,
    device_bytes=BYTES,
    requested_bytes=BYTES,
    predicted_peak_memory_bytes=BYTES,
    speed=NUMBERS,
    perplexity=NUMBERS,
)


def told(one, earlier=()):
    observer = ObjectiveEncoder(cap_bytes=CAP, vocab_size=VOCABULARY)
    for other in earlier:
        observer.to_optuna_values(other)
    return observer.to_optuna_values(one)


def test_a_perplexity_that_says_nothing_is_the_same_for_all_and_never_the_worst():
    random = [record(0, perplexity=p, perplexity_source=OVER_RANDOM) for p in (2.0, 300.0)]
    assert [told(one).values[2] for one in random] == [1.0, 1.0]
    assert told(out_of_memory(2), [record(1, perplexity=20.0), *random]).values[2] == 20.0


def is_feasible(observation):
    return all(constraint <= 0 for constraint in observation.constraints.values())


# -- whatever the trial ----------------------------------------------------------------------------


@given(RECORDS, st.lists(RECORDS, max_size=4))
def test_every_number_told_is_finite(one, earlier):
    observation = told(one, earlier)
    assert all(
        math.isfinite(number) for number in (*observation.values, *observation.constraints.values())
    )


@given(RECORDS)
def test_the_constraints_are_always_the_same_in_the_same_order(one):
    assert list(told(one).constraints) == [MEMORY_CONSTRAINT, TRAINING_CONSTRAINT]


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_an_outcome_without_any_number_is_told_three_finite_values(outcome):
    bare = record(0, outcome=outcome, memory=None, speed=None, perplexity=None)
    assert all(math.isfinite(value) for value in told(bare).values)


@given(RECORDS.filter(lambda one: one.outcome in FAILURES))
def test_a_trial_that_failed_for_another_reason_than_memory_is_not_feasible(one):
    assert not is_feasible(told(one))


# -- what was measured -----------------------------------------------------------------------------


def test_what_was_measured_is_told_as_it_is():
    assert told(record(0, memory=50 * MIB, speed=1234.5, perplexity=9.5)).values == (
        50.0 * MIB,
        1234.5,
        9.5,
    )


@pytest.mark.parametrize("device_bytes", [1, CAP // 2, CAP])
def test_an_ok_trial_up_to_the_cap_is_feasible(device_bytes):
    assert is_feasible(told(record(0, device_bytes=device_bytes)))


@pytest.mark.parametrize("share", [0.01, 0.5, 3.0])
def test_a_trial_over_the_cap_is_told_how_far_over_in_shares_of_the_cap(share):
    over = record(0, outcome="over_cap", device_bytes=int(CAP * (1 + share)))
    assert told(over).constraints[MEMORY_CONSTRAINT] == pytest.approx(share, abs=1e-6)


def test_the_cap_is_compared_with_what_the_device_must_have_and_not_the_peak():
    over = record(0, outcome="over_cap", memory=CAP // 2, device_bytes=2 * CAP)
    assert told(over).constraints[MEMORY_CONSTRAINT] == 1.0


def test_a_trial_over_the_cap_did_train():
    assert told(record(0, outcome="over_cap")).constraints[TRAINING_CONSTRAINT] == 0.0


# -- what did not fit ------------------------------------------------------------------------------

EVERY_REFUSAL = pytest.mark.parametrize("outcome", ["out_of_memory", "predicted_over_cap"])


@EVERY_REFUSAL
@pytest.mark.parametrize("peak", [None, CAP // 2, CAP - 1])
def test_what_did_not_fit_is_never_feasible(outcome, peak):
    failed = record(0, outcome=outcome, memory=peak, device_bytes=None, speed=None, perplexity=None)
    assert told(failed).constraints[MEMORY_CONSTRAINT] > 0


@EVERY_REFUSAL
@pytest.mark.parametrize("peak", [None, CAP // 2, CAP - 1])
def test_what_did_not_fit_is_told_more_memory_than_the_cap(outcome, peak):
    failed = record(0, outcome=outcome, memory=peak, device_bytes=None, speed=None, perplexity=None)
    assert told(failed).values[0] > CAP


@pytest.mark.parametrize(
    "known",
    [
        {"memory": 2 * CAP},
        {"memory": CAP, "requested_bytes": CAP},
        {"predicted_peak_memory_bytes": 2 * CAP},
    ],
)
def test_the_largest_known_size_decides_how_far_over(known):
    failed = told(out_of_memory(0, **{"device_bytes": None, **known}))
    assert failed.constraints[MEMORY_CONSTRAINT] == pytest.approx(1.02)


def test_a_larger_failed_request_is_further_over():
    small, large = (
        told(out_of_memory(0, memory=CAP, device_bytes=None, requested_bytes=requested))
        for requested in (MIB, 50 * MIB)
    )
    assert small.constraints[MEMORY_CONSTRAINT] < large.constraints[MEMORY_CONSTRAINT]


# -- what was not measured -------------------------------------------------------------------------


def test_what_was_not_measured_is_told_as_the_worst_seen():
    earlier = [record(1, speed=500.0, perplexity=9.0), record(2, speed=800.0, perplexity=20.0)]
    assert told(out_of_memory(0), earlier).values[1:] == (500.0, 20.0)


def test_with_nothing_seen_the_perplexity_is_that_of_guessing():
    assert told(out_of_memory(0), [out_of_memory(1)]).values[2] == VOCABULARY


@pytest.mark.parametrize("strange", [math.inf, math.nan])
def test_a_perplexity_that_is_not_finite_is_told_as_the_worst_seen(strange):
    earlier = [record(1, perplexity=20.0)]
    assert told(record(0, outcome="diverged", perplexity=strange), earlier).values[2] == 20.0


@pytest.mark.parametrize("strange", [math.inf, math.nan])
@pytest.mark.parametrize("field", ["speed", "perplexity"])
def test_the_worst_seen_is_the_worst_of_the_finite(field, strange):
    earlier = [record(1, **{field: strange}), record(2, speed=500.0, perplexity=20.0)]
    assert told(out_of_memory(0), earlier).values[1:] == (500.0, 20.0)
