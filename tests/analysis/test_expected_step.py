"""What is expected of a training step, from one prediction and the rates of a device."""

import math
from dataclasses import replace

import pytest

from autotune.analysis.expected_step import ExpectedStep, with_speed
from autotune.spec.config import CHOICES, TrainingConfig
from autotune.spec.prediction import Prediction
from autotune.spec.result import DeviceInfo
from autotune.spec.workload import make_workload
from tests.building.studies import definition

MEASURED_ON_AN_H200 = {"none": 52_972, "block": 42_044}
"""By checkpointing: tokens per second in fp32, measured alone (`studies/gpu/h200`)."""
H200 = DeviceInfo(
    device="cuda:0",
    name="NVIDIA H200",
    total_memory_bytes=150_109_880_320,
    versions={"torch": "2.11.0"},
    matrix_flops_per_second={"fp32": 50.5e12, "bf16": 848e12, "fp8": 1607e12},
    bandwidth_bytes_per_second=4.1e12,
)
PLAIN = TrainingConfig(micro_batch_size=16)
PREDICTED = Prediction(
    device="cuda",
    fake_device="cpu",
    peak_memory_bytes=18_419_856_896,
    upper_bound_bytes=18_419_856_896,
    lower_bound_bytes=18_419_856_896,
    phase="backward",
    module="",
    operator="",
    bytes_by_category={"parameters": 4 * 113_664_768},
    parameters=113_664_768,
    holders=(),
    flops_per_token=831_651_840.0,
    bytes_accessed_per_token=8_793_264.7,
)
STUDY = definition(
    device=H200, workload=make_workload("cuda", {"text_sha256": "f" * 64, "global_batch": 16})
)


def expected(device=H200, predicted=PREDICTED):
    return ExpectedStep.of(replace(STUDY, device=device), predicted)


@pytest.mark.parametrize("field", CHOICES)
def test_every_choice_of_a_technique_has_a_speed_and_a_peak(field):
    for value in CHOICES[field]:
        config = replace(PLAIN, **{field: value})
        assert math.isfinite(expected().logarithm_of_speed(config))
        assert math.isfinite(expected().logarithm_of_peak(config))


def test_a_smaller_activation_budget_has_a_smaller_peak_at_a_lower_speed():
    budgets = ("none", "1TiB", "14GiB", "10GiB", "1GiB")
    configs = [replace(PLAIN, activation_budget=budget) for budget in budgets]
    speeds = [expected().tokens_per_second(config) for config in configs]
    peaks = [expected().logarithm_of_peak(config) for config in configs]
    assert speeds[0] == speeds[1] > speeds[2] > speeds[3] > speeds[4]
    assert peaks[0] == peaks[1] > peaks[2] > peaks[3] > peaks[4]
    assert math.exp(peaks[2]) == pytest.approx(14 * 2**30)


def test_speeds_measured_alone_on_an_h200_are_expected_within_2_percent():
    step = expected()
    for checkpointing, measured in MEASURED_ON_AN_H200.items():
        config = replace(PLAIN, checkpointing=checkpointing)
        assert step.tokens_per_second(config) == pytest.approx(measured, rel=0.02)


def test_eager_training_of_small_micro_batches_is_bound_by_the_host():
    """On an H100 whose host took 32 us for an operator, it measured 50,955 tokens/s."""
    h100 = replace(H200, operator_seconds=3.2e-5, bandwidth_bytes_per_second=2.9e12)
    config = replace(PLAIN, precision="bf16-mixed", optimizer_fusion="kernel", micro_batch_size=2)
    time = expected(device=h100).time(config)
    assert time.bound_by == "host"
    assert 1 / time.seconds == pytest.approx(50_955, rel=0.06)


def test_layers_of_the_workloads_size_are_as_fast_as_they_were_probed():
    slower = replace(H200, layer_flops_per_second={"fp32": 25e12})
    before, after = expected().time(PLAIN), expected(device=slower).time(PLAIN)
    assert after.products == pytest.approx(2.02 * before.products)
    assert after.memory == before.memory


