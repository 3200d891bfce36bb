"""What this process holds on a CUDA device outside the caching allocator: the context and the kernels it has loaded.

No interface says it directly. It is the growth of the device's used memory since before the context
was created, less what the allocator has reserved and what other processes have taken meanwhile.
NVML names those and what they hold, in most places. In a container it may name none, or name them
by the host's numbers; then two facts tell what they did:

- A new context has the same size whenever it is created. The probe of the device has measured it
  (in processes of their own, until two agreed).
- A context never shrinks.

So memory that another process gives back is recognised, and the size stays known
(`new_context_bytes`, `ContextSize`). Memory that another process takes cannot be told from the
context's own. It counts as the context's, which is the safe side of a cap; where it is too much for
that, the trial ends with DeviceDisturbed, which says nothing of its configuration.

Without NVML the used bytes come from `torch.cuda.mem_get_info`, which needs a context itself: what
was used before it is then what is used after it, less the size of a new context.
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
"""Differences up to this are no disturbance: the driver's own bookkeeping, a desktop that redraws.
The context of any other process is ten times as large."""

MOST_KERNEL_BYTES = 2 * 1024**3
"""What a context is believed to grow by. All kernels of torch and its libraries together take less;
what grows by more is another process that nothing names."""


class Context(Protocol):
    """Of this process, on one device."""

    def size_bytes(self) -> int:
        """Returns the bytes held outside the allocator now, never fewer than before.

        Raises DeviceDisturbed where they cannot be known.
        """


def create_context(
    device: torch.device,
    *,
    nvml: NvmlDevice | None,
    expected_bytes: int | None,
    shares_device: bool = False,
) -> Context:
    """Creates the CUDA context of this process, which must not have touched the device.

    `nvml` is the device as NVML knows it; None: it does not. `expected_bytes`: the size of a new
    context, as the probe found it; None: it could not be found. `shares_device`: other trials run
    on it at the same time. Raises DeviceDisturbed.
    """
    if shares_device:
        assert expected_bytes is not None, (
            "a search of several trials a device is refused without it"
        )
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
    def __init__(
        self, device: torch.device, *, nvml: NvmlDevice, expected_bytes: int | None
    ) -> None:
        self._device, self._nvml = device, nvml
        self._own: frozenset[int] = frozenset()
        """The numbers by which NVML knows this process."""
        self._before = self._look()
        touch(device)
        self._own = own_numbers(self._before.others, nvml.processes(), device=str(device))
        grown_bytes = self._growth_bytes()
        first_bytes = new_context_bytes(
            grown_bytes, expected_bytes=expected_bytes, device=str(device)
        )
        self._size = ContextSize(first_bytes, seen_bytes=grown_bytes, device=str(device))

    def size_bytes(self) -> int:
        return self._size.at(self._growth_bytes())

    def _growth_bytes(self) -> int:
        """Returns by how many bytes what is in use has grown, less the allocator's and what NVML names of others."""
        torch.cuda.synchronize(self._device)
        now = self._look()
        taken_bytes = growth_of_others(self._before.others, now.others, device=str(self._device))
        return (
            now.used_bytes
            - self._before.used_bytes
            - taken_bytes
            - torch.cuda.memory_reserved(self._device)
        )

    def _look(self) -> "_Use":
        """What is in use, and by which others: read together, as far as NVML can."""
        others = self._others()
        for _ in range(_MOST_LOOKS):
            used_bytes, others_before = self._nvml.used_bytes(), others
            others = self._others()
            if others == others_before:
                return _Use(used_bytes=used_bytes, others=others)
        raise disturbed(
            f"what other processes hold of {self._device} changed at each of {_MOST_LOOKS} looks"
        )

    def _others(self) -> dict[int, int | None]:
        processes = self._nvml.processes()
        if self._own and not self._own & processes.keys():
            raise disturbed(f"NVML no longer names the processes on {self._device}")
        return {
            pid: held
            for pid, held in processes.items()
            if pid not in self._own and not _is_of_this_trial(pid)
        }


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
        first_bytes = outside_bytes if expected_bytes is None else expected_bytes
        self._size = ContextSize(first_bytes, seen_bytes=outside_bytes, device=str(device))

    def size_bytes(self) -> int:
        return self._size.at(self._outside_bytes())

    def _outside_bytes(self) -> int:
        return in_use_bytes(self._device) - torch.cuda.memory_reserved(self._device)


class FixedContext:
    """Where nothing can be measured of one process.

    On a device that several trials share the context counts as a new one. On a device whose memory
    is the host's, what is in use is everything on the host, and the context is not counted.
    """

    def __init__(self, device: torch.device, *, size_bytes: int) -> None:
        touch(device)
        self._size_bytes = size_bytes

    def size_bytes(self) -> int:
        return self._size_bytes


# -- what other processes did meanwhile ------------------------------------------------------------


class ContextSize:
    """The size of a context, from looks at what is in use of its device.

    A context never shrinks. What is missing at a look was given back by another process, and is
    added to this look and to all later ones. Kernels that are loaded between the same two looks are
    missed, up to the bytes given back.
    """

    def __init__(self, first_bytes: int, *, seen_bytes: int, device: str) -> None:
        """`first_bytes` is the size of the new context, for which the first look showed `seen_bytes`."""
        self._first_bytes = self._size_bytes = first_bytes
        self._unseen_bytes = first_bytes - seen_bytes
        """Added to what a look shows. Negative where a look also shows what was in use before."""
        self._device = device

    def at(self, seen_bytes: int) -> int:
        """Returns the size at a look that shows `seen_bytes`, never less than at the look before.

        Raises DeviceDisturbed where it would hold more than kernels.
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


def own_numbers(
    before: Mapping[int, int | None], after: Mapping[int, int | None], *, device: str
) -> frozenset[int]:
    """Returns by which numbers NVML knows this process: its pid, or, in a container, the one that has joined the list.

    Raises DeviceDisturbed where several have, so that nobody knows which.
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
            raise disturbed(
                f"process {pid} {how} on {device}, and the driver does not say what it holds"
            )
    return grown_bytes


def new_context_bytes(seen_bytes: int, *, expected_bytes: int | None, device: str) -> int:
    """Returns the size of a new context, whose creation changed what is in use of the device by `seen_bytes`.

    Less than the probe has measured, `expected_bytes`, is a sign that another process gave memory
    back meanwhile: the size is then the probe's. Raises DeviceDisturbed where it is more, for
    nobody knows whose that is, and where it is nothing and the probe measured no size either.
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
        f"creating the CUDA context changed what is in use of {device} by {format_size(seen_bytes)}, not {expected}"
    )


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
