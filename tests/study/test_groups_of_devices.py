"""The places of a search whose trials use several GPUs each, without any GPU."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from autotune.errors import InvalidInput
from autotune.execution.cpu_shares import RANKS_PER_CORE
from autotune.execution.local import LocalExecutor
from autotune.execution.tasks import ListDevices
from autotune.spec.result import DeviceInfo
from autotune.study.events import Notice
from autotune.study.request import SearchRequest
from autotune.study.running.devices_of_search import DevicesOfMachine
from autotune.study.running.places import ThreadedListener

GPUS = [
    DeviceInfo(
        device=f"cuda:{number}",
        name="NVIDIA H200",
        total_memory_bytes=141 * 2**30,
        versions={"driver": "570.1"},
        uuid=f"GPU-of-no-machine-{number}",
        is_known_to_nvml=True,
        context_bytes=2**29,
    )
    for number in range(4)
]
CPU = DeviceInfo(device="cpu", name="a CPU, 8 threads", total_memory_bytes=2**36, versions={})


class MachineWithGpus(LocalExecutor):
    """An executor that finds four GPUs, and begins no process."""

    gpus = GPUS

    def run(self, task, **_):
        found = [*self.gpus, CPU]
        if isinstance(task, ListDevices):
            return found
        return next(one for one in found if one.device == (task.device or "cuda:0"))


@pytest.fixture
def said():
    return []


@pytest.fixture
def devices(tmp_path, said):
    with DevicesOfMachine(
        tmp_path,
        make_executor=MachineWithGpus,
        should_stop=lambda: False,
        listener=ThreadedListener(said.append),
    ) as found:
        yield found


def choose(devices, /, *, devices_per_trial=2, **settings):
    return devices.choose(
        SearchRequest(**settings),
        devices_per_trial=devices_per_trial,
        stored=None,
        is_confirmation=False,
    )


@contextmanager
def places_of(devices, *, first=GPUS[0]):
    definition = SimpleNamespace(name="s", device=first, workload=None)
    with devices.places(definition, predicts=False) as places:
        yield places


def used_by(place):
    """Returns the devices of a place, by their numbers."""
    devices = (place.device, *place.executor.other_devices)
    return [int(device.device.removeprefix("cuda:")) for device in devices]


@pytest.mark.parametrize(
    ("wanted", "groups"),
    [("all", [[0, 1], [2, 3]]), ("cuda:0,cuda:3,cuda:2,cuda:1", [[0, 3], [2, 1]])],
)
def test_each_place_has_a_group_of_its_own(wanted, groups, devices):
    choose(devices, devices=wanted)
    with places_of(devices) as places:
        assert [used_by(place) for place in places.usable] == groups


def test_places_are_named_by_their_groups(devices):
    choose(devices, devices="all")
    with places_of(devices):
        assert list(devices.uuids) == ["cuda:0-1", "cuda:2-3"]
        assert devices.uuids["cuda:2-3"] == (GPUS[2].uuid, GPUS[3].uuid)


def test_trials_that_share_a_group_have_slots_on_each_of_its_devices(devices):
    choose(devices, devices="all", trials_per_device=2)
    with places_of(devices) as places:
        assert list(devices.uuids) == [
            "cuda:0-1 slot 1",
            "cuda:0-1 slot 2",
            "cuda:2-3 slot 1",
            "cuda:2-3 slot 2",
        ]
        assert {place.trials_on_device for place in places.usable} == {2}


def test_the_first_place_is_on_the_first_group(devices):
    request = choose(devices, devices="cuda:2,cuda:3,cuda:0,cuda:1")
    assert request.device == "cuda:2"
    assert devices.executor.other_devices == (GPUS[3],)
    devices.executor.use_devices_from(GPUS[2], count=2)
    assert devices.executor.other_devices == (GPUS[3],)


def test_without_devices_a_trial_has_the_first_and_the_next_ones(devices):
    choose(devices, devices_per_trial=3)
    devices.executor.use_devices_from(GPUS[1], count=3)
    assert devices.executor.other_devices == (GPUS[2], GPUS[3])


def test_next_devices_of_another_model_are_an_error(devices, monkeypatch):
    mixed = [GPUS[0], replace(GPUS[1], name="NVIDIA L4")]
    monkeypatch.setattr(MachineWithGpus, "gpus", mixed)
    with pytest.raises(InvalidInput, match="cuda:0, cuda:1 are not of one model"):
        devices.executor.use_devices_from(GPUS[0], count=2)


def test_what_else_uses_any_device_of_a_group_is_said(devices, said, monkeypatch):
    busy = replace(GPUS[3], others="2.00 GiB of its memory are in use")
    monkeypatch.setattr(MachineWithGpus, "gpus", [*GPUS[:3], busy])
    choose(devices, devices="all")
    with places_of(devices):
        notices = [event.message for event in said if isinstance(event, Notice)]
    assert notices == ["cuda:3: 2.00 GiB of its memory are in use"]


def test_trials_share_no_group_with_a_gpu_in_exclusive_mode(devices, monkeypatch):
    exclusive = replace(GPUS[3], compute_mode="exclusive-process")
    monkeypatch.setattr(MachineWithGpus, "gpus", [*GPUS[:3], exclusive])
    choose(devices, devices="all", trials_per_device=2)
    message = "cuda:3 is in exclusive-process mode"
    with pytest.raises(InvalidInput, match=message), places_of(devices):
        pass


def test_more_processes_of_all_trials_than_the_cores_take_turns_with_are_an_error(
    devices, monkeypatch
):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    most = 2 * RANKS_PER_CORE
    choose(devices, device="cpu", devices=most, devices_per_trial=2)
    with pytest.raises(InvalidInput, match="5 trials of 2 devices cannot run at a time on a CPU"):
        choose(devices, device="cpu", devices=most + 2, devices_per_trial=2)
