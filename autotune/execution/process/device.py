"""Identifies devices without a CUDA context, and measures the size of a new context on them."""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from autotune.errors import DeviceDisturbed, InvalidInput, TrialLost
from autotune.execution.server.forked import ForkFailed, run_in_fork
from autotune.execution.server.infrastructure import machine_failure_behind
from autotune.memory.context import NvmlContext, in_use_bytes, touch
from autotune.memory.nvml import NvmlDevice, driver_version, find_device, open_device
from autotune.shipped.device_name import device_name
from autotune.spec.result import DeviceInfo
from autotune.system.allocator_settings import kept_settings
from autotune.units import format_size

_IDLE_CUDA_BYTES = 1024**3
"""A GPU with less memory in use than this, including the driver's, counts as free."""

_AGREE_BYTES = 16 * 1024**2
"""Two measurements of a new context that differ by at most this are accepted: no other process
started or ended between them."""
_MOST_MEASUREMENTS = 5

_MEASURED_WITH = (
    "autotune",
    "numpy",
    "triton",
    "transformers",
    "accelerate",
    "kernels",
    "flash-attn",
    "xformers",
    "causal-conv1d",
    "mamba-ssm",
    "flash-linear-attention",
    "peft",
    "bitsandbytes",
    "torchao",
    "deepspeed",
)
"""Packages, apart from torch, whose code a trial of a model that autotune builds may run, if they
are installed: another release may compute other numbers, need other memory or run at another
speed. Those that a user's code imports are part of its workload."""

_CUDA_DOES_NOT_START = (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError)
"""What torch raises where NVML lists GPUs that the driver does not let it use."""


# -- which device ----------------------------------------------------------------------------------


def identify(device: str | None) -> DeviceInfo:
    """Returns what `device` is; None is the first CUDA device, else the CPU.

    Creates no CUDA context, but initializes the driver: a process that is forked afterwards cannot
    use CUDA. Raises InvalidInput for a device that does not exist.
    """
    if not device:
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    if chosen.type == "cuda":
        return _cuda_info(chosen.index or 0)
    return _cpu_info()


def all_devices() -> list[DeviceInfo]:
    """Returns every device that this torch can use: the CUDA devices in order, then the CPU.

    Where CUDA does not start, only the CPU is returned, with a note that says why.
    """
    try:
        gpus = [_cuda_info(index) for index in range(torch.cuda.device_count())]
        return [*gpus, _cpu_info()]
    except _CUDA_DOES_NOT_START as error:
        why = str(error).strip().partition("\n")[0]
        return [replace(_cpu_info(), notes=(f"there are GPUs, but CUDA does not start: {why}",))]


def _cpu_info() -> DeviceInfo:
    return DeviceInfo(
        device="cpu",
        name=device_name("cpu"),
        total_memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        versions=_versions(),
    )


def _cuda_info(index: int) -> DeviceInfo:
    name = f"cuda:{index}"
    count = torch.cuda.device_count()
    if index >= count:
        found = ", ".join(f"cuda:{i}" for i in range(count))
        if not found:
            found = "no CUDA device"
        raise InvalidInput(
            f"there is no device {name}", hint=f"this torch sees {found}; cpu is always there"
        )
    properties = torch.cuda.get_device_properties(index)
    nvml = find_device(str(properties.uuid))
    driver = driver_version()
    versions = {**_versions(), "cuda": str(torch.version.cuda)}
    if driver:
        versions["driver"] = driver
    if settings := kept_settings():
        versions["allocator"] = settings
    info = DeviceInfo(
        device=name,
        name=properties.name,
        total_memory_bytes=properties.total_memory,
        versions=versions,
        uuid=f"GPU-{properties.uuid}",
        compute_capability=f"{properties.major}.{properties.minor}",
        shares_host_memory=bool(properties.is_integrated),
    )
    if isinstance(nvml, str):
        return replace(info, notes=(f"{nvml}: {_unknown_without_nvml(driver)}",))
    return replace(
        info,
        uuid=nvml.uuid,
        is_known_to_nvml=True,
        compute_mode=nvml.compute_mode(),
        others=_other_users(nvml),
        notes=tuple(_notes_by_nvml(name, nvml)),
    )


