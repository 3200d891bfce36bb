"""The name of the devices that one trial uses together, and whether they are alike."""

import re

import pytest

from autotune.errors import InvalidInput
from autotune.spec.device_group import check_one_model, joint_name
from autotune.spec.result import DeviceInfo


def gpu(number, *, name="NVIDIA H200"):
    return DeviceInfo(
        device=f"cuda:{number}", name=name, total_memory_bytes=141 * 2**30, versions={}
    )


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        ([3], "cuda:3"),
        ([0, 1, 2, 3], "cuda:0-3"),
        ([4, 0], "cuda:0,4"),
        ([7, 0, 1, 2, 5], "cuda:0-2,5,7"),
        ([9, 10, 11], "cuda:9-11"),
    ],
)
def test_neighbours_are_a_range_in_the_name_of_devices(numbers, name):
    assert joint_name([gpu(number) for number in numbers]) == name


def test_a_cpu_keeps_its_name():
    assert joint_name([DeviceInfo(device="cpu", name="a", total_memory_bytes=1, versions={})]) == (
        "cpu"
    )


def test_devices_of_two_models_do_not_train_together():
    check_one_model([gpu(0), gpu(1)])
    message = (
        "cuda:0, cuda:1 are not of one model and cannot train together: cuda:0 is NVIDIA H200 "
        "with 141.0 GiB, cuda:1 is NVIDIA L4 with 141.0 GiB"
    )
    with pytest.raises(InvalidInput, match=re.escape(message)):
        check_one_model([gpu(0), gpu(1, name="NVIDIA L4")])
