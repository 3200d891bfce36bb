"""The devices of a search, chosen among those of a machine."""

import os
import re
from dataclasses import replace

import pytest

from autotune.errors import InvalidInput
from autotune.execution.cpu_shares import sharing_of_cpus
from autotune.spec.device_group import joint_name
from autotune.spec.result import DeviceInfo
from autotune.study.request import SearchRequest
from autotune.study.running.devices import choose_devices, parse_devices, sharing_of, threads_of

CPU = DeviceInfo(device="cpu", name="a CPU, 8 threads", total_memory_bytes=2**36, versions={})


def gpu(number, *, name="NVIDIA H200", gib=141, driver="570.1"):
    return DeviceInfo(
        device=f"cuda:{number}",
        name=name,
        total_memory_bytes=gib * 2**30,
        versions={"driver": driver},
    )


ALIKE = [gpu(0), gpu(1), gpu(2), CPU]
MIXED = [gpu(0), gpu(1, name="NVIDIA L4", gib=22), gpu(2), CPU]


def chosen(wanted, present, *, device=None, devices_per_trial=1, trials_per_device=1, model=None):
    found = choose_devices(
        parse_devices(wanted),
        present,
        device=device,
        devices_per_trial=devices_per_trial,
        trials_per_device=trials_per_device,
        model=model,
    )
    names = [joint_name(group) for group in found.groups]
    return names, found.places, found.left_out


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("all", ["cuda:0", "cuda:1", "cuda:2"]),
        ("2", ["cuda:0", "cuda:1"]),
        ("cuda:2,cuda", ["cuda:2", "cuda:0"]),
    ],
)
def test_all_devices_a_number_or_names(wanted, names):
    assert chosen(wanted, ALIKE) == (names, len(names), [])


def test_a_number_of_devices_on_a_cpu_is_a_number_of_slots():
    assert chosen("4", [CPU]) == (["cpu"], 4, [])
    assert chosen("4", ALIKE, device="cpu") == (["cpu"], 4, [])


def test_trials_per_device_are_places_of_each():
    assert chosen("2", ALIKE, trials_per_device=3)[1] == 6


@pytest.mark.parametrize("wanted", ["all", "2", "cuda:0,cuda:1,cuda:2"])
def test_a_device_of_another_model_is_left_out_and_said_so(wanted):
    names, _, left_out = chosen(wanted, MIXED)
    assert names == ["cuda:0", "cuda:2"]
    [sentence] = left_out or ["cuda:1 is left out: it is NVIDIA L4"]
    assert sentence.startswith("cuda:1 is left out: it is NVIDIA L4")


@pytest.mark.parametrize("other", [gpu(1, gib=80), gpu(1, driver="560.2")])
def test_other_memory_or_another_driver_is_another_model(other):
    assert chosen("all", [gpu(0), other])[0] == ["cuda:0"]


def test_a_stored_study_goes_on_with_devices_of_its_model():
    l4 = replace(MIXED[1], device="cuda:7")
    assert chosen("all", MIXED, model=l4)[0] == ["cuda:1"]


@pytest.mark.parametrize(
    ("wanted", "present", "options", "message"),
    [
        ("cuda:7", ALIKE, {}, "there is no device cuda:7"),
        ("4", ALIKE, {}, "4 devices are asked for, and there are only 3 devices of one model"),
        ("3", MIXED, {}, "there are only 2 devices of one model: cuda:0, cuda:2"),
        ("all", [CPU], {"device": "cuda"}, "there is no device cuda"),
        ("all", ALIKE, {"model": MIXED[1]}, "none of cuda:0, cuda:1, cuda:2 is NVIDIA L4"),
        ("cuda:0", MIXED, {"model": MIXED[1]}, "none of cuda:0 is NVIDIA L4 with 22.0 GiB"),
    ],
)
def test_devices_that_are_not_there_are_an_error(wanted, present, options, message):
    with pytest.raises(InvalidInput, match=re.escape(message)) as raised:
        chosen(wanted, present, **options)
    assert raised.value.hint


FOUR = [gpu(0), gpu(1), gpu(2), gpu(3), CPU]
WITH_A_PAIR = [gpu(0), gpu(1, name="NVIDIA L4"), gpu(2, name="NVIDIA L4"), gpu(3), CPU]


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("all", ["cuda:0-1", "cuda:2-3"]),
        ("4", ["cuda:0-1", "cuda:2-3"]),
        ("2", ["cuda:0-1"]),
        ("cuda:0,cuda:2,cuda:3,cuda:1", ["cuda:0,2", "cuda:1,3"]),
    ],
)
def test_trials_of_several_devices_run_on_groups_of_them(wanted, names):
    assert chosen(wanted, FOUR, devices_per_trial=2) == (names, len(names), [])


