"""Which devices a search uses: what --devices asks for, among those that this machine has.

Speeds compare only between devices of one model, so a study has one: name, memory and driver. A CPU
has no further devices; there a number of devices is a number of slots, each with its share of the
processor's cores.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.errors import InvalidInput
from autotune.spec.result import DeviceInfo
from autotune.spec.study import check_device

ALL = "all"
MOST_DEVICES = 256

_SHARING = r"\d+ trials on \d+ CPUs?"


def parse_devices(text: str) -> int | tuple[str, ...] | None:
    """Return the number of devices or their names; None for all. Raises InvalidInput."""
    if text == ALL:
        return None
    if text.isascii() and text.isdigit():
        if not 1 <= int(text[:4]) <= MOST_DEVICES or len(text) > 3:
            raise InvalidInput(
                f"invalid number of devices: {text}",
                hint=f"use a whole number from 1 to {MOST_DEVICES}, or all",
            )
        return int(text)
    names = []
    for name in text.split(","):
        try:
            check_device(name)
        except InvalidInput as error:
            raise InvalidInput(
                f"--devices {text!r}: {error.message}",
                hint="use all, a number, or names such as cuda:0,cuda:1",
            ) from None
        names.append("cuda:0" if name == "cuda" else name)
        if names.count(names[-1]) > 1:
            raise InvalidInput(
                f"--devices names {names[-1]} twice",
                hint="name each device once; --trials-per-device runs several trials on one",
            )
    return tuple(names)


@dataclass(frozen=True, kw_only=True)
class ChosenDevices:
    """The devices of a search, which are of one model."""

    devices: Sequence[DeviceInfo]
    slots_on_each: int
    left_out: Sequence[str] = ()
    """A sentence, without its full stop, about each device that was asked for and is not used."""

    @property
    def places(self) -> int:
        """How many trials run at once."""
        return len(self.devices) * self.slots_on_each


def choose_devices(
    wanted: int | tuple[str, ...] | None,
    present: Sequence[DeviceInfo],
    *,
    device: str | None,
    trials_per_device: int,
    model: DeviceInfo | None,
) -> ChosenDevices:
    """Return the devices that are `wanted`, as `parse_devices` returns it, among those `present`.

    `device` is the kind that was asked for, cpu or cuda, and None for a GPU where there is one.
    `model` is the device that a stored study was begun on; None: the first device decides. Raises
    InvalidInput where a device does not exist, or none is left.
    """
    if isinstance(wanted, tuple):
        candidates = [_named(name, present) for name in wanted]
    else:
        kind = device or (model.type if model is not None else None) or present[0].type
        candidates = [one for one in present if one.type == kind]
        if not candidates:
            raise InvalidInput(
                f"there is no device {kind}", hint=f"this machine has {_names(present)}"
            )
    if model is None:
        model = candidates[0]
    else:
        # A stored study goes on after an update of the driver, which may change the memory a bit.
        now = [one for one in candidates if one.name == model.name]
        model = now[0] if now else model
    alike = [one for one in candidates if _is_of_model(one, model)]
    left_out = []
    for one in candidates:
        if one not in alike:
            left_out.append(
                f"{one.device} is left out: it is {_model(one)}, and speeds on it do not compare "
                f"with those on {_model(model)}"
            )
    if not alike:
        raise InvalidInput(
            f"none of {_names(candidates)} is {_model(model)}, on which the study was begun",
            hint="continue it where it began, or begin another with --name",
        )
    if isinstance(wanted, int) and alike[0].type == "cpu":
        slots = wanted * trials_per_device
        return ChosenDevices(devices=alike[:1], slots_on_each=slots, left_out=left_out)
    if isinstance(wanted, int):
        if wanted > len(alike):
            are = "is only 1 device" if len(alike) == 1 else f"are only {len(alike)} devices"
            raise InvalidInput(
                f"{wanted} devices are asked for, and there {are} of one model: {_names(alike)}",
                hint="ask for fewer, or use --devices all",
            )
        alike = alike[:wanted]
    return ChosenDevices(devices=alike, slots_on_each=trials_per_device, left_out=left_out)


def _named(name: str, present: Sequence[DeviceInfo]) -> DeviceInfo:
    for one in present:
        if one.device == name:
            return one
    raise InvalidInput(f"there is no device {name}", hint=f"this machine has {_names(present)}")


def _is_of_model(one: DeviceInfo, other: DeviceInfo) -> bool:
    if one.type == "cpu":  # the name of a CPU has its number of threads, which slots share
        return other.type == "cpu"
    return _identity(one) == _identity(other)


def _identity(device: DeviceInfo) -> tuple[str, int, str | None]:
    return device.name, device.total_memory_bytes, device.versions.get("driver")


def _model(device: DeviceInfo) -> str:
    return f"{device.name} with {device.total_memory_bytes / 2**30:.1f} GiB"


def _names(devices: Sequence[DeviceInfo]) -> str:
    return ", ".join(one.device for one in devices)


def cpu_shares(count: int) -> list[tuple[int, ...] | None]:
    """Return the CPUs of each of `count` places: equal shares of those that this process may use.

    A single place is bound to none. What does not divide is left idle, so that speeds compare.
    Where there are more places than CPUs, several share one.
    """
    if count == 1 or not hasattr(os, "sched_getaffinity"):
        return [None] * count
    usable = sorted(os.sched_getaffinity(0))
    if count >= len(usable):
        return [(usable[place % len(usable)],) for place in range(count)]
    size = len(usable) // count
    return [tuple(usable[size * place : size * (place + 1)]) for place in range(count)]


def sharing_of_cpus(count: int) -> str:
    """Return in words that `count` places share CPUs, where they are more than those; else "".

    It becomes part of the CPU's name: what was measured so compares only with its like, and is not
    reused by a study whose places have CPUs of their own.
    """
    if not hasattr(os, "sched_getaffinity"):
        return ""
    usable = len(os.sched_getaffinity(0))
    return f"{count} trials on {usable} CPU{'s' * (usable > 1)}" if count > usable else ""


def threads_of(device: DeviceInfo) -> int | None:
    """Return with how many threads a CPU was measured, which is part of its name."""
    found = re.search(rf", (\d+) threads(, {_SHARING})?$", device.name)
    return None if found is None else int(found[1])


def sharing_of(device: DeviceInfo) -> str:
    """Return how trials shared the CPUs of a device, which is part of its name; else ""."""
    found = re.search(rf", ({_SHARING})$", device.name)
    return "" if found is None else found[1]
