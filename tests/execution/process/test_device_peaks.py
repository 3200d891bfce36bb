"""What a device can do at most, measured on this machine's CPU."""

import pytest
import torch

from autotune.execution.process import device_peaks
from autotune.execution.process.device_peaks import measure_peaks

CPU = torch.device("cpu")


@pytest.fixture
def undisturbed(monkeypatch):
    """Count runs as undisturbed that another program delays, and give them the time they need."""
    monkeypatch.setattr(device_peaks, "_BUSY", 0.0)
    monkeypatch.setattr(device_peaks, "_ALL_SECONDS", 120.0)


def test_each_number_format_is_measured_once(undisturbed):
    found = measure_peaks(CPU, ["fp32", "bf16-mixed", "bf16-true"], memory_bytes=2**33, shape=None)
    assert found["matrix_flops_per_second"].keys() == {"fp32", "bf16"}
    assert all(rate > 0 for rate in found["matrix_flops_per_second"].values())
    assert found["bandwidth_bytes_per_second"] > 0


def test_layers_of_the_workload_are_no_faster_than_large_products(undisturbed):
    found = measure_peaks(CPU, ["fp32"], memory_bytes=2**33, shape=(64, 32, 128))
    large, layer = found["matrix_flops_per_second"], found["layer_flops_per_second"]
    assert 0 < layer["fp32"] <= large["fp32"]


def test_an_operator_takes_the_host_microseconds(undisturbed):
    found = measure_peaks(CPU, [], memory_bytes=2**30, shape=None)
    assert 1e-7 < found["operator_seconds"] < 1e-2


def test_what_there_is_no_time_for_is_not_measured(undisturbed, monkeypatch):
    monkeypatch.setattr(device_peaks, "_ALL_SECONDS", 0.0)
    found = measure_peaks(CPU, ["fp32"], memory_bytes=2**30, shape=None)
    assert found["matrix_flops_per_second"] == {}


def test_a_format_that_the_device_cannot_multiply_is_left_out(undisturbed, monkeypatch):
    def not_here(*_, **__):
        raise NotImplementedError

    monkeypatch.setattr(torch, "_scaled_mm", not_here)
    found = measure_peaks(CPU, ["fp8"], memory_bytes=2**30, shape=None)
    assert found["matrix_flops_per_second"] == {}


def test_what_something_else_disturbs_all_the_time_is_not_given(monkeypatch):
    monkeypatch.setattr(device_peaks, "_BUSY", 100.0)  # no run has so many cores
    found = measure_peaks(CPU, ["fp32"], memory_bytes=2**30, shape=None)
    assert found == {
        "matrix_flops_per_second": {},
        "layer_flops_per_second": {},
        "bandwidth_bytes_per_second": None,
        "operator_seconds": None,
    }


def test_the_setting_of_tf32_is_left_as_it_was():
    before = torch.get_float32_matmul_precision()
    measure_peaks(CPU, ["fp32"], memory_bytes=2**30, shape=None)
    assert torch.get_float32_matmul_precision() == before
