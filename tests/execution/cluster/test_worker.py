"""A worker of a node, in this process."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="Ray is not installed: autotune[ray]")

from autotune.execution.cluster import worker as node_worker
from autotune.execution.cluster.worker import NodeWorker
from autotune.execution.server.replies import decode, reply_of
from autotune.execution.tasks import Identify, Train
from autotune.spec.config import TrainingConfig
from autotune.spec.result import DeviceInfo
from autotune.spec.training_request import TrainingRequest

DEVICE = DeviceInfo(device="cpu", name="a CPU", total_memory_bytes=2**40, versions={})


@pytest.fixture
def worker(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)  # a worker changes its folder
    made = NodeWorker(search="a-search", slot=0, slots=1, cpus=1, threads="1")
    yield made
    made.close()


def test_what_runs_after_the_files_of_a_user_arrived_runs_in_their_folder(worker, tmp_path):
    def folder_of_server():
        return Path(os.readlink(f"/proc/{worker._executor.server_pid}/cwd"))

    project = tmp_path / "project"
    project.mkdir()
    mark = project / "mark"
    mark.touch()
    assert folder_of_server() == tmp_path
    assert worker.work_in(str(project), str(mark))
    assert folder_of_server() == project


def test_a_folder_that_the_node_does_not_see_is_not_gone_to(worker, tmp_path):
    assert not worker.work_in(str(tmp_path / "elsewhere"), str(tmp_path / "elsewhere" / "mark"))
    assert Path.cwd() == tmp_path


def take_slot(worker, request):
    return worker.perform(
        request,
        "take_slot",
        {"devices": (DEVICE,), "places": 1, "alone": False},
    )


def error_of(answer):
    return reply_of(decode(answer.line)).error


def test_a_slot_that_is_granted_when_the_driver_has_given_up_is_free_again(worker):
    worker.cancel(1)
    error = json.loads(take_slot(worker, 1).line)["error"]
    assert error["kind"] == "Stopped"
    assert error_of(take_slot(worker, 2)) is None


def test_the_threads_are_those_of_the_driver(worker):
    assert os.environ["OMP_NUM_THREADS"] == "1"
    NodeWorker(search="b-search", slot=0, slots=1, cpus=1, threads=None).close()
    assert "OMP_NUM_THREADS" not in os.environ


def test_the_memory_in_use_is_that_of_the_gpu_of_a_trial_on_which_most_is(worker, monkeypatch):
    used = {"GPU-0": 2**30, "GPU-1": 2**31}
    monkeypatch.setattr(
        node_worker, "open_device", lambda uuid: SimpleNamespace(used_bytes=lambda: used[uuid])
    )
    gpus = [
        replace(DEVICE, device=f"cuda:{number}", uuid=f"GPU-{number}", is_known_to_nvml=True)
        for number in range(2)
    ]
    monkeypatch.setattr(worker, "_devices", tuple(gpus))
    assert worker.state(-1, 0.0).doing.used_bytes == 2**31


def test_a_slot_is_on_all_devices_of_a_trial(worker):
    gpus = [replace(DEVICE, device=f"cuda:{number}") for number in range(2)]
    answer = worker.perform(1, "take_slot", {"devices": tuple(gpus), "places": 1, "alone": False})
    assert error_of(answer) is None
    assert worker._executor.other_devices == (gpus[1],)


def test_a_task_is_answered_with_the_line_of_its_server(worker, one_trial_server):
    task = Identify(device="cpu")
    answer = worker.perform(1, "call", {"task": task, "log_name": "identify", "limits": None})
    found = task.value_of(reply_of(decode(answer.line)))
    assert found.device == "cpu"
    assert (answer.log, answer.snapshot) == (None, None)


def test_what_a_training_has_printed_goes_to_the_driver_and_leaves_the_node(
    worker, workload, prepared, tmp_path, one_trial_server
):
    folder = tmp_path / "study" / "prepared"
    folder.parent.mkdir()
    folder.symlink_to(prepared)
    training = TrainingRequest(
        workload=workload,
        config=TrainingConfig(micro_batch_size=workload.global_batch),
        folder=folder,
        device="cpu",
        cap_bytes=1,
    )
    task = Train(training=training)
    answer = worker.perform(1, "call", {"task": task, "log_name": "trial", "limits": None})
    assert task.value_of(reply_of(decode(answer.line))).measurement.outcome == "over_cap"
    assert isinstance(answer.log, bytes)
    assert list((tmp_path / "study" / "logs").iterdir()) == []
