"""The real trial that confirms what `fit` has predicted; nothing here trains."""

import os

import pytest

from autotune.errors import InvalidInput
from autotune.execution.local import LocalExecutor
from autotune.execution.server_tasks import RANKS_PER_CORE
from autotune.spec.config import TrainingConfig
from autotune.spec.workload import make_workload
from autotune.study.fit.confirm import confirm
from tests.building.results import study_result


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
