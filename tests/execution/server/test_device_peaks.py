"""What a device can do at most, measured on this machine's CPU."""

import pytest
import torch

from autotune.execution.server import device_peaks
from autotune.execution.server.device_peaks import measure_peaks

CPU = torch.device("cpu")


@pytest.fixture
def undisturbed(monkeypatch):
    """Count runs as undisturbed that another test delays."""
    monkeypatch.setattr(device_peaks, "_BUSY", 0.0)


def test_each_number_format_is_measured_once(undisturbed):
    found = measure_peaks(CPU, ["fp32", "bf16-mixed", "bf16-true"], memory_bytes=2**33)
    assert found["matrix_flops_per_second"].keys() == {"fp32", "bf16"}
    assert all(rate > 0 for rate in found["matrix_flops_per_second"].values())
    assert found["bandwidth_bytes_per_second"] > 0


def test_a_format_that_the_device_cannot_multiply_is_left_out(undisturbed, monkeypatch):
    def not_here(*_, **__):
        raise NotImplementedError

    monkeypatch.setattr(torch, "_scaled_mm", not_here)
    found = measure_peaks(CPU, ["fp8"], memory_bytes=2**30)
    assert found["matrix_flops_per_second"] == {}


def test_what_something_else_disturbs_all_the_time_is_not_given(monkeypatch):
    monkeypatch.setattr(device_peaks, "_BUSY", 100.0)  # no run has so many cores
    found = measure_peaks(CPU, ["fp32"], memory_bytes=2**30)
    assert found == {"matrix_flops_per_second": {}, "bandwidth_bytes_per_second": None}


def test_the_setting_of_tf32_is_left_as_it_was():
    before = torch.get_float32_matmul_precision()
    measure_peaks(CPU, ["fp32"], memory_bytes=2**30)
    assert torch.get_float32_matmul_precision() == before
