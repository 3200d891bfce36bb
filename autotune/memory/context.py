"""What this process holds on a CUDA device outside the caching allocator: the context and the kernels it has loaded.

No interface says it directly. It is the growth of the device's used memory since before the context was created, less
what the allocator has reserved and what other processes have taken meanwhile. NVML names those and what they hold, in
most places. In a container it may name none, or name them by the host's numbers; then two things tell that one began or
ended:

- A new context has the same size whenever it is created. The probe of the device has measured it (in processes of their
  own, until two agreed), and a trial whose own new context is far from that was disturbed.
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

MOST_KERNEL_BYTES = 2 * 1024**3
"""What a context is believed to grow by. All kernels of torch and its libraries together take less; what grows by more
is another process that nothing names."""


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
        assert expected_bytes is not None, "a search of several trials a device is refused without it"
        return FixedContext(device, size_bytes=expected_bytes)
    if nvml is None and torch.cuda.get_device_properties(device).is_integrated:
        return FixedContext(device, size_bytes=0)
    if nvml is None:
        return MemGetInfoContext(device, expected_bytes=expected_bytes)
    return NvmlContext(device, nvml=nvml, expected_bytes=expected_bytes)


def touch(device: torch.device) -> None:
    """Creates the context, in the same way wherever its size matters."""
    torch.cuda.set_device(device)  # compiled code and a bare "cuda" go to this device, too
    torch.empty(1, device=device)
    torch.cuda.synchronize(device)


def in_use_bytes(device: torch.device) -> int:
    """Returns what all processes use of the device, as CUDA says it. Needs a context."""
    torch.cuda.synchronize(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes


class NvmlContext:
    def __init__(self, device: torch.device, *, nvml: NvmlDevice, expected_bytes: int | None) -> None:
        self._device, self._nvml = device, nvml
        self._own: frozenset[int] = frozenset()
        """The numbers by which NVML knows this process."""
        self._before = self._look()
        touch(device)
        self._own = own_numbers(self._before.others, nvml.processes(), device=str(device))
        self._first_bytes = self._size_bytes()
        check_new_context(self._first_bytes, expected_bytes=expected_bytes, device=str(device))

    def size_bytes(self) -> int:
        size_bytes = self._size_bytes()
        check_growth(size_bytes, first_bytes=self._first_bytes, device=str(self._device))
        return size_bytes

    def _size_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        now = self._look()
        taken_bytes = growth_of_others(self._before.others, now.others, device=str(self._device))
        return now.used_bytes - self._before.used_bytes - taken_bytes - torch.cuda.memory_reserved(self._device)

    def _look(self) -> "_Use":
        """What is in use, and by which others: read together, as far as NVML can."""
        others = self._others()
        for _ in range(_MOST_LOOKS):
            used_bytes, others_before = self._nvml.used_bytes(), others
            others = self._others()
            if others == others_before:
                return _Use(used_bytes=used_bytes, others=others)
        raise disturbed(f"what other processes hold of {self._device} changed at each of {_MOST_LOOKS} looks")

    def _others(self) -> dict[int, int | None]:
        processes = self._nvml.processes()
        if self._own and not self._own & processes.keys():
            raise disturbed(f"NVML no longer names the processes on {self._device}")
        return {pid: held for pid, held in processes.items() if pid not in self._own and not _is_of_this_trial(pid)}


_MOST_LOOKS = 10


@dataclass(frozen=True, kw_only=True)
class _Use:
    used_bytes: int
    """By all processes."""
    others: Mapping[int, int | None]
    """{pid: bytes} of those that are not this trial's; None where the driver does not say."""


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


class FixedContext:
    """Where nothing can be measured of one process.

    On a device that several trials share the context counts as a new one. On a device whose memory is the host's, what
    is in use is everything on the host, and the context is not counted.
    """

    def __init__(self, device: torch.device, *, size_bytes: int) -> None:
        touch(device)
        self._size_bytes = size_bytes

    def size_bytes(self) -> int:
        return self._size_bytes


# -- what tells of other processes -------------------------------------------------------------------------------


def own_numbers(before: Mapping[int, int | None], after: Mapping[int, int | None], *, device: str) -> frozenset[int]:
    """Returns by which numbers NVML knows this process: its pid, or, in a container, the one that has joined the list.

    Raises DeviceDisturbed where several have, so that nobody knows which.
    """
    if os.getpid() in after:
        return frozenset([os.getpid()])
    joined = frozenset(after.keys() - before.keys())
    if len(joined) > 1:
        raise disturbed(f"{len(joined)} processes began on {device} while the context was created")
    return joined


def growth_of_others(before: Mapping[int, int | None], now: Mapping[int, int | None], *, device: str) -> int:
    """Returns by how many bytes the memory of other processes has grown; {pid: bytes, None where it is not known}.

    Raises DeviceDisturbed where one has come or gone of which it is not known.
    """
    grown_bytes = 0
    for pid in before.keys() | now.keys():
        held_bytes, holds_bytes = before.get(pid, 0), now.get(pid, 0)
        if held_bytes is not None and holds_bytes is not None:
            grown_bytes += holds_bytes - held_bytes
        elif held_bytes is not holds_bytes:
            how = "ended" if pid in before else "began"
            raise disturbed(f"process {pid} {how} on {device}, and the driver does not say what it holds")
    return grown_bytes


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
    """Raises DeviceDisturbed where a context seems to have shrunk, which none does, or to hold more than kernels."""
    if not first_bytes - TOLERANCE_BYTES <= size_bytes <= first_bytes + MOST_KERNEL_BYTES:
        shrunk = f"{format_size(first_bytes)} to {format_size(size_bytes)}"
        raise disturbed(f"the CUDA context on {device} seems to have gone from {shrunk}")


def is_near(size_bytes: int, expected_bytes: int) -> bool:
    return abs(size_bytes - expected_bytes) <= TOLERANCE_BYTES


def disturbed(what: str) -> DeviceDisturbed:
    return DeviceDisturbed(
        f"{what}: another process began or ended on the device, or changed what it holds",
        hint="end what else uses the device, see nvidia-smi; the same command goes on from here",
    )


def _is_of_this_trial(pid: int) -> bool:
    """Whether it is this process or one that it has started, which is in its session."""
    try:
        return os.getsid(pid) == os.getsid(0)
    except OSError:  # it has ended, is another user's, or its number is that of another namespace
        return False
