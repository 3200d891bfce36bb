"""Memory of a torch device as NVML reports it: of all processes, without making a context."""

import os
from typing import Any


def nvml_handle(device: str) -> Any:
    """Returns NVML's handle of a torch device such as `cuda:1`. Raises NVMLError.

    torch counts only the devices in CUDA_VISIBLE_DEVICES.
    """
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
    """Returns the used bytes of the device; None without NVML."""
    import pynvml

    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(nvml_handle(device)).used)
    except pynvml.NVMLError:
        return None
