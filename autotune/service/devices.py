"""The devices of this machine: what searches run on, memory in use, and by whom.

Read from the driver's monitoring library and from the operating system, without CUDA and torch.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import psutil

from autotune.analysis.queue_order import DeviceGroup
from autotune.errors import TrialLost
from autotune.memory.nvml import NvmlDevice, all_devices, name_of, total_bytes, visible_devices
from autotune.service.processes import find_process, machine_of, this_host
from autotune.service.settings import WorkerSettings
from autotune.shipped.device_name import cpu_name
from autotune.spec.queued_search import QueuedSearch
from autotune.spec.schema import Schema
from autotune.study.running.devices import MOST_DEVICES, parse_devices

_OTHER_GPUS = ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd")
"""What GPUs have that NVML does not report."""


@dataclass(frozen=True, kw_only=True)
class OtherProcess(Schema):
    """A process on a device that is of no search of the queue."""

    pid: int
    user: str | None
    bytes: int | None
    """Of memory."""


@dataclass(frozen=True, kw_only=True)
class Device(Schema):
    """A device of a machine that a server runs on; null where a figure is not known."""

    name: str
    machine: str
    type: Literal["cpu", "cuda"]
    uuid: str | None
    memory_bytes: int | None
    used_bytes: int | None
    utilization_percent: float | None
    searches: tuple[int, ...]
    """The searches that use it."""
    others: tuple[OtherProcess, ...]
    """Processes of somebody else."""


def groups_of(settings: WorkerSettings) -> tuple[DeviceGroup, ...]:
    """Returns the groups of devices that searches run on.

    The kind of the devices of a Ray cluster is not known, nor of GPUs without NVML.
    """
    return tuple(
        DeviceGroup(
            machine=this_host(),
            name=name,
            devices=devices,
            is_cluster=settings.ray is not None,
            **_kind_and_number(devices, is_elsewhere=settings.ray is not None),
        )
        for name, devices in settings.device_groups.items()
    )


def _kind_and_number(devices: str | None, *, is_elsewhere: bool) -> dict[str, Any]:
    """Returns type, kind, number and slots of the devices of a group, as far as they are known.

    A machine has as many slots for trials on its CPU as it has cores; a GPU is one. Where it is not
    known how many devices there are, a search may ask for any number.
    """
    wanted = 1 if devices is None else parse_devices(devices)
    present = visible_devices()
    number = len(wanted) if isinstance(wanted, tuple) else wanted or max(1, len(present))
    is_said = wanted is not None if devices is not None else not is_elsewhere
    unknown = {"number": number, "slots": number if is_said else MOST_DEVICES}
    if is_elsewhere:
        return unknown
    hides_all = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    has_gpu = bool(present) or (not hides_all and any(map(os.path.exists, _OTHER_GPUS)))
    if wanted == ("cpu",) or not has_gpu:
        slots = 1 if isinstance(wanted, tuple) else max(number, os.cpu_count() or 1)
        return {"type": "cpu", "kind": cpu_name(), "number": number, "slots": slots}
    first = 0
    if isinstance(wanted, tuple):
        first = int(wanted[0].partition(":")[2])
    if first >= len(present):
        return unknown
    return {
        "type": "cuda",
        "kind": name_of(present[first]),
        "number": number,
        "slots": number,
    }


def devices_in_use(running: Sequence[QueuedSearch]) -> list[Device]:
    """Returns the GPUs of this machine, or its CPU where it has none."""
    searches = _searches_by_pid(running)
    devices = [_gpu(device, searches) for device in all_devices()]
    if devices:
        return devices
    memory = psutil.virtual_memory()
    return [
        Device(
            name=cpu_name(),
            machine=machine_of(this_host()),
            type="cpu",
            uuid=None,
            memory_bytes=memory.total,
            used_bytes=memory.total - memory.available,
            utilization_percent=psutil.cpu_percent(),
            searches=tuple(sorted(set(searches.values()))),
            others=(),
        )
    ]


def _searches_by_pid(running: Sequence[QueuedSearch]) -> dict[int, int]:
    """Returns {pid of a process of a search on this machine: number of the search}."""
    found = {}
    for search in running:
        process = None if search.process is None else find_process(search.process)
        if process is None:
            continue
        found[process.pid] = search.id
        try:
            for child in process.children(recursive=True):
                found[child.pid] = search.id
        except psutil.Error:
            continue  # it has just ended
    return found


def _gpu(device: NvmlDevice, searches: Mapping[int, int]) -> Device:
    try:
        used_bytes = device.used_bytes()
    except TrialLost:
        used_bytes = None
    of_searches, others = set(), []
    for pid, held_bytes in device.processes().items():
        if pid in searches:
            of_searches.add(searches[pid])
        else:
            others.append(OtherProcess(pid=pid, user=_user_of(pid), bytes=held_bytes))
    return Device(
        name=name_of(device),
        machine=machine_of(this_host()),
        type="cuda",
        uuid=device.uuid,
        memory_bytes=total_bytes(device),
        used_bytes=used_bytes,
        utilization_percent=device.utilization_percent(),
        searches=tuple(sorted(of_searches)),
        others=tuple(others),
    )


def _user_of(pid: int) -> str | None:
    try:
        return str(psutil.Process(pid).username())
    except psutil.Error:
        return None  # of another container, or it has just ended
