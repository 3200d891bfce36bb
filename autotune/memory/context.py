"""What this process holds on a CUDA device outside the caching allocator: the context and the kernels it has loaded.

No interface says it directly. It is the growth of the device's used memory since before the context was created, less
what the allocator has reserved, and so it is only right while no other process begins, ends, or changes what it holds.
Three things tell that one did:

- A new context has the same size whenever it is created. The probe of the device has measured it (`fresh_context_bytes`
  in processes of their own, until two agreed), and a trial whose own new context is far from that was disturbed.
- NVML names the processes on the device and what they hold, in most places. In a container it may name none, or name
  them by the host's numbers.
- What a context holds does not shrink.

Disturbed trials end with DeviceDisturbed and say nothing of their configuration.

Without NVML the used bytes come from `torch.cuda.mem_get_info`, which needs a context itself: what was used before it
is then what is used after it, less the size of a new context.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from autotune.errors import DeviceDisturbed
from autotune.memory.nvml import NvmlDevice
from autotune.quantities import format_size

TOLERANCE_BYTES = 32 * 1024**2
"""Differences up to this are no disturbance: the driver's own bookkeeping, a desktop that redraws. The context of any
other process is ten times as large."""


class Context(Protocol):
    """Of this process, on one device."""

    def size_bytes(self) -> int:
        """Returns what is held outside the allocator now. Raises DeviceDisturbed where that cannot be known."""


def create_context(
    device: torch.device, *, nvml: NvmlDevice | None, expected_bytes: int | None, shares_device: bool = False
) -> Context:
    """Creates the CUDA context of this process, which must not have touched the device.

    `nvml` is the device as NVML knows it; None: it does not. `expected_bytes`: the size of a new context, as the
    probe found it; None: it could not be found. `shares_device`: other trials run on it at the same time. Raises
    DeviceDisturbed.
    """
    if shares_device:
        return SharedDeviceContext(device, expected_bytes=expected_bytes)
    if nvml is None:
        return MemGetInfoContext(device, expected_bytes=expected_bytes)
    return NvmlContext(device, nvml=nvml, expected_bytes=expected_bytes)


def touch(device: torch.device) -> None:
    """Creates the context, in the same way wherever its size matters."""
    torch.cuda.set_device(device)  # compiled code and a bare "cuda" go to this device, too
    torch.empty(1, device=device)
    torch.cuda.synchronize(device)


def fresh_context_bytes(device: torch.device, *, nvml: NvmlDevice) -> int:
    """Creates the context of this process and returns its size, right only if nobody else began or ended meanwhile."""
    before_bytes = nvml.used_bytes()
    touch(device)
    return nvml.used_bytes() - before_bytes - torch.cuda.memory_reserved(device)


def in_use_bytes(device: torch.device) -> int:
    """Returns what all processes use of the device, as CUDA says it. Needs a context."""
    torch.cuda.synchronize(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes


class NvmlContext:
    def __init__(self, device: torch.device, *, nvml: NvmlDevice, expected_bytes: int | None) -> None:
        self._device, self._nvml = device, nvml
        self._used_before_bytes, processes = nvml.used_bytes(), nvml.processes()
        touch(device)
        self._first_bytes = self._grown_bytes()
        check_new_context(self._first_bytes, expected_bytes=expected_bytes, device=str(device))
        self._processes = Processes.after_joining(processes, nvml.processes())

    def size_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        size_bytes = self._grown_bytes()
        self._processes.check(self._nvml.processes(), device=str(self._device))
        check_growth(size_bytes, first_bytes=self._first_bytes, device=str(self._device))
        return size_bytes

    def _grown_bytes(self) -> int:
        return self._nvml.used_bytes() - self._used_before_bytes - torch.cuda.memory_reserved(self._device)


class MemGetInfoContext:
    """Where the size of a new context is not known either, everything in use counts as this process's: never less."""

    def __init__(self, device: torch.device, *, expected_bytes: int | None) -> None:
        self._device = device
        touch(device)
        outside_bytes = self._outside_bytes()
        self._first_bytes = outside_bytes if expected_bytes is None else expected_bytes
        check_growth(outside_bytes, first_bytes=self._first_bytes, device=str(device))
        self._used_before_bytes = max(0, outside_bytes - self._first_bytes)

    def size_bytes(self) -> int:
        size_bytes = self._outside_bytes() - self._used_before_bytes
        check_growth(size_bytes, first_bytes=self._first_bytes, device=str(self._device))
        return size_bytes

    def _outside_bytes(self) -> int:
        return in_use_bytes(self._device) - torch.cuda.memory_reserved(self._device)


