"""Chooses the memory meter of a device."""

import torch

from autotune.memory.cpu import CpuMeter
from autotune.memory.cuda import CudaMeter
from autotune.memory.meter import MemoryMeter


def make_meter(
    device: torch.device,
    *,
    uuid: str | None,
    cap_bytes: int | None,
    new_context_bytes: int | None = None,
    shares_device: bool = False,
) -> MemoryMeter:
    """Returns the meter for `device`.

    On CUDA `cap_bytes` is enforced from this call on; None sets no limit. `uuid` is NVML's name of
    the device, None where NVML does not know it. `new_context_bytes` is `expected_bytes` of
    `create_context`, and `shares_device` as there. Raises DeviceDisturbed as `create_context` does.
    """
    if device.type == "cuda":
        return CudaMeter(
            device,
            uuid=uuid,
            cap_bytes=cap_bytes,
            new_context_bytes=new_context_bytes,
            shares_device=shares_device,
        )
    return CpuMeter()
