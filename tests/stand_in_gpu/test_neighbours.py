"""Other searches, other devices and other processes beside a search."""

import json
import threading
import time
from contextlib import contextmanager

import ledger
import pytest
from machine import Machine

MIB = 1024**2
CONTEXT_BYTES = 480 * MIB


@contextmanager
def users_seen(machine: Machine, *devices: int):
    """Who uses the devices, looked at fifty times a second: a list of (device, pids) of all that was ever seen."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.02):
            for device in devices:
                seen.add((device, tuple(ledger.users(machine.ledger, device))))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield seen
    finally:
        is_over.set()
        watcher.join()


@contextmanager
def intruders_that_come_and_go(machine: Machine, *, device: str = "cuda:0"):
    """One after the other: each takes a context and 100 MiB, stays for a moment and leaves."""
    is_over = threading.Event()
    visits = []

    def visit() -> None:
        while not is_over.wait(0.3):
            with machine.intruder(device) as intruder:
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


def test_two_searches_on_one_device_take_turns(machine):
    arguments = (
        "--space",
        machine.space("micro_batch_size = 2", "micro_batch_size = 1"),
        "--trials",
        "3",
        "--no-predict",
    )
    with users_seen(machine, 0) as seen, machine.start_search(*arguments, "--name", "one") as one:
        with machine.start_search(*arguments, "--name", "two", "--fresh") as two:
            results = [process.communicate(timeout=240) for process in (one, two)]
    for out, err in results:
        trials = json.loads(out)["trials"]
        assert [(trial["outcome"], trial["context_bytes"]) for trial in trials] == [("ok", CONTEXT_BYTES)] * 3, err
    assert max(len(pids) for _, pids in seen) == 1


def test_a_search_measures_the_device_that_it_was_given(machine):
    arguments = (
        "--space",
        machine.space("micro_batch_size = 2"),
        "--trials",
        "2",
        "--device",
        "cuda:1",
        "--no-predict",
    )
    with intruders_that_come_and_go(machine, device="cuda:0"), users_seen(machine, 0, 1) as seen:
        result = machine.search(*arguments, gpus=2)
    assert [trial["context_bytes"] for trial in result["trials"]] == [CONTEXT_BYTES] * 2
    assert result["device"]["device"] == "cuda:1"
    assert result["device"]["uuid"].endswith("01")
    assert not _trials_on(seen, device=0, but_for=machine)


def _trials_on(seen: set[tuple[int, tuple[int, ...]]], *, device: int, but_for: Machine) -> list[tuple[int, ...]]:
    """Times at which more than the one intruder used the device."""
    return [pids for where, pids in seen if where == device and len(pids) > 1]


def test_two_searches_on_two_devices_do_not_disturb_each_other(machine):
    space = machine.space("micro_batch_size = 2")
    searches = [
        machine.start_search(
            "--space",
            space,
            "--trials",
            "2",
            "--device",
            device,
            "--name",
            device[-1],
            "--fresh",
            "--no-predict",
            gpus=2,
        )  # fmt: skip
        for device in ("cuda:0", "cuda:1")
    ]
    results = []
    for search in searches:
        with search:
            results.append(search.communicate(timeout=240))
    for out, err in results:
        trials = json.loads(out)["trials"]
        assert [(trial["outcome"], trial["context_bytes"]) for trial in trials] == [("ok", CONTEXT_BYTES)] * 2, err


def test_a_device_that_is_hidden_from_cuda_is_not_the_one_measured(machine):
    with machine.intruder("cuda:0", gpus=2) as intruder:
        intruder.do("take 70000")
        result = machine.search("--space", machine.space(), "--trials", "1", "--no-predict", gpus=2, visible="1")
    assert result["trials"][0]["context_bytes"] == CONTEXT_BYTES


def test_an_intruder_that_stays_is_no_part_of_a_trial(machine):
    with machine.intruder() as intruder:
        intruder.do("take 1000")
        result = machine.search("--space", machine.space(), "--trials", "1", "--no-predict")
    trial = result["trials"][0]
    assert trial["context_bytes"] == CONTEXT_BYTES
    assert trial["device_bytes"] == trial["peak_reserved_bytes"] + CONTEXT_BYTES


def test_intruders_that_come_and_go_change_no_result(machine):
    space = machine.space(*(f"micro_batch_size = {size}" for size in (2, 1)))
    with intruders_that_come_and_go(machine) as visits:
        result = machine.search("--space", space, "--trials", "3", "--max-mem", "640MiB", "--no-predict")
    assert len(visits) > 3
    for trial in result["trials"]:
        assert (trial["outcome"], trial["context_bytes"]) == ("ok", CONTEXT_BYTES), trial


@pytest.mark.parametrize("mode", ["exclusive", "prohibited"])
def test_a_compute_mode_that_matters_is_said_by_doctor(machine, mode):
    done = machine.autotune("doctor", "--device", "cuda:0", codes=(0, 2, 75), compute_mode=mode)
    assert mode in done.stdout + done.stderr