def _unknown_without_nvml(driver: str | None) -> str:
    unknown = [
        "how busy the device is",
        "which processes use it",
        "whether it is in exclusive-process mode",
    ]
    if driver is None:
        unknown.append("the driver's version")
    return (
        f"{', '.join(unknown[:-1])} and {unknown[-1]} are not known, "
        "and memory is what CUDA says is in use"
    )


def _notes_by_nvml(name: str, nvml: NvmlDevice) -> list[str]:
    notes = []
    if nvml.compute_mode() == "exclusive-process":
        notes.append(
            f"{name} is in exclusive-process mode: a trial is lost where another program has the "
            "device, and none gets it during a trial (nvidia-smi -c DEFAULT ends the mode)"
        )
    if nvml.is_slice:
        notes.append(
            f"{name} is a slice of a GPU (MIG): what runs on the other slices may slow it down "
            "and is not seen here"
        )
    elif nvml.utilization_percent() is None:
        notes.append(f"how busy {name} is, NVML does not say")
    return notes


def _other_users(nvml: NvmlDevice) -> str:
    """Returns a sentence about other processes on the device; empty where it is idle."""
    used_bytes = nvml.used_bytes()
    busy_percent = nvml.utilization_percent()
    if used_bytes < _IDLE_CUDA_BYTES and (busy_percent or 0) < 10:
        return ""
    busy = "" if busy_percent is None else f" and {busy_percent} % of its time"
    return f"{format_size(used_bytes)} of its memory{busy} are in use"


# -- the size of a new context ---------------------------------------------------------------------


def with_context_size(info: DeviceInfo) -> DeviceInfo:
    """Returns a CUDA device's `info` with the size of a new context in bytes.

    Without NVML, it also gets the memory that other processes use. Call it in a process that has
    not used CUDA and that has a slot on the device: each measurement runs in a fork. Where no two
    measurements agree, the size stays unknown, and a note says so. Raises InvalidInput where no
    process may use the device.
    """
    if info.compute_mode == "prohibited":
        raise InvalidInput(
            f"{info.device} is in prohibited mode: no process may use it",
            hint="nvidia-smi -c DEFAULT ends the mode; or use another --device",
        )
    if info.shares_host_memory and not info.is_known_to_nvml:
        note = _NOT_COUNTED.format(device=info.device)
        return replace(info, context_bytes=0, notes=(*info.notes, note))
    device = torch.device(info.device)
    uuid = info.uuid
    if uuid is not None and info.is_known_to_nvml:
        names_processes = []

        def measure() -> int:
            size_bytes, is_named = _on_device(device, lambda: _new_context_by_nvml(device, uuid))
            names_processes.append(is_named)
            return int(size_bytes)

        measured = measure_repeatedly(measure)
        notes = []
        if names_processes and not any(names_processes):
            notes.append(_NO_PROCESS_NAMES.format(device=info.device))
        return _with_size(info, measured, notes=notes)
    used_before = []

    def measure_by_cuda() -> int:
        size_bytes, used_bytes = _new_context_by_cuda(device)
        used_before.append(used_bytes)
        return size_bytes

    measured = measure_repeatedly(measure_by_cuda)
    info = _with_size(info, measured, notes=[])
    if used_before and info.context_bytes is not None:
        # One context of those in use is that of the process that watched.
        others_bytes = used_before[-1] - info.context_bytes
        if others_bytes >= _IDLE_CUDA_BYTES:
            others = f"{format_size(others_bytes)} of its memory are in use"
            return replace(info, others=others)
    return info


_NOT_COUNTED = (
    "the memory of {device} is the host's: what the CUDA context takes of it cannot be told from "
    "the rest and is not counted; the cap is compared with what torch reserves"
)
_NO_PROCESS_NAMES = (
    "NVML names no processes on {device}, as in a container: memory that another one takes during "
    "a trial counts as the trial's, and memory that it gives back may hide as much that the "
    "trial's kernels take"
)


