"""Measures what this process holds on a CUDA device outside the caching allocator.

That is the CUDA context with the kernels it has loaded. No interface reports its size. It is the
growth of the device's used memory since before the context was created, minus what the allocator
has reserved, and minus what other processes have allocated in the meantime. NVML usually lists
these processes and what they hold. In a container it may list none, or list them by the host's
pids. Two facts then show what they did:

- A new context always has the same size. The probe of the device has measured it, in separate
  processes until two agreed.
- A context never shrinks.

So memory that another process releases is recognised, and the size of the context stays known
(`new_context_bytes`, `ContextSize`). Memory that another process allocates cannot be distinguished
from the context and counts as part of it, which is the safe side of a cap. Where it is too much for
a context, the trial ends with DeviceDisturbed, which does not count against its configuration.

Without NVML the used bytes come from `torch.cuda.mem_get_info`, which itself needs a context: the
bytes in use before it was created are then those after it, minus the size of a new context.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from autotune.errors import DeviceDisturbed
from autotune.memory.nvml import NvmlDevice
from autotune.units import format_size

TOLERANCE_BYTES = 32 * 1024**2
"""Differences up to this size are ignored: the driver's bookkeeping, a desktop that redraws.
The context of another process is ten times as large."""

MOST_KERNEL_BYTES = 2 * 1024**3
"""The most that a context may grow. All kernels of torch and its libraries together take less;
larger growth comes from another process that NVML does not list."""


class Context(Protocol):
    """The CUDA context of this process on one device."""

    def size_bytes(self) -> int:
        """Returns the bytes held outside the allocator now, never fewer than before.

        Raises DeviceDisturbed where another process made it impossible to know them.
        """


def create_context(
    device: torch.device,
    *,
    nvml: NvmlDevice | None,
    expected_bytes: int | None,
    shares_device: bool = False,
) -> Context:
    """Creates the CUDA context of this process, which must not have touched the device.

    `nvml` is the device in NVML, None where NVML does not know it. `expected_bytes` is the size of
    a new context that the probe measured, None where it could not be measured. `shares_device`:
    other trials run on the device at the same time. Raises DeviceDisturbed.
    """
    if shares_device:
        assert expected_bytes is not None, (
            "a search with several trials on one device is rejected if the size is unknown"
        )
        return FixedContext(device, size_bytes=expected_bytes)
    if nvml is None and torch.cuda.get_device_properties(device).is_integrated:
        return FixedContext(device, size_bytes=0)
    if nvml is None:
        return MemGetInfoContext(device, expected_bytes=expected_bytes)
    return NvmlContext(device, nvml=nvml, expected_bytes=expected_bytes)


def touch(device: torch.device) -> None:
    """Creates the context, always in the same way, so that its size is comparable."""
    torch.cuda.set_device(device)  # compiled code and a bare "cuda" go to this device, too
    torch.empty(1, device=device)
    torch.cuda.synchronize(device)


def in_use_bytes(device: torch.device) -> int:
    """Returns the bytes that all processes use on the device, from CUDA. Needs a context."""
    torch.cuda.synchronize(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes


class NvmlContext:
    """A context whose size is measured with NVML."""

    def __init__(
        self, device: torch.device, *, nvml: NvmlDevice, expected_bytes: int | None
    ) -> None:
        self._device = device
        self._nvml = nvml
        self._own_pids: frozenset[int] = frozenset()
        """The pids by which NVML lists this process."""
        self._before = self._read_usage()
        touch(device)
        self._own_pids = pids_of_this_process(
            self._before.others, nvml.processes(), device=str(device)
        )
        grown_bytes = self._growth_bytes()
        first_bytes = new_context_bytes(
            grown_bytes, expected_bytes=expected_bytes, device=str(device)
        )
        self._size = ContextSize(first_bytes, seen_bytes=grown_bytes, device=str(device))

    def size_bytes(self) -> int:
        return self._size.at(self._growth_bytes())

    def _growth_bytes(self) -> int:
        """Returns the growth of the used bytes, without the allocator and other processes."""
        torch.cuda.synchronize(self._device)
        now = self._read_usage()
        taken_bytes = growth_of_others(self._before.others, now.others, device=str(self._device))
        return (
            now.used_bytes
            - self._before.used_bytes
            - taken_bytes
            - torch.cuda.memory_reserved(self._device)
        )

    def _read_usage(self) -> "_DeviceUsage":
        """Returns the used bytes and the other processes, read again until both are consistent.

        Raises DeviceDisturbed if the other processes change all the time.
        """
        others = self._other_processes()
        for _ in range(_MOST_READINGS):
            others_before = others
            used_bytes = self._nvml.used_bytes()
            others = self._other_processes()
            if others == others_before:
                return _DeviceUsage(used_bytes=used_bytes, others=others)
        raise disturbed(
            f"the memory of other processes on {self._device} changed in each of "
            f"{_MOST_READINGS} readings"
        )

    def _other_processes(self) -> dict[int, int | None]:
        processes = self._nvml.processes()
        if self._own_pids and not self._own_pids & processes.keys():
            raise disturbed(f"NVML no longer lists the processes on {self._device}")
        return {
            pid: held
            for pid, held in processes.items()
            if pid not in self._own_pids and not _is_of_this_trial(pid)
        }


_MOST_READINGS = 10


@dataclass(frozen=True, kw_only=True)
class _DeviceUsage:
    used_bytes: int
    """Bytes that all processes use."""
    others: Mapping[int, int | None]
    """{pid: bytes} of processes that do not belong to this trial; None where the driver does not
    report the bytes."""


class MemGetInfoContext:
    """A context whose size is measured without NVML, by `torch.cuda.mem_get_info`.

    Where the size of a new context is not known either, everything in use counts as this
    process's, which never underestimates it.
    """

    def __init__(self, device: torch.device, *, expected_bytes: int | None) -> None:
        self._device = device
        touch(device)
        outside_bytes = self._outside_bytes()
        first_bytes = outside_bytes if expected_bytes is None else expected_bytes
        self._size = ContextSize(first_bytes, seen_bytes=outside_bytes, device=str(device))

    def size_bytes(self) -> int:
        return self._size.at(self._outside_bytes())

    def _outside_bytes(self) -> int:
        return in_use_bytes(self._device) - torch.cuda.memory_reserved(self._device)


class FixedContext:
    """A context of an assumed size, where that of one process cannot be measured.

    On a device that several trials share, every context counts as a new one. On a device that uses
    the host's memory, the used bytes are those of the whole host, and the context is not counted.
    """

    def __init__(self, device: torch.device, *, size_bytes: int) -> None:
        touch(device)
        self._size_bytes = size_bytes

    def size_bytes(self) -> int:
        return self._size_bytes


# -- changes by other processes --------------------------------------------------------------------


class ContextSize:
    """Follows the size of a context through readings of the used bytes of its device.

    A context never shrinks. Bytes missing in a reading were released by another process, and are
    added to this reading and to all later ones. Kernels that are loaded between the same two
    readings are missed, up to the bytes released.
    """

    def __init__(self, first_bytes: int, *, seen_bytes: int, device: str) -> None:
        """`first_bytes` is the size of the new context; the first reading was `seen_bytes`."""
        self._first_bytes = first_bytes
        self._size_bytes = first_bytes
        self._unseen_bytes = first_bytes - seen_bytes
        """Added to each reading. Negative where readings include what was in use before."""
        self._device = device

    def at(self, seen_bytes: int) -> int:
        """Returns the size after a reading of `seen_bytes`, never less than after the one before.

        Raises DeviceDisturbed where the growth is more than all kernels take.
        """
        size_bytes = seen_bytes + self._unseen_bytes
        missing_bytes = self._size_bytes - size_bytes
        if missing_bytes > TOLERANCE_BYTES:
            self._unseen_bytes += missing_bytes
        if size_bytes > self._first_bytes + MOST_KERNEL_BYTES:
            grown = f"{format_size(self._first_bytes)} to {format_size(size_bytes)}"
            raise disturbed(f"the CUDA context on {self._device} seems to have grown from {grown}")
        self._size_bytes = max(self._size_bytes, size_bytes)
        return self._size_bytes


def pids_of_this_process(
    before: Mapping[int, int | None], after: Mapping[int, int | None], *, device: str
) -> frozenset[int]:
    """Returns the pids by which NVML lists this process.

    That is its pid or, in a container, the only pid that is new in the list. Raises DeviceDisturbed
    where several are new.
    """
    if os.getpid() in after:
        return frozenset([os.getpid()])
    joined = frozenset(after.keys() - before.keys())
    if len(joined) > 1:
        raise disturbed(f"{len(joined)} processes began on {device} while the context was created")
    return joined


def growth_of_others(
    before: Mapping[int, int | None], now: Mapping[int, int | None], *, device: str
) -> int:
    """Returns by how many bytes the memory of other processes has grown.

    Both mappings are {pid: bytes}, with None where the bytes are not known. Raises DeviceDisturbed
    where such a process has started or ended.
    """
    grown_bytes = 0
    for pid in before.keys() | now.keys():
        bytes_before = before.get(pid, 0)
        bytes_now = now.get(pid, 0)
        if bytes_before is not None and bytes_now is not None:
            grown_bytes += bytes_now - bytes_before
        elif bytes_before is not bytes_now:
            how = "ended" if pid in before else "began"
            raise disturbed(
                f"process {pid} {how} on {device}, and the driver does not say what it holds"
            )
    return grown_bytes


def new_context_bytes(seen_bytes: int, *, expected_bytes: int | None, device: str) -> int:
    """Returns the size of a new context whose creation changed the used bytes by `seen_bytes`.

    If that is less than the probe measured, `expected_bytes`, another process released memory in
    the meantime, and the probe's size is returned. Raises DeviceDisturbed where it is more, since
    the owner of the difference is unknown, and where it is not positive and there is no
    `expected_bytes` either.
    """
    if expected_bytes is None:
        if seen_bytes > 0:
            return seen_bytes
    elif seen_bytes < expected_bytes - TOLERANCE_BYTES:
        return expected_bytes
    elif seen_bytes <= expected_bytes + TOLERANCE_BYTES:
        return seen_bytes
    expected = "more than nothing" if expected_bytes is None else format_size(expected_bytes)
    raise disturbed(
        f"creating the CUDA context changed the used memory of {device} by "
        f"{format_size(seen_bytes)}, not {expected}"
    )


def disturbed(what: str) -> DeviceDisturbed:
    return DeviceDisturbed(
        f"{what}: another process began or ended on the device, or changed what it holds",
        hint="end the other processes in nvidia-smi; run the same command again to continue",
    )


def _is_of_this_trial(pid: int) -> bool:
    """Returns whether the process is this one or, being in its session, one of its children."""
    try:
        return os.getsid(pid) == os.getsid(0)
    except OSError:  # it has ended, is another user's, or its number is that of another namespace
        return False
