"""Requests that NVML cannot answer, as on a machine without a GPU, raise no error."""

import pytest

from autotune.memory import nvml

NOWHERE = "00000000-0000-0000-0000-000000000000"


def test_a_device_that_nvml_does_not_know_gives_the_reason():
    assert "NVML" in nvml.find_device(NOWHERE)


def test_a_driver_whose_version_is_not_known_is_no_error():
    assert nvml.driver_version() is None or isinstance(nvml.driver_version(), str)


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ["GPU-a", "GPU-b1", "GPU-b2"]),
        ("", []),
        ("-1", []),
        ("2,0", ["GPU-b2", "GPU-a"]),
        ("GPU-b2", ["GPU-b2"]),
        ("GPU-b", []),
        ("1,7,0", ["GPU-b1"]),
    ],
)
def test_only_the_gpus_that_cuda_sees_are_visible(visible, found, monkeypatch):
    """CUDA ignores an ambiguous or unknown name, and all that follow it."""
    devices = [nvml.NvmlDevice(uuid=f"GPU-{name}", handle=None) for name in ("a", "b1", "b2")]
    monkeypatch.setattr(nvml, "all_devices", lambda: devices)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [device.uuid for device in nvml.visible_devices()] == found
