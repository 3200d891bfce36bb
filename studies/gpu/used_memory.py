"""What NVML says of the memory of the device that torch means: of all processes together, without a context."""

import os
from typing import Any


def nvml_handle(device: str) -> Any:
    """NVML's handle of torch's `cuda:1`, which counts only the devices in CUDA_VISIBLE_DEVICES. Raises NVMLError."""
    import pynvml

    pynvml.nvmlInit()
    index = int(device.partition(":")[2] or 0)
    visible = [
        name.strip()
        for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if name.strip()
    ]
    name = visible[index] if index < len(visible) else str(index)
    return (
        pynvml.nvmlDeviceGetHandleByIndex(int(name))
        if name.isdigit()
        else pynvml.nvmlDeviceGetHandleByUUID(name)
    )


def used_bytes(device: str) -> int | None:
    """None where there is no NVML."""
    import pynvml

    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(nvml_handle(device)).used)
    except pynvml.NVMLError:
        return None
