"""Which devices a search uses: what --devices asks for, among those that this machine has.

Speeds compare only between devices of one model, so a study has one: name, memory and driver. A CPU
has no further devices; there a number of devices is a number of slots, each with its share of the
processor's cores.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.errors import InvalidInput
from autotune.spec.result import DeviceInfo
from autotune.spec.study import check_device

ALL = "all"
MOST_DEVICES = 1024

_SHARING = r"\d+ trials on \d+ CPUs?"


def parse_devices(text: str) -> int | tuple[str, ...] | None:
    """Return the number of devices or their names; None for all. Raises InvalidInput."""
    if text == ALL:
        return None
    if text.isascii() and text.isdigit():
        if not 1 <= int(text[:5]) <= MOST_DEVICES or len(text) > 4:
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
    alike = [one for one in candidates if is_of_model(one, model)]
    left_out = []
    for one in candidates:
        if one not in alike:
            left_out.append(
                f"{one.device} is left out: it is {model_of(one)}, and speeds on it do not compare "
                f"with those on {model_of(model)}"
            )
    if not alike:
        raise InvalidInput(
            f"none of {_names(candidates)} is {model_of(model)}, on which the study was begun",
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


def is_of_model(one: DeviceInfo, other: DeviceInfo) -> bool:
    """Return whether speeds on two devices compare."""
    if one.type == "cpu":  # the name of a CPU has its number of threads, which slots share
        return other.type == "cpu"
    return _identity(one) == _identity(other)


def _identity(device: DeviceInfo) -> tuple[str, int, str | None]:
    return device.name, device.total_memory_bytes, device.versions.get("driver")


def model_of(device: DeviceInfo) -> str:
    """Return a device's name and memory, for the user."""
    return f"{device.name} with {device.total_memory_bytes / 2**30:.1f} GiB"


def _names(devices: Sequence[DeviceInfo]) -> str:
    return ", ".join(one.device for one in devices)


def threads_of(device: DeviceInfo) -> int | None:
    """Return with how many threads a CPU was measured, which is part of its name."""
    found = re.search(rf", (\d+) threads(, {_SHARING})?$", device.name)
    return None if found is None else int(found[1])


def sharing_of(device: DeviceInfo) -> str:
    """Return how trials shared the CPUs of a device, which is part of its name; else ""."""
    found = re.search(rf", ({_SHARING})$", device.name)
    return "" if found is None else found[1]
