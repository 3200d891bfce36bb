"""A search whose trials use two GPUs each, on four of them, without NCCL (`without_nccl`)."""

import json
import signal

import pytest

from tests.stand_in_gpu.machine import FOLDER, Machine, wait_until
from tests.stand_in_gpu.test_endings import IN_A_TRIAL, left_over
from tests.stand_in_gpu.test_several_gpus import LONG, SECONDS, attempts

PAIRS = ("--devices-per-trial", "2", "--global-batch", "8")
ZERO3 = (
    'sharding = "zero3", micro_batch_size = 2',
    'sharding = "zero3", micro_batch_size = 1',
)


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path / "machine", exchange="fake")
    machine.python_path = [FOLDER / "without_nccl"]
    return machine


def long_search(machine, devices, *more):
    """The arguments of a search with two trainings that take an hour each.

    The baseline ends at once: DDP does not do without an exchange.
    """
    space = machine.space(*ZERO3, techniques='sharding = ["ddp", "zero3"]')
    return ("--space", space, *PAIRS, *LONG, devices, *more)


def gpus_in_trials(machine):
    """The GPUs on which each rank has a context."""
    in_trials = [use for use in machine.processes() if use.launches > IN_A_TRIAL]
    return sorted(
        [number for number, size in enumerate(use.context_bytes) if size] for use in in_trials
    )


def wait_for_trials(machine, gpus):
    wait_until(lambda: gpus_in_trials(machine) == gpus, seconds=SECONDS, what="the trials")


def test_each_pair_has_a_trial_and_a_stop_gives_all_back(machine):
    with machine.start_search(*long_search(machine, "all"), gpus=4) as search:
        wait_for_trials(machine, [[0], [1], [2], [3]])
        search.send_signal(signal.SIGTERM)
        _, said = search.communicate(timeout=60)
    assert search.returncode == 143, said
    assert "Devices: cuda:0-1, cuda:2-3" in said
    assert attempts(machine).count("given_back") == 2
    wait_until(lambda: left_over(machine) == [], seconds=10, what="the end of all ranks")


def test_a_pair_of_which_a_gpu_is_lost_is_left_and_the_search_goes_on(machine, tmp_path):
    trigger = tmp_path / "trigger"
    arguments = long_search(machine, "cuda:0,cuda:1,cuda:2,cuda:3")
    lost = {"xid": 79, "xid_gpu": 3, "xid_after": trigger}
    with machine.start_search(*arguments, gpus=4, **lost) as search:
        wait_for_trials(machine, [[0], [1], [2], [3]])
        trigger.touch()
        wait_until(lambda: "lost" in attempts(machine), seconds=SECONDS, what="the loss")
        said = []
        while not said or "goes on without cuda:2-3: cuda:3 does not answer" not in said[-1]:
            said.append(search.stderr.readline())
            assert said[-1], said
        wait_for_trials(machine, [[0], [1]])
        search.send_signal(signal.SIGTERM)
        search.communicate(timeout=60)
    assert attempts(machine).count("lost") == 1
    assert attempts(machine).count("given_back") == 1


def test_a_search_on_one_gpu_waits_for_a_trial_of_several_that_uses_it(machine):
    with machine.start_search(*long_search(machine, "2"), gpus=2) as search:
        wait_for_trials(machine, [[0], [1]])
        second = ("--space", machine.space(), "--device", "cuda:1", "--trials", "1", "--no-predict")
        with machine.start_search(*second, gpus=2) as waiting:
            said = ""
            while "waiting for cuda:1" not in said.lower():
                said = waiting.stderr.readline()
                assert said
            assert f"process {search.pid}" in said
            search.send_signal(signal.SIGTERM)
            search.communicate(timeout=60)
            out, said = waiting.communicate(timeout=SECONDS)
    assert [trial["outcome"] for trial in json.loads(out)["trials"]] == ["ok"], said


def test_a_trial_has_the_peak_of_each_gpu_of_its_pair(machine):
    found = machine.search(
        *("--space", machine.space(techniques='sharding = ["ddp"]'), *PAIRS, "--no-predict"),
        *("--trials", "1", "--devices", "cuda:2,cuda:1,cuda:0,cuda:3"),
        gpus=4,
        exchange="gloo",
    )
    (trial,) = found["trials"]
    assert trial["outcome"] == "ok"
    assert trial["devices"] == 2
    assert len(trial["peak_memory_bytes_by_rank"]) == 2
    ranks_on = {line.split("device ")[1] for line in machine.logged("context on device")}
    assert {"1: created", "2: created"} <= ranks_on
    assert "3: created" not in ranks_on


def test_gpus_of_which_some_would_be_idle_are_one_sentence(machine):
    arguments = ("--space", machine.space(techniques='sharding = ["ddp"]'), *PAIRS)
    done = machine.autotune(
        *machine.search_arguments(*arguments, "--devices", "3"), codes=(2,), gpus=4
    )
    assert "--devices 3 cannot be divided into groups of 2" in done.stderr
    assert not machine.database.exists()