def test_two_devices_compute_in_half_the_time():
    both = replace(expected(), devices=2)
    assert both.time(PLAIN).products == expected().time(PLAIN).products / 2


def test_a_predicted_configuration_need_not_be_the_plain_one():
    config = replace(PLAIN, checkpointing="block", compile="block", precision="bf16-mixed")
    own = replace(expected(), plain_config=config)
    assert own.tokens_per_second(PLAIN) > 0
    same_work = own.time(config)
    assert same_work.memory == expected().time(PLAIN).memory
    peak = math.exp(own.logarithm_of_peak(config))
    assert peak == pytest.approx(PREDICTED.peak_memory_bytes)


def test_a_prediction_gets_a_speed_with_bounds_where_the_rates_are_known():
    workload = STUDY.workload
    found = with_speed(PREDICTED, PLAIN, workload=workload, device=H200)
    least, most = found.predicted_tokens_per_second_bounds
    assert least < found.predicted_tokens_per_second < most
    assert found.bound_by == "matrix products"
    assert 0 < found.predicted_model_flops_utilization < 1
    unknown = replace(H200, matrix_flops_per_second=None)
    assert with_speed(PREDICTED, PLAIN, workload=workload, device=unknown) is PREDICTED


def test_the_utilization_counts_no_recomputed_flops():
    recomputing = replace(PLAIN, checkpointing="block")
    step = expected()
    speeds = step.tokens_per_second(recomputing) / step.tokens_per_second(PLAIN)
    ratio = step.utilization(recomputing) / step.utilization(PLAIN)
    assert ratio == pytest.approx(speeds)


def test_the_peak_of_the_plain_training_is_the_predicted_one():
    peak = math.exp(expected().logarithm_of_peak(PLAIN))
    assert peak == pytest.approx(PREDICTED.peak_memory_bytes)


@pytest.mark.parametrize(
    ("change", "is_faster"),
    [
        ({"precision": "bf16-mixed"}, True),
        ({"compile": "block"}, True),
        ({"checkpointing": "block"}, False),
        ({"activation_offload": "cpu"}, False),
        ({"offload": "optimizer"}, False),
        ({"offload": "all", "micro_batch_size": 1}, False),
        ({"compile": "block", "memory_budget": 0.0}, False),
    ],
)
def test_what_computes_less_or_moves_less_is_expected_to_be_faster(change, is_faster):
    step = expected()
    without_budget = replace(PLAIN, **{**change, "memory_budget": 1.0})
    before = without_budget if "memory_budget" in change else PLAIN
    changed = replace(PLAIN, **change)
    assert (step.logarithm_of_speed(changed) > step.logarithm_of_speed(before)) is is_faster


def test_small_micro_batches_are_bound_by_the_host_that_launches_the_kernels():
    step = expected()
    fast = replace(PLAIN, precision="bf16-true")
    speeds = [step.tokens_per_second(replace(fast, micro_batch_size=size)) for size in (1, 2, 16)]
    assert speeds[1] / speeds[0] == pytest.approx(2.0, rel=0.2)
    assert speeds[2] < 8 * speeds[1]


def test_without_a_prediction_or_the_rates_of_the_device_nothing_is_expected():
    assert expected(predicted=None) is None
    assert expected(device=replace(H200, matrix_flops_per_second=None)) is None
    assert expected(device=replace(H200, bandwidth_bytes_per_second=None)) is None
    assert expected(predicted=replace(PREDICTED, flops_per_token=None)) is None


def test_a_format_whose_rate_is_not_known_has_that_of_a_wider_one():
    only_fp32 = replace(H200, matrix_flops_per_second={"fp32": 50.5e12})
    step = expected(device=only_fp32)
    assert step.tokens_per_second(replace(PLAIN, precision="tf32")) == step.tokens_per_second(PLAIN)


def test_predictions_that_were_stored_without_a_count_of_operators_have_a_usual_one():
    assert PREDICTED.operators_per_token is None
    counted = replace(PREDICTED, operators_per_token=2020 / 16_384)
    step = expected(predicted=counted)
    assert step.time(PLAIN).host == pytest.approx(expected().time(PLAIN).host, rel=0.1)