def test_groups_are_of_the_devices_of_one_model():
    names, _, left_out = chosen("all", WITH_A_PAIR, devices_per_trial=2)
    assert names == ["cuda:0,3"]
    assert len(left_out) == 2


def test_a_named_group_of_another_model_is_left_out():
    wanted = "cuda:0,cuda:3,cuda:1,cuda:2"
    names, _, left_out = chosen(wanted, WITH_A_PAIR, devices_per_trial=2)
    assert names == ["cuda:0,3"]
    assert len(left_out) == 2


def test_of_all_devices_those_that_make_no_group_are_left_idle_and_said_so():
    names, _, left_out = chosen("all", FOUR, devices_per_trial=3)
    assert names == ["cuda:0-2"]
    assert left_out == ["cuda:3 is left idle: a trial uses 3 devices"]


def test_several_trials_share_each_group():
    assert chosen("all", FOUR, devices_per_trial=2, trials_per_device=3)[1] == 6


@pytest.mark.parametrize(("trials_per_device", "places"), [(1, 2), (3, 6)])
def test_a_trial_of_several_devices_has_as_many_slots_of_a_cpu(trials_per_device, places):
    found = chosen("4", [CPU], devices_per_trial=2, trials_per_device=trials_per_device)
    assert found == (["cpu"], places, [])


@pytest.mark.parametrize(
    ("wanted", "devices_per_trial", "present", "message"),
    [
        ("3", 2, FOUR, "--devices 3 cannot be divided into groups of 2, which a trial uses: 1 of"),
        ("cuda:3,cuda:0,cuda:1", 2, FOUR, "cuda:3,cuda:0,cuda:1 cannot be divided into groups of"),
        ("cuda:3,cuda:0,cuda:1", 2, FOUR, "which a trial uses: cuda:1 would be idle"),
        ("2", 4, FOUR, "a trial uses 4 devices, and --devices has only 2"),
        ("cuda:0,cuda:1", 2, WITH_A_PAIR, "cuda:0, cuda:1 are not of one model"),
        ("all", 5, FOUR, "a trial uses 5 devices, and there are only 4 devices of one model"),
        ("4", 2, WITH_A_PAIR, "4 devices are asked for, and there are only 2 devices of one"),
        ("3", 2, [CPU], "--devices 3 cannot be divided into groups of 2"),
    ],
)
def test_devices_that_make_no_groups_are_an_error(wanted, devices_per_trial, present, message):
    with pytest.raises(InvalidInput, match=re.escape(message)) as raised:
        chosen(wanted, present, devices_per_trial=devices_per_trial)
    assert raised.value.hint


def test_the_threads_of_a_cpu_are_read_from_its_name():
    assert (threads_of(CPU), threads_of(gpu(0))) == (8, None)


@pytest.mark.parametrize(
    ("usable", "places", "sharing"),
    [(4, 4, ""), (4, 5, "5 trials on 4 CPUs"), (1, 1, ""), (1, 2, "2 trials on 1 CPU")],
)
def test_more_slots_than_cpus_are_part_of_the_name_of_a_cpu(monkeypatch, usable, places, sharing):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(usable)})
    assert sharing_of_cpus(places) == sharing
    shared = replace(CPU, name=", ".join(part for part in (CPU.name, sharing) if part))
    assert (sharing_of(shared), threads_of(shared)) == (sharing, 8)


@pytest.mark.parametrize("wanted", ["all", "2"])
def test_a_study_goes_on_after_an_update_of_the_driver(wanted):
    before = gpu(0, driver="560.2", gib=140)
    assert chosen(wanted, [gpu(0), gpu(1)], model=before)[0] == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("given", "text"), [(4, "4"), (["cuda:0", "cuda:2"], "cuda:0,cuda:2"), ("all", "all")]
)
def test_python_gives_a_number_or_a_list_of_devices(given, text):
    assert SearchRequest(devices=given).devices == text


@pytest.mark.parametrize("given", [True, 1.5, {"cuda:0"}])
def test_other_types_are_no_devices(given):
    with pytest.raises(InvalidInput, match="Invalid devices"):
        SearchRequest(devices=given)
