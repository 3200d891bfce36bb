"""What NVML, the driver's own monitor, says of a GPU: without a CUDA context and for all processes together."""

from collections.abc import Iterator
from contextlib import contextmanager

import pynvml


@contextmanager
def _handle(uuid: str) -> Iterator[object]:
    pynvml.nvmlInit()
    try:
        yield pynvml.nvmlDeviceGetHandleByUUID(uuid)
    finally:
        pynvml.nvmlShutdown()


def used_bytes(uuid: str) -> int:
    """Bytes of device memory that are in use by anybody, on the GPU with this UUID (`GPU-...`)."""
    with _handle(uuid) as handle:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def utilization_percent(uuid: str) -> int | None:
    """Share of the last sample period in which a kernel ran; None where the driver does not say (MIG, vGPU)."""
    try:
        with _handle(uuid) as handle:
            return int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except pynvml.NVMLError:
        return None


def compute_capability() -> tuple[int, int] | None:
    """Of the first GPU, such as (9, 0) for Hopper; None where there is none."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(0))
        return int(major), int(minor)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def driver_version() -> str:
    pynvml.nvmlInit()
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()