@dataclass(frozen=True, kw_only=True)
class RepeatedMeasurement:
    """A size that two measurements agree on, or why there is none."""

    size_bytes: int | None
    """None where no two measurements agree."""
    why: str = ""
    """Why there is no size."""


def measure_repeatedly(measure: Callable[[], int]) -> RepeatedMeasurement:
    """Calls `measure` until two results, in bytes, agree.

    A measurement that another process disturbed is unlikely to occur twice.
    """
    sizes: list[int] = []
    found: list[str] = []
    for _ in range(_MOST_MEASUREMENTS):
        try:
            size_bytes = measure()
        except DeviceDisturbed:
            found.append("nothing")
            continue
        except ForkFailed as error:
            return RepeatedMeasurement(size_bytes=None, why=str(error))
        if size_bytes > 0 and any(abs(size_bytes - earlier) <= _AGREE_BYTES for earlier in sizes):
            return RepeatedMeasurement(size_bytes=size_bytes)
        sizes.append(size_bytes)
        found.append(format_size(size_bytes))
    why = (
        f"of {_MOST_MEASUREMENTS} measurements, between which other processes began or ended, "
        f"none agree: {', '.join(found)}"
    )
    return RepeatedMeasurement(size_bytes=None, why=why)


def _with_size(info: DeviceInfo, measured: RepeatedMeasurement, *, notes: list[str]) -> DeviceInfo:
    if measured.size_bytes is None:
        note = f"the size of a CUDA context on {info.device} could not be measured: {measured.why}"
        notes = [*notes, note]
    return replace(info, context_bytes=measured.size_bytes, notes=(*info.notes, *notes))


def _on_device(device: torch.device, run: Callable[[], Any]) -> Any:
    """Calls `run_in_fork`. Raises TrialLost where the device cannot be used at all."""
    try:
        return run_in_fork(run)
    except ForkFailed as error:
        if machine_failure_behind(error, device_type="cuda") is None:
            raise
        hint = "see in nvidia-smi who has it; the same command begins again"
        raise TrialLost(f"{device} cannot be used: {error}", hint=hint) from error


def _new_context_by_nvml(device: torch.device, uuid: str) -> tuple[int, bool]:
    """Returns the size of this process's new context, and whether NVML lists any processes."""
    nvml = open_device(uuid)
    size_bytes = NvmlContext(device, nvml=nvml, expected_bytes=None).size_bytes()
    return size_bytes, bool(nvml.processes())


def _new_context_by_cuda(device: torch.device) -> tuple[int, int]:
    """Returns the size of a forked process's new context, and the memory in use before it.

    A second process observes it, because CUDA reports the memory in use only to a process that has
    a context. The memory in use before therefore includes the context of that second process.
    """
    go_read, go_write = os.pipe()
    there_read, there_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(go_write)
            os.close(there_read)
            if os.read(go_read, 1):
                touch(device)
                os.write(there_write, b"%d" % torch.cuda.memory_reserved(device))
                os.read(go_read, 1)  # until the other end is closed
        finally:
            os._exit(0)
    os.close(there_write)

    def watch() -> tuple[int, int]:
        touch(device)
        own_bytes = torch.cuda.memory_reserved(device)
        before_bytes = in_use_bytes(device)
        os.write(go_write, b"1")
        reserved = os.read(there_read, 64)
        if not reserved:
            raise RuntimeError("two processes could not use the device at the same time")
        return in_use_bytes(device) - before_bytes - int(reserved), before_bytes - own_bytes

    try:
        size_bytes, before_bytes = _on_device(device, watch)
    finally:
        os.close(go_write)
        os.close(there_read)
        os.waitpid(pid, 0)
        os.close(go_read)
    return int(size_bytes), int(before_bytes)


# -- versions and names ----------------------------------------------------------------------------


def _versions() -> dict[str, str]:
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
    }
    for package in _MEASURED_WITH:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            pass  # an extra
    return versions
