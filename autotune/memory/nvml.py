"""Reads from NVML, the driver's monitoring library, how a GPU is used by all processes together.

This needs no CUDA context. NVML is not available everywhere: some containers lack its library,
Jetson does not have it, and after an update of the driver it fails until the machine is restarted.
It may also report no memory for a device (GPUs that share the host's memory).
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import pynvml

from autotune.errors import TrialLost

ComputeMode = Literal["default", "exclusive-process", "prohibited"]

_COMPUTE_MODES: Mapping[int, ComputeMode] = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: "default",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive-process",
    pynvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
}


@dataclass(frozen=True, kw_only=True)
class NvmlDevice:
    """A GPU, or a slice of one (MIG), whose memory NVML reports.

    NVML stays open in this process: without persistence mode a GPU that no process has open would
    lose its state between two readings.
    """

    uuid: str
    """`GPU-...`, or `MIG-...` for a slice."""
    handle: Any

    def used_bytes(self) -> int:
        """Returns the bytes of device memory that all processes use.

        Raises TrialLost where NVML no longer reports them.
        """
        with _translate_errors(self.uuid):
            return int(pynvml.nvmlDeviceGetMemoryInfo(self.handle).used)

    def processes(self) -> Mapping[int, int | None]:
        """Returns {pid: bytes} of all processes that compute or draw on the device.

        The bytes are None where the driver does not report them. Empty where NVML lists no process.
        In a container the pids may be the host's, or missing.
        """
        held: dict[int, int | None] = {}
        for list_processes in (
            pynvml.nvmlDeviceGetComputeRunningProcesses,
            pynvml.nvmlDeviceGetGraphicsRunningProcesses,
        ):
            # NVMLLibraryMismatchError comes from a driver that does not have the function.
            with suppress(pynvml.NVMLError, pynvml.NVMLLibraryMismatchError):
                # A process that does both is in both lists, each time with all that it holds.
                for process in list_processes(self.handle):
                    held[int(process.pid)] = process.usedGpuMemory
        return held

    def utilization_percent(self) -> int | None:
        """Returns the percentage of the last sample period with a running kernel, or None."""
        try:
            return int(pynvml.nvmlDeviceGetUtilizationRates(self.handle).gpu)
        except pynvml.NVMLError:  # a slice, a virtual GPU
            return None

    def compute_mode(self) -> ComputeMode | None:
        """Returns how many processes may use the device at a time; None if unknown."""
        try:
            return _COMPUTE_MODES.get(int(pynvml.nvmlDeviceGetComputeMode(self.handle)))
        except pynvml.NVMLError:
            return None

    @property
    def is_slice(self) -> bool:
        return self.uuid.startswith("MIG-")


def find_device(cuda_uuid: str) -> NvmlDevice | str:
    """Returns the device with CUDA's UUID (no prefix), or why NVML cannot report its memory."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"NVML does not start ({error})"
    for uuid in (f"GPU-{cuda_uuid}", f"MIG-{cuda_uuid}"):
        with suppress(pynvml.NVMLError):
            device = NvmlDevice(uuid=uuid, handle=pynvml.nvmlDeviceGetHandleByUUID(uuid))
            pynvml.nvmlDeviceGetMemoryInfo(device.handle)
            return device
    return f"NVML knows no memory of a device {cuda_uuid}"


def open_device(uuid: str) -> NvmlDevice:
    """Returns the device with NVML's UUID, prefix included.

    Raises TrialLost where NVML no longer knows it.
    """
    with _translate_errors(uuid):
        pynvml.nvmlInit()
        return NvmlDevice(uuid=uuid, handle=pynvml.nvmlDeviceGetHandleByUUID(uuid))


def driver_version() -> str | None:
    """Returns the driver's version; None where NVML does not report it."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


@contextmanager
def _translate_errors(uuid: str) -> Iterator[None]:
    try:
        yield
    except pynvml.NVMLError as error:
        hint = "check that nvidia-smi still works; run the same command again to continue"
        raise TrialLost(
            f"NVML no longer reports how much memory of {uuid} is in use: {error}", hint=hint
        ) from error


def all_devices() -> list[NvmlDevice]:
    """Returns every GPU of this machine; none where NVML is missing or does not work."""
    devices = []
    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            devices.append(NvmlDevice(uuid=str(pynvml.nvmlDeviceGetUUID(handle)), handle=handle))
    except pynvml.NVMLError:
        return devices
    return devices


def visible_devices() -> list[NvmlDevice]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; all of them without it.

    CUDA ignores what follows a device that is not there
    (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables).
    """
    present = all_devices()
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return present
    visible = []
    for name in wanted.split(","):
        named = [
            device
            for index, device in enumerate(present)
            if name.strip() == str(index) or (name and device.uuid.startswith(name.strip()))
        ]
        if len(named) != 1:
            break
        visible += named
    return visible


def name_of(device: NvmlDevice) -> str:
    """Returns the name of a GPU's model, such as `NVIDIA H200`."""
    try:
        return str(pynvml.nvmlDeviceGetName(device.handle))
    except pynvml.NVMLError:
        return device.uuid


def total_bytes(device: NvmlDevice) -> int | None:
    """Returns the memory of a GPU; None for one that shares the host's."""
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(device.handle).total)
    except pynvml.NVMLError:
        return None


def compute_capability(device: NvmlDevice) -> str | None:
    """Returns the compute capability of a GPU, such as 9.0; None where NVML does not report it."""
    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(device.handle)
    except pynvml.NVMLError:
        return None
    return f"{major}.{minor}"
