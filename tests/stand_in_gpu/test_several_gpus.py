"""A search on several GPUs: a trial on each, one that is lost, and the end of all."""

import signal
import sqlite3
from contextlib import closing

from tests.stand_in_gpu.machine import wait_until
from tests.stand_in_gpu.test_endings import IN_A_TRIAL, left_over

LONG = ("--steps", "500000", "--trials", "3", "--no-predict", "--devices")
"""Trainings that take an hour each."""
TWO = ("micro_batch_size = 2", "micro_batch_size = 1")
SECONDS = 240
"""On a core that others use, too."""


def gpus_in_a_trial(machine):
    in_trials = [use for use in machine.processes() if use.launches > IN_A_TRIAL]
    return {use.context_bytes.index(max(use.context_bytes)) for use in in_trials}


def attempts(machine):
    with closing(sqlite3.connect(machine.database)) as connection:
        return [state for (state,) in connection.execute("SELECT state FROM autotune_attempts")]


def test_each_gpu_has_a_trial_and_a_stop_gives_all_back(machine):
    with machine.start_search("--space", machine.space(*TWO), *LONG, "all", gpus=2) as search:
        wait_until(lambda: gpus_in_a_trial(machine) == {0, 1}, seconds=SECONDS, what="two trials")
        search.send_signal(signal.SIGTERM)
        _, said = search.communicate(timeout=60)
    assert search.returncode == 143, said
    assert attempts(machine) == ["given_back"] * 2
    assert left_over(machine) == []


def test_a_gpu_that_is_lost_is_left_and_the_search_goes_on(machine, tmp_path):
    trigger = tmp_path / "trigger"
    with machine.start_search(
        "--space",
        machine.space(*TWO),
        *LONG,
        "cuda:0,cuda:1",
        gpus=2,
        xid=79,
        xid_gpu=1,
        xid_after=trigger,
    ) as search:
        wait_until(lambda: gpus_in_a_trial(machine) == {0, 1}, seconds=SECONDS, what="two trials")
        trigger.touch()
        wait_until(lambda: "lost" in attempts(machine), seconds=SECONDS, what="the loss")
        said = []
        while not said or "goes on without cuda:1" not in said[-1]:
            said.append(search.stderr.readline())
            assert said[-1], said
        assert gpus_in_a_trial(machine) == {0}
        search.send_signal(signal.SIGTERM)
        search.communicate(timeout=60)
    assert sorted(attempts(machine)) == ["given_back", "lost"]


def test_more_gpus_than_there_are_is_one_sentence(machine):
    done = machine.autotune(
        *machine.search_arguments("--space", machine.space(), "--devices", "3"),
        codes=(2,),
        gpus=2,
    )
    assert "3 devices are asked for, and there are only 2 devices of one model" in done.stderr
    assert not machine.database.exists()
