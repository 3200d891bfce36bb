"""Model FLOPs utilization and the roofline, of records and devices made by hand."""

from dataclasses import replace

import pytest

from autotune.analysis.roofline import (
    disturbed_formats,
    model_flops_utilization,
    roofline,
    with_utilization,
)
from autotune.spec.config import CHOICES, TrainingConfig
from autotune.spec.result import DeviceInfo
from tests.building.results import record
from tests.building.views import predicted

DEVICE = DeviceInfo(
    device="cpu",
    name="a processor",
    total_memory_bytes=2**33,
    versions={},
    matrix_flops_per_second={"fp32": 1e10, "bf16": 4e10},
    bandwidth_bytes_per_second=2e9,
)
FLOPS = {"model_flops_per_token": 1e6, "recomputed_flops_per_token": 5e5}
FP32 = record(0, speed=2000.0, **FLOPS)
BF16 = record(1, speed=2000.0, config=TrainingConfig(precision="bf16-mixed"), **FLOPS)


def test_utilization_counts_the_flops_of_the_model_and_not_those_recomputed():
    assert model_flops_utilization(FP32, DEVICE) == pytest.approx(0.2)


def test_a_trial_is_compared_with_the_rate_of_its_own_number_format():
    assert model_flops_utilization(BF16, DEVICE) == pytest.approx(0.05)


@pytest.mark.parametrize("missing", ["tokens_per_second", "model_flops_per_token"])
def test_there_is_no_utilization_without_a_speed_or_flops(missing):
    assert model_flops_utilization(replace(FP32, **{missing: None}), DEVICE) is None


def test_there_is_no_utilization_on_a_device_that_was_not_measured():
    assert model_flops_utilization(FP32, replace(DEVICE, matrix_flops_per_second=None)) is None


def test_gpus_of_a_trial_have_the_rates_of_all_of_them_and_ranks_on_a_cpu_share_one():
    of_two = replace(FP32, devices=2)
    gpu = replace(DEVICE, device="cuda:0")
    assert model_flops_utilization(of_two, gpu) == pytest.approx(0.1)
    assert model_flops_utilization(of_two, DEVICE) == pytest.approx(0.2)


def test_a_trial_faster_than_its_roof_leaves_no_utilization_in_its_format():
    too_fast = replace(FP32, number=2, tokens_per_second=11_000.0)
    assert disturbed_formats([FP32, BF16, too_fast], DEVICE) == {"fp32"}
    found = with_utilization([FP32, BF16, too_fast], DEVICE)
    assert [one.model_flops_utilization for one in found] == [None, pytest.approx(0.05), None]


def test_every_precision_that_names_one_has_a_number_format():
    rates = dict.fromkeys(("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp64"), 1e10)
    device = replace(DEVICE, matrix_flops_per_second=rates)
    for precision in CHOICES["precision"]:
        trial = replace(FP32, config=TrainingConfig(precision=precision))
        utilization = model_flops_utilization(trial, device)
        # Nothing is known of a script's weights in several formats.
        assert utilization == (None if precision == "as-is" else pytest.approx(0.2))


def test_few_flops_per_byte_are_bound_by_the_bandwidth():
    prediction = replace(predicted(), bytes_accessed_per_token=1.5e6)
    found = roofline(FP32, DEVICE, prediction)
    assert found.flops_per_byte == pytest.approx(1.0)
    assert found.attainable == pytest.approx(2e9)
    assert found.is_bound_by_memory


def test_many_flops_per_byte_are_bound_by_the_matrix_rate():
    prediction = replace(predicted(), bytes_accessed_per_token=1.5e3)
    found = roofline(FP32, DEVICE, prediction)
    assert found.attainable == pytest.approx(1e10)
    assert not found.is_bound_by_memory


def test_a_place_under_the_roofline_has_recomputed_flops_too():
    assert roofline(FP32, DEVICE, predicted()).flops_per_second == pytest.approx(3e9)


def test_there_is_no_place_under_the_roofline_without_a_prediction():
    assert roofline(FP32, DEVICE, None) is None
