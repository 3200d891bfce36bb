"""What is expected of a training step, from one prediction and the rates of a device."""

import math
from dataclasses import replace

import pytest

from autotune.analysis.expected_step import ExpectedStep
from autotune.spec.config import CHOICES, TrainingConfig
from autotune.spec.prediction import Prediction
from autotune.spec.result import DeviceInfo
from autotune.spec.workload import make_workload
from tests.building.studies import definition

MEASURED_ON_AN_H200 = {"plain": 52_972, "block": 41_765}
"""Tokens per second in fp32, measured alone (`studies/gpu/h200`)."""
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


def test_the_speeds_measured_alone_on_an_h200_are_a_third_faster_at_most():
    """They were at 0.99 of the probed rate, where a share of 0.7 is expected of any format."""
    measured_ratio = MEASURED_ON_AN_H200["plain"] / MEASURED_ON_AN_H200["block"]
    step = expected()
    plain = step.tokens_per_second(PLAIN)
    checkpointed = step.tokens_per_second(replace(PLAIN, checkpointing="block"))
    assert 0.66 < plain / MEASURED_ON_AN_H200["plain"] < 1.0
    assert plain / checkpointed == pytest.approx(measured_ratio, rel=0.03)


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
