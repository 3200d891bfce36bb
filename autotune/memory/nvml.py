"""What NVML, the driver's own monitor, says of a GPU: without a CUDA context and for all processes together.

NVML is not everywhere: some containers lack its library, Jetson has none of it, and after an update
of the driver it refuses until the machine is started again. It may also know no memory of a device
(GPUs that share the host's).
"""

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
    """A GPU, or a slice of one (MIG), whose memory NVML knows.

    NVML stays open in this process: without persistence mode a GPU that nobody has open would lose
    its state between two readings.
    """

    uuid: str
    """`GPU-...`, or `MIG-...` for a slice."""
    handle: Any

    def used_bytes(self) -> int:
        """Returns the bytes of device memory that any process uses.

        Raises TrialLost where NVML no longer says.
        """
        with _answered(self.uuid):
            return int(pynvml.nvmlDeviceGetMemoryInfo(self.handle).used)

    def processes(self) -> Mapping[int, int | None]:
        """Returns {pid: bytes of device memory} of all that compute or draw there; None where the driver does not say.

        Empty where NVML names none. In a container these may be the host's pids, or none at all.
        """
        held: dict[int, int | None] = {}
        for ask in (
            pynvml.nvmlDeviceGetComputeRunningProcesses,
            pynvml.nvmlDeviceGetGraphicsRunningProcesses,
        ):
            with suppress(
                pynvml.NVMLError, pynvml.NVMLLibraryMismatchError
            ):  # the latter from a driver without it
                # A process that does both is in both lists, each time with all that it holds.
                held |= {int(one.pid): one.usedGpuMemory for one in ask(self.handle)}
        return held

    def utilization_percent(self) -> int | None:
        """Returns the share of the last sample period in which a kernel ran; None where the driver does not say."""
        try:
            return int(pynvml.nvmlDeviceGetUtilizationRates(self.handle).gpu)
        except pynvml.NVMLError:  # a slice, a virtual GPU
            return None

    def compute_mode(self) -> ComputeMode | None:
        """Returns how many processes may use the device at a time; None where the driver does not say."""
        try:
            return _COMPUTE_MODES.get(int(pynvml.nvmlDeviceGetComputeMode(self.handle)))
        except pynvml.NVMLError:
            return None

    @property
    def is_slice(self) -> bool:
        return self.uuid.startswith("MIG-")


def find_device(cuda_uuid: str) -> NvmlDevice | str:
    """Returns the device with CUDA's UUID (without a prefix), or why NVML does not know it or its memory."""
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

    Raises TrialLost where NVML knew it and does no longer.
    """
    with _answered(uuid):
        pynvml.nvmlInit()
        return NvmlDevice(uuid=uuid, handle=pynvml.nvmlDeviceGetHandleByUUID(uuid))


def driver_version() -> str | None:
    """Returns the driver's version; None where NVML does not say."""
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
def _answered(uuid: str) -> Iterator[None]:
    try:
        yield
    except pynvml.NVMLError as error:
        hint = "see whether nvidia-smi still answers; the same command goes on from here"
        raise TrialLost(
            f"NVML no longer says how much memory of {uuid} is in use: {error}", hint=hint
        ) from error
