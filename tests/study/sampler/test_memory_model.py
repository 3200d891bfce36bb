"""What a configuration will need, from predictions and trials made by hand."""

import pytest

from autotune.spec.config import TrainingConfig
from autotune.study.sampler.features import Candidates
from autotune.study.sampler.memory_model import MemoryModel
from tests.building.ranking import CAP_BYTES, MIB, forecast, record

PLAIN = TrainingConfig(micro_batch_size=8)
CHECKPOINTED = TrainingConfig(micro_batch_size=8, checkpointing="block")
NARROW = TrainingConfig(micro_batch_size=4)
NOT_MEASURED = {
    "peak_memory_bytes": None,
    "device_bytes": None,
    "tokens_per_second": None,
    "perplexity": None,
}


def need(config, *, records=(), forecasts=(), cap_bytes=CAP_BYTES):
    return MemoryModel(list(records), list(forecasts), cap_bytes=cap_bytes).estimate(
        Candidates.of([config])
    )


def test_a_prediction_far_below_the_cap_surely_fits():
    assert (
        need(
            PLAIN, forecasts=[forecast(PLAIN, peak_memory_bytes=30 * MIB, uncertainty=0.1)]
        ).probability_of_feasibility[0]
        > 0.99
    )


def test_a_prediction_right_at_the_cap_is_a_toss():
    at_the_cap = forecast(PLAIN, peak_memory_bytes=CAP_BYTES, uncertainty=0.1)
    assert need(PLAIN, forecasts=[at_the_cap]).probability_of_feasibility[0] == pytest.approx(0.5)


def test_a_study_whose_predictions_were_right_trusts_those_close_to_the_cap():
    close = forecast(NARROW, peak_memory_bytes=int(0.97 * CAP_BYTES), uncertainty=0.1)
    right = forecast(PLAIN, peak_memory_bytes=40 * MIB, uncertainty=0.1)
    trusting = need(NARROW, records=[record(PLAIN)] * 6, forecasts=[close, right])
    assert (
        trusting.probability_of_feasibility[0]
        > need(NARROW, forecasts=[close]).probability_of_feasibility[0]
    )


def test_predictions_that_were_too_low_are_corrected():
    low = [
        forecast(config, peak_memory_bytes=30 * MIB, uncertainty=0.1) for config in (PLAIN, NARROW)
    ]
    corrected = need(NARROW, records=[record(PLAIN, peak_memory_bytes=40 * MIB)] * 9, forecasts=low)
    assert corrected.if_it_fits[0] == pytest.approx(40 * MIB, rel=0.05)


def test_running_out_of_memory_makes_similar_configurations_less_likely_to_fit():
    fits = [
        forecast(config, peak_memory_bytes=int(0.9 * CAP_BYTES), uncertainty=0.1)
        for config in (PLAIN, NARROW)
    ]
    failed = record(PLAIN, outcome="out_of_memory", **NOT_MEASURED)
    assert (
        need(NARROW, records=[failed] * 3, forecasts=fits).probability_of_feasibility[0]
        < need(NARROW, forecasts=fits).probability_of_feasibility[0] - 0.2
    )


def test_the_context_of_the_device_is_taken_off_the_cap():
    with_context = record(
        PLAIN, peak_memory_bytes=40 * MIB, device_bytes=50 * MIB, context_bytes=10 * MIB
    )
    assert MemoryModel([with_context], [], cap_bytes=CAP_BYTES).room_bytes == CAP_BYTES - 10 * MIB


def test_memory_that_the_allocator_reserved_is_not_subtracted():
    with_slack = record(PLAIN, peak_memory_bytes=20 * MIB, device_bytes=60 * MIB)
    assert MemoryModel([with_slack], [], cap_bytes=CAP_BYTES).room_bytes == CAP_BYTES


def test_without_predictions_a_configuration_is_estimated_by_similar_ones():
    alike = need(CHECKPOINTED, records=[record(PLAIN, peak_memory_bytes=20 * MIB)])
    assert (alike.probability_of_feasibility[0] > 0.9, bool(alike.is_predicted[0])) == (True, False)


def test_running_out_of_memory_as_predicted_says_nothing_about_predictions():
    over = forecast(PLAIN, peak_memory_bytes=2 * CAP_BYTES, uncertainty=0.1)
    close = forecast(NARROW, peak_memory_bytes=int(0.97 * CAP_BYTES), uncertainty=0.1)
    out_of_memory = record(PLAIN, outcome="out_of_memory", **NOT_MEASURED)
    without = need(NARROW, forecasts=[over, close])
    after = need(NARROW, records=[out_of_memory] * 6, forecasts=[over, close])
    assert after.probability_of_feasibility[0] == without.probability_of_feasibility[0]
