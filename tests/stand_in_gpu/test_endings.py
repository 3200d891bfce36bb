"""Trials that fail: killed, hung, out of memory, or on a device that fails."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.stand_in_gpu.machine import Machine, wait_until

MIB = 1024**2
LONG = ("--steps", "500000", "--trials", "1", "--no-predict")
"""A training that takes an hour."""
WIDE = ("--width", "256", "--seq-len", "1024", "--global-batch", "8")
"""Needs about 60 MiB for each sequence of a micro batch, and 25 MiB more."""
IN_A_TRIAL = 20_000
"""Kernels that no probe launches, and a trial within seconds."""


def wait_for_a_trial(machine: Machine) -> None:
    wait_until(
        lambda: any(process.launches > IN_A_TRIAL for process in machine.processes()),
        seconds=120,
        what="a trial's kernels",
    )


def left_over(machine: Machine) -> list[int]:
    """Processes of this machine that still run, on a device or not."""
    mark = f"STAND_IN_LEDGER={machine.ledger}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_a_killed_search_leaves_no_trial_and_releases_its_memory(machine):
    with machine.start_search("--space", machine.space(), *LONG) as search:
        wait_for_a_trial(machine)
        assert machine.used_bytes() > 480 * MIB
        os.kill(search.pid, signal.SIGKILL)
        wait_until(
            lambda: not left_over(machine),
            seconds=30,
            what="the end of what the search had started",
        )
    assert machine.used_bytes() == 0


def test_a_trial_on_a_device_that_hangs_is_ended_by_the_step_limit(machine, tmp_path):
    trigger = tmp_path / "trigger"
    limits = ("--step-time-limit", "8s")
    with machine.start_search(
        "--space", machine.space(), *LONG, *limits, hang_after=trigger
    ) as search:
        wait_for_a_trial(machine)
        trigger.touch()
        out, err = search.communicate(timeout=120)
    trial = json.loads(out)["trials"][0]
    assert trial["outcome"] == "timeout", err
    assert "no step ended within 8 s" in trial["message"]
    assert machine.processes() == []


CAP = ("--max-mem", "680MiB")
"""200 MiB more than the context."""
ALLOCATORS = 'allocator = ["default", "expandable"]'


@pytest.mark.parametrize("allocator", ["default", "expandable"])
def test_a_configuration_that_needs_more_than_the_cap_does_not_fit(machine, allocator):
    configuration = f'allocator = "{allocator}", micro_batch_size = 4'
    trial = machine.trials(configuration, techniques=ALLOCATORS, options=(*WIDE, *CAP))[1]
    assert trial["config"]["allocator"] == allocator
    assert trial["outcome"] == "out_of_memory"
    assert "out of device memory" in trial["message"]
    assert "more asked for" in trial["message"]


@pytest.mark.parametrize("allocator", ["default", "expandable"])
def test_a_configuration_within_the_cap_fits(machine, allocator):
    configuration = f'allocator = "{allocator}", micro_batch_size = 1'
    trial = machine.trials(configuration, techniques=ALLOCATORS, options=(*WIDE, *CAP))[1]
    assert (trial["config"]["allocator"], trial["outcome"], trial["feasible"]) == (
        allocator,
        "ok",
        True,
    ), trial
    assert trial["device_bytes"] <= 680 * MIB


def test_a_device_that_is_too_small_is_out_of_memory_in_a_step(machine):
    trial = machine.trials(options=WIDE, gpu_mib=1250, base_mib=600, context_mib=480)[0]
    assert trial["outcome"] == "out_of_memory", trial
    assert "out of device memory" in trial["message"]


def test_a_compiled_step_that_needs_more_than_the_cap_is_out_of_memory(machine):
    configuration = 'compile = "block", micro_batch_size = 8'
    trial = machine.trials(
        configuration, techniques='compile = ["none", "block"]', options=(*WIDE, *CAP)
    )[1]
    assert (trial["config"]["compile"], trial["outcome"]) == ("block", "out_of_memory"), trial
    assert "out of device memory" in trial["message"]


def test_running_out_of_pinned_memory_is_out_of_host_memory(machine):
    techniques = 'activation_offload = ["none", "cpu"]'
    trial = machine.trials(
        'activation_offload = "cpu"', techniques=techniques, options=WIDE, pinned_mib=16
    )[1]
    assert trial["config"]["activation_offload"] == "cpu"
    assert trial["outcome"] == "out_of_memory", trial
    assert "the host ran out of memory" in trial["message"]


@pytest.mark.parametrize("xid", [79, 719])
def test_a_device_failure_during_a_trial_is_not_a_crash_of_the_configuration(
    machine, tmp_path, xid
):
    trigger = tmp_path / "trigger"
    study = (
        "--space",
        machine.space(),
        "--steps",
        "800",
        "--trials",
        "1",
        "--no-predict",
        "--name",
        "failing",
    )
    with machine.start_search(*study, xid=xid, xid_after=trigger) as search:
        wait_for_a_trial(machine)
        trigger.touch()
        out, err = search.communicate(timeout=120)
    assert search.returncode == 75, out + err
    assert "cuda:0" in err
    trigger.unlink()
    trial = machine.search(*study, xid=xid, xid_after=trigger)["trials"][0]
    assert trial["outcome"] == "ok", trial
