"""Which devices a search uses: what --devices asks for, among those that this machine has.

Speeds compare only between devices of one model, so a study has one: name, memory and driver. Where
a trial uses several devices, they are divided into groups of as many, and a trial runs on each
group. A CPU has no further devices; there a number of devices is a number of slots, each with its
share of the processor's cores, and a trial on several devices has as many slots.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.errors import InvalidInput
from autotune.spec.device_group import check_one_model
from autotune.spec.result import DeviceInfo
from autotune.spec.study import check_device

ALL = "all"
MOST_DEVICES = 1024

_SHARING = r"\d+ trials on \d+ CPUs?"


def parse_devices(text: str) -> int | tuple[str, ...] | None:
    """Returns the number of devices or their names; None for all. Raises InvalidInput."""
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

    groups: Sequence[tuple[DeviceInfo, ...]]
    """The devices that a trial uses together: mostly one."""
    slots_on_each: int
    """How many trials run on a group at once."""
    left_out: Sequence[str] = ()
    """A sentence, without its full stop, about devices that were asked for and are not used."""

    @property
    def places(self) -> int:
        """How many trials run at once."""
        return len(self.groups) * self.slots_on_each


def check_whole_groups(wanted: int | tuple[str, ...] | None, *, devices_per_trial: int) -> None:
    """Raise InvalidInput unless trials of several devices leave none of the `wanted` ones idle.

    `wanted` is as `parse_devices` returns it; of all devices (None) some may be left.
    """
    if wanted is None or wanted == ("cpu",):
        return
    count = wanted if isinstance(wanted, int) else len(wanted)
    idle = count % devices_per_trial
    if not idle:
        return
    larger = count - idle + devices_per_trial
    if count < devices_per_trial:
        raise InvalidInput(
            f"a trial uses {devices_per_trial} devices, and --devices has only {count}",
            hint=f"use --devices {larger} or all, or a smaller --devices-per-trial",
        )
    left = f"{idle} of {count}"
    if isinstance(wanted, tuple):
        left = ", ".join(wanted[-idle:])
    raise InvalidInput(
        f"--devices {count if isinstance(wanted, int) else ','.join(wanted)} cannot be divided "
        f"into groups of {devices_per_trial}, which a trial uses: {left} would be idle",
        hint=f"use {count - idle} or {larger} devices, or --devices all, which leaves the rest out",
    )


def choose_devices(
    wanted: int | tuple[str, ...] | None,
    present: Sequence[DeviceInfo],
    *,
    device: str | None,
    devices_per_trial: int = 1,
    trials_per_device: int,
    model: DeviceInfo | None,
) -> ChosenDevices:
    """Returns the devices that are `wanted`, as `parse_devices` returns it, among those `present`.

    `device` is the kind that was asked for, cpu or cuda, and None for a GPU where there is one.
    Names are divided into groups in their order. `model` is the device that a stored study was
    begun on; None: the first device decides. Raises InvalidInput where a device does not exist, or
    too few are left, or a group is not of one model.
    """
    check_whole_groups(wanted, devices_per_trial=devices_per_trial)
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
    if isinstance(wanted, tuple) and wanted != ("cpu",):
        for start in range(0, len(candidates), devices_per_trial):
            check_one_model(candidates[start : start + devices_per_trial])
    alike = [one for one in candidates if one.is_of_model(model)]
    left_out = []
    for one in candidates:
        if one not in alike:
            left_out.append(
                f"{one.device} is left out: it is {one.model}, and speeds on it do not compare "
                f"with those on {model.model}"
            )
    if not alike:
        raise InvalidInput(
            f"none of {_names(candidates)} is {model.model}, on which the study was begun",
            hint="continue it where it began, or begin another with --name",
        )
    if alike[0].type == "cpu":
        trials = wanted // devices_per_trial if isinstance(wanted, int) else 1
        slots = trials * trials_per_device
        return ChosenDevices(groups=[(alike[0],)], slots_on_each=slots, left_out=left_out)
    if isinstance(wanted, int):
        if wanted > len(alike):
            raise InvalidInput(
                f"{wanted} devices are asked for, and there {_are(alike)} of one model: "
                f"{_names(alike)}",
                hint="ask for fewer, or use --devices all",
            )
        alike = alike[:wanted]
    idle = len(alike) % devices_per_trial
    if len(alike) < devices_per_trial:
        raise InvalidInput(
            f"a trial uses {devices_per_trial} devices, and there {_are(alike)} of one model: "
            f"{_names(alike)}",
            hint="use a smaller --devices-per-trial; autotune predict needs no devices",
        )
    if idle:
        are = "is" if idle == 1 else "are"
        left_out.append(
            f"{_names(alike[-idle:])} {are} left idle: a trial uses {devices_per_trial} devices"
        )
        alike = alike[:-idle]
    groups = [
        tuple(alike[start : start + devices_per_trial])
        for start in range(0, len(alike), devices_per_trial)
    ]
    return ChosenDevices(groups=groups, slots_on_each=trials_per_device, left_out=left_out)


def _are(devices: Sequence[DeviceInfo]) -> str:
    if len(devices) == 1:
        return "is only 1 device"
    return f"are only {len(devices)} devices"


def _named(name: str, present: Sequence[DeviceInfo]) -> DeviceInfo:
    for one in present:
        if one.device == name:
            return one
    raise InvalidInput(f"there is no device {name}", hint=f"this machine has {_names(present)}")


def _names(devices: Sequence[DeviceInfo]) -> str:
    return ", ".join(one.device for one in devices)


def threads_of(device: DeviceInfo) -> int | None:
    """Returns with how many threads a CPU was measured, which is part of its name."""
    found = re.search(rf", (\d+) threads(, {_SHARING})?$", device.name)
    return None if found is None else int(found[1])


def sharing_of(device: DeviceInfo) -> str:
    """Returns how trials shared the CPUs of a device, which is part of its name; else ""."""
    found = re.search(rf", ({_SHARING})$", device.name)
    return "" if found is None else found[1]
