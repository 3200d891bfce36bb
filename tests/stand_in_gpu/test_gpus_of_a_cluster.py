"""A search on the GPUs of a Ray cluster, which it starts itself."""

import json
import signal

import pytest

from tests.stand_in_gpu.machine import FOLDER, wait_until
from tests.stand_in_gpu.test_endings import left_over
from tests.stand_in_gpu.test_groups_of_gpus import gpus_in_trials, long_search
from tests.stand_in_gpu.test_several_gpus import LONG, SECONDS, TWO, attempts, gpus_in_a_trial

pytest.importorskip("ray", reason="Ray is not installed: autotune[ray]")


def test_each_gpu_of_a_node_has_a_trial_and_a_stop_gives_all_back(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray writes its token there
    arguments = ("--space", machine.space(*TWO), *LONG, "all", "--ray", "local")
    with machine.start_search(*arguments, gpus=2) as search:
        wait_until(lambda: gpus_in_a_trial(machine) == {0, 1}, seconds=SECONDS, what="two trials")
        search.send_signal(signal.SIGTERM)
        _, said = search.communicate(timeout=60)
    assert search.returncode == 143, said
    assert attempts(machine) == ["given_back"] * 2
    wait_until(lambda: left_over(machine) == [], seconds=10, what="the end of all processes")


def test_a_search_on_the_gpus_of_a_node_ends_with_its_front(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    search = ("--space", machine.space(*TWO), "--trials", "3", "--devices", "all", "--ray", "local")
    ended = machine.run("-m", "autotune", *machine.search_arguments(*search), gpus=2)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert [trial["outcome"] for trial in found["trials"]] == ["ok"] * 3
    assert found["device"]["device"] == "cuda:0"
    assert "gpu 0" in ended.stderr
    assert "gpu 1" in ended.stderr


def test_each_pair_of_gpus_of_a_node_has_a_trial_and_a_stop_gives_all_back(
    machine, monkeypatch, tmp_path
):
    monkeypatch.setenv("HOME", str(tmp_path))
    machine.python_path = [FOLDER / "without_nccl"]
    arguments = long_search(machine, "all", "--ray", "local")
    with machine.start_search(*arguments, gpus=5, exchange="fake") as search:
        wait_until(
            lambda: len(gpus_in_trials(machine)) == 4, seconds=SECONDS, what="two trials of two"
        )
        used = gpus_in_trials(machine)
        search.send_signal(signal.SIGTERM)
        _, said = search.communicate(timeout=60)
    assert search.returncode == 143, said
    assert len({gpu for (gpu,) in used}) == 4
    assert "gpus 0-1" in said
    assert "gpus 2-3" in said
    assert "is used in part: a trial uses 2 GPUs of one node, so that 1 of its 5 GPUs" in said
    assert attempts(machine).count("given_back") == 2
    wait_until(lambda: left_over(machine) == [], seconds=10, what="the end of all processes")


def test_a_node_without_the_gpus_of_a_trial_is_one_sentence(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    arguments = ("--space", machine.space(techniques='sharding = ["ddp"]'), "--ray", "local")
    done = machine.autotune(
        *machine.search_arguments(*arguments, "--devices-per-trial", "4"), codes=(2,), gpus=2
    )
    assert "a trial uses 4 GPUs of one node, and no node of the Ray cluster has as" in done.stderr
