"""The real trial of a fit, on as many GPUs as the workload has, without any."""

import os
from concurrent.futures import Future
from dataclasses import replace

import pytest

from autotune.errors import InvalidInput
from autotune.execution.cpu_shares import RANKS_PER_CORE
from autotune.execution.local import LocalExecutor
from autotune.execution.tasks import ListDevices, Train
from autotune.spec.config import TrainingConfig
from autotune.spec.result import DeviceInfo, Measurement
from autotune.spec.workload import make_workload
from autotune.study.fit.confirm import confirm
from tests.building.results import study_result

GPUS = [
    DeviceInfo(device=f"cuda:{number}", name="a GPU", total_memory_bytes=2**40, versions={})
    for number in range(4)
]


class MachineWithGpus(LocalExecutor):
    """An executor that finds four GPUs, and remembers what a trial is to run on."""

    trained_on: tuple[str, ...] = ()

    def probe(self, device, choices, *, anew=False):
        return next(gpu for gpu in GPUS if gpu.device == device), {}

    def call(self, task, **_):
        found = Future()
        match task:
            case ListDevices():
                found.set_result(GPUS)
            case Train():
                others = (device for device, _ in task.training.other_devices)
                self.trained_on = (task.training.device, *others)
                found.set_result(task.value_of_end(Measurement(outcome="ok"), seconds=1.0))
            case _:
                found.set_result(None)
        return found


def test_each_process_of_the_trial_has_a_gpu_of_its_own(tmp_path):
    workload = replace(make_workload("cuda", {}), devices_per_trial=3, global_batch=12)
    with MachineWithGpus(tmp_path) as executor:
        measurement = confirm(
            workload,
            TrainingConfig(sharding="zero3"),
            executor=executor,
            device=GPUS[1],
            cap_bytes=2**30,
            folder=tmp_path,
        )
        assert executor.trained_on == ("cuda:1", "cuda:2", "cuda:3")
    assert measurement == Measurement(outcome="ok", devices=3)


def test_more_devices_than_a_search_may_use_are_not_tried(tmp_path):
    devices = 2 * RANKS_PER_CORE * len(os.sched_getaffinity(0))
    workload = make_workload("cpu", {"devices_per_trial": devices, "global_batch": devices})
    with (
        LocalExecutor(tmp_path) as executor,
        pytest.raises(InvalidInput, match=f"cannot use {devices} devices on a CPU"),
    ):
        confirm(
            workload,
            TrainingConfig(micro_batch_size=1, sharding="zero3"),
            executor=executor,
            device=study_result([]).device,
            cap_bytes=2**30,
            folder=tmp_path,
        )
    assert not list(tmp_path.glob("prepared*"))
