"""What tells that another process disturbed the measurement of a CUDA context: sizes, and NVML's list of processes."""

import os
import subprocess
import sys

import pytest

from autotune.errors import DeviceDisturbed, TrialLost
from autotune.memory.context import TOLERANCE_BYTES, Processes, check_growth, check_new_context

MIB = 1024**2
CONTEXT = 480 * MIB
OWN = os.getpid()
FOREIGN = 4_000_000
"""A process's number, of no process here: larger than Linux gives out on a machine of this size."""


def joined(before, *, own=OWN):
    """The list of processes as it is after this one, known as `own`, has joined `before`."""
    return Processes.after_joining(before, {**before, own: CONTEXT})


# -- sizes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [CONTEXT, CONTEXT - TOLERANCE_BYTES, CONTEXT + TOLERANCE_BYTES])
def test_a_new_context_may_differ_from_the_probes_by_the_tolerance(size):
    check_new_context(size, expected_bytes=CONTEXT, device="cuda:0")


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(0, id="another process ended, with a context as large"),
        pytest.param(-CONTEXT, id="one that held more ended"),
        pytest.param(2 * CONTEXT, id="another process began"),
    ],
)
def test_a_new_context_far_from_the_probes_is_a_disturbance(size):
    with pytest.raises(DeviceDisturbed, match=r"creating the CUDA context .* not 480.0 MiB"):
        check_new_context(size, expected_bytes=CONTEXT, device="cuda:0")


def test_a_new_context_of_nothing_is_a_disturbance_whatever_the_probe_found():
    with pytest.raises(DeviceDisturbed):
        check_new_context(0, expected_bytes=None, device="cuda:0")


def test_a_context_grows_with_the_kernels_that_it_loads():
    check_growth(2 * CONTEXT, first_bytes=CONTEXT, device="cuda:0")


def test_a_context_does_not_shrink():
    with pytest.raises(DeviceDisturbed, match=r"from 480.0 MiB to 0 B"):
        check_growth(0, first_bytes=CONTEXT, device="cuda:0")


def test_a_disturbance_is_a_loss():
    assert issubclass(DeviceDisturbed, TrialLost)


# -- processes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [pytest.param(OWN, id="known by its pid"), pytest.param(77, id="a host's number")])
def test_the_same_processes_are_no_disturbance_whatever_this_one_holds(own):
    there = {FOREIGN: 600 * MIB}
    joined(there, own=own).check({**there, own: 9000 * MIB}, device="cuda:0")


def test_a_process_that_begins_is_a_disturbance():
    with pytest.raises(DeviceDisturbed, match=f"process {FOREIGN} began on cuda:0"):
        joined({}).check({OWN: CONTEXT, FOREIGN: CONTEXT}, device="cuda:0")


def test_a_process_that_ends_is_a_disturbance():
    with pytest.raises(DeviceDisturbed, match=f"process {FOREIGN} ended on cuda:0"):
        joined({FOREIGN: CONTEXT}).check({OWN: CONTEXT}, device="cuda:0")


def test_a_process_that_takes_more_is_a_disturbance():
    with pytest.raises(DeviceDisturbed, match=f"process {FOREIGN} held 480.0 MiB of cuda:0 .* 960.0 MiB later"):
        joined({FOREIGN: CONTEXT}).check({OWN: CONTEXT, FOREIGN: 2 * CONTEXT}, device="cuda:0")


def test_a_process_whose_memory_is_not_known_is_no_disturbance():
    joined({FOREIGN: None}).check({OWN: CONTEXT, FOREIGN: None}, device="cuda:0")


def test_a_list_without_names_says_nothing():
    Processes.after_joining({}, {}).check({}, device="cuda:0")
    Processes.after_joining({}, {}).check({FOREIGN: CONTEXT}, device="cuda:0")


def test_a_list_that_has_become_empty_says_nothing():
    joined({FOREIGN: CONTEXT}).check({}, device="cuda:0")


def test_what_the_trial_itself_has_started_is_no_disturbance():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as own_child:
        joined({}).check({OWN: CONTEXT, own_child.pid: CONTEXT}, device="cuda:0")
        own_child.communicate()


def test_a_process_of_another_session_is_none_of_the_trials():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as other:
        with pytest.raises(DeviceDisturbed, match=f"process {other.pid} began"):
            joined({}).check({OWN: CONTEXT, other.pid: CONTEXT}, device="cuda:0")
        other.communicate()