class SharedDeviceContext:
    """On a device that several trials share nothing can be measured of one: its context counts as a new one."""

    def __init__(self, device: torch.device, *, expected_bytes: int | None) -> None:
        assert expected_bytes is not None, "a search of several trials a device is refused without it"
        touch(device)
        self._size_bytes = expected_bytes

    def size_bytes(self) -> int:
        return self._size_bytes


# -- what tells of other processes -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Processes:
    """The processes on a device once this one's context was there. NVML may not know this one by its own number."""

    others: Mapping[int, int | None]
    """{pid: bytes, None where the driver does not say}."""
    own: frozenset[int] = frozenset()
    """The numbers of this process: its pid, or, where NVML does not name that, what joined while it did."""
    is_known: bool = True
    """Whether NVML names any."""

    @classmethod
    def after_joining(cls, before: Mapping[int, int | None], after: Mapping[int, int | None]) -> "Processes":
        pid = os.getpid()
        own = frozenset([pid]) if pid in after else frozenset(after.keys() - before.keys())
        return cls(others=_without(after, own), own=own, is_known=bool(after))

    def check(self, now: Mapping[int, int | None], *, device: str) -> None:
        """Raises DeviceDisturbed where a process has begun or ended on the device, or holds other memory than it did.

        A list that has become empty says nothing: this process is on the device itself.
        """
        if not self.is_known or not now:
            return
        others = _without(now, self.own)
        for pid in sorted(others.keys() - self.others.keys()):
            raise disturbed(f"process {pid} began on {device} during the trial")
        for pid in sorted(self.others.keys() - others.keys()):
            raise disturbed(f"process {pid} ended on {device} during the trial")
        for pid, size_bytes in others.items():
            held_bytes = self.others[pid]
            if size_bytes is None or held_bytes is None or abs(size_bytes - held_bytes) <= TOLERANCE_BYTES:
                continue
            raise disturbed(
                f"process {pid} held {format_size(held_bytes)} of {device} when the trial began and "
                f"{format_size(size_bytes)} later"
            )


def check_new_context(size_bytes: int, *, expected_bytes: int | None, device: str) -> None:
    """Raises DeviceDisturbed where a new context is far from the size that the probe has measured."""
    if expected_bytes is None and size_bytes > 0:
        return
    if expected_bytes is not None and is_near(size_bytes, expected_bytes):
        return
    expected = "more than nothing" if expected_bytes is None else format_size(expected_bytes)
    raise disturbed(
        f"creating the CUDA context changed what is in use of {device} by {format_size(size_bytes)}, not {expected}"
    )


def check_growth(size_bytes: int, *, first_bytes: int, device: str) -> None:
    """Raises DeviceDisturbed where a context seems to have shrunk, which none does."""
    if size_bytes < first_bytes - TOLERANCE_BYTES:
        shrunk = f"{format_size(first_bytes)} to {format_size(size_bytes)}"
        raise disturbed(f"the CUDA context on {device} seems to have gone from {shrunk}")


def is_near(size_bytes: int, expected_bytes: int) -> bool:
    return abs(size_bytes - expected_bytes) <= TOLERANCE_BYTES


def disturbed(what: str) -> DeviceDisturbed:
    return DeviceDisturbed(
        f"{what}: another process began or ended on the device, or changed what it holds",
        hint="end what else uses the device, see nvidia-smi; the same command goes on from here",
    )


def _without(processes: Mapping[int, int | None], own: frozenset[int]) -> dict[int, int | None]:
    """The processes that are not this trial's: neither itself nor what it has started, which is in its session."""
    return {pid: size_bytes for pid, size_bytes in processes.items() if pid not in own and not _is_of_this_trial(pid)}


def _is_of_this_trial(pid: int) -> bool:
    try:
        return os.getsid(pid) == os.getsid(0)
    except OSError:  # it has ended, is another user's, or its number is that of another namespace
        return False
