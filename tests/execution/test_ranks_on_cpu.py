"""Where trials may use several devices, and how many processes of a CPU."""

import os

import pytest

from autotune.errors import InvalidInput
from autotune.execution.cpu_shares import RANKS_PER_CORE, check_ranks_on_cpu
from autotune.execution.local import LocalExecutor
from tests.building.results import study_result


def test_more_processes_than_the_cores_can_take_turns_with_are_rejected():
    most = RANKS_PER_CORE * len(os.sched_getaffinity(0))
    check_ranks_on_cpu(most)
    with pytest.raises(InvalidInput, match=f"cannot use {most + 1} devices on a CPU"):
        check_ranks_on_cpu(most + 1)


def test_another_system_than_linux_is_named_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    device = study_result([]).device
    with LocalExecutor(tmp_path) as executor:
        executor.use_devices_from(device, count=1)
        with pytest.raises(InvalidInput, match="trials on 2 devices run on Linux only"):
            executor.use_devices_from(device, count=2)
