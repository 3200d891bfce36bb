"""Names the device of a training."""

import platform
from pathlib import Path


def cpu_name() -> str:
    """Returns the name of the CPU's model, such as `AMD EPYC`."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []  # not Linux
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def device_name(device_type: str) -> str:
    """Returns the vendor's name of a CUDA device; of a CPU also the number of torch's threads."""
    import torch

    if device_type == "cuda":
        return torch.cuda.get_device_name()
    return f"{cpu_name()}, {torch.get_num_threads()} threads"
