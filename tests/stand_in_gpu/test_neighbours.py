"""Other searches, other devices and other processes at the same time."""

import json
import threading
import time
from contextlib import contextmanager

import pytest

from tests.stand_in_gpu import ledger
from tests.stand_in_gpu.machine import Machine

MIB = 1024**2
CONTEXT_BYTES = 480 * MIB
SMALLER = "micro_batch_size = 2"


@contextmanager
def users_seen(machine: Machine, device: int):
    """Records, fifty times a second, which combinations of processes use a device."""
    seen: set[tuple[int, ...]] = set()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.02):
            seen.add(tuple(ledger.users(machine.ledger, device)))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield seen
    finally:
        is_over.set()
        watcher.join()


@contextmanager
def intruders_that_come_and_go(machine: Machine, **settings: object):
    """Start one after the other on the first device; each allocates 100 MiB and ends."""
    is_over = threading.Event()
    visits: list[str] = []

    def visit() -> None:
        while not is_over.wait(0.3):
            with machine.intruder(**settings) as intruder:
                visits.append(intruder.do("take 100"))
                time.sleep(0.3)
                intruder.leave()

    visitor = threading.Thread(target=visit)
    visitor.start()
    try:
        yield visits
    finally:
        is_over.set()
        visitor.join()


def results_of_two(
    machine: Machine, first: tuple[str, ...], second: tuple[str, ...], **settings: object
):
    """Runs two searches at the same time; returns the trials and the output of each."""
    arguments = ("--space", machine.space(SMALLER), "--trials", "2", "--no-predict", "--fresh")
    searches = [
        machine.start_search(*arguments, *options, **settings) for options in (first, second)
    ]
    outputs = []
    for search in searches:
        with search:
            outputs.append(search.communicate(timeout=240))
    return [(json.loads(out)["trials"], err) for out, err in outputs]


def test_two_searches_on_one_device_never_run_at_the_same_time(machine):
    with users_seen(machine, 0) as seen:
        results = results_of_two(machine, ("--name", "one"), ("--name", "two"))
    for trials, error_output in results:
        assert [(trial["outcome"], trial["context_bytes"]) for trial in trials] == [
            ("ok", CONTEXT_BYTES)
        ] * 2, error_output
    assert max(len(pids) for pids in seen) == 1


def test_two_searches_on_two_devices_measure_independently(machine):
    with users_seen(machine, 0) as on_first, users_seen(machine, 1) as on_second:
        results = results_of_two(machine, ("--device", "cuda:0"), ("--device", "cuda:1"), gpus=2)
    for trials, error_output in results:
        assert [(trial["outcome"], trial["context_bytes"]) for trial in trials] == [
            ("ok", CONTEXT_BYTES)
        ] * 2, error_output
    assert max(len(pids) for pids in on_first) == max(len(pids) for pids in on_second) == 1


def test_a_search_uses_only_its_device(machine):
    with users_seen(machine, 0) as seen:
        machine.trials(SMALLER, options=("--device", "cuda:1"), gpus=2)
    assert seen == {()}


def test_activity_on_another_device_does_not_change_a_trial(machine):
    with intruders_that_come_and_go(machine, gpus=2) as visits:
        trials = machine.trials(SMALLER, options=("--device", "cuda:1"), gpus=2)
    assert len(visits) > 3
    assert [trial["context_bytes"] for trial in trials] == [CONTEXT_BYTES] * 2


def test_a_device_that_is_hidden_from_cuda_is_not_the_one_measured(machine):
    with machine.intruder("cuda:0", gpus=2) as intruder:
        intruder.do("take 70000")
        trials = machine.trials(options=("--max-mem", "20GiB"), gpus=2, visible="1")
    assert (trials[0]["outcome"], trials[0]["context_bytes"]) == ("ok", CONTEXT_BYTES)


def test_an_intruder_that_stays_does_not_change_a_trial(machine):
    with machine.intruder() as intruder:
        intruder.do("take 1000")
        trial = machine.trials()[0]
    assert trial["context_bytes"] == CONTEXT_BYTES
    assert trial["device_bytes"] == trial["peak_reserved_bytes"] + CONTEXT_BYTES


def test_intruders_that_come_and_go_change_no_result(machine):
    with intruders_that_come_and_go(machine) as visits:
        trials = machine.trials(SMALLER, "micro_batch_size = 1", options=("--max-mem", "640MiB"))
    assert len(visits) > 3
    for trial in trials:
        assert (trial["outcome"], trial["context_bytes"]) == ("ok", CONTEXT_BYTES), trial


@pytest.mark.parametrize("mode", ["exclusive", "prohibited"])
def test_doctor_reports_a_compute_mode_that_matters(machine, mode):
    done = machine.autotune("doctor", "--device", "cuda:0", codes=(0, 2, 75), compute_mode=mode)
    assert mode in (done.stdout + done.stderr).lower()
