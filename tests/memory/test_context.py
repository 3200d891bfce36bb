"""What tells that another process disturbed the measurement of a CUDA context: sizes, and NVML's list of processes."""

import os

import pytest

from autotune.errors import DeviceDisturbed, TrialLost
from autotune.memory.context import (
    TOLERANCE_BYTES,
    check_growth,
    check_new_context,
    growth_of_others,
    own_numbers,
)

MIB = 1024**2
CONTEXT = 480 * MIB
OWN = os.getpid()


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


@pytest.mark.parametrize(
    ("before", "now", "grown"),
    [
        pytest.param({}, {}, 0, id="there is none"),
        pytest.param({7: CONTEXT}, {7: CONTEXT}, 0, id="one stays as it was"),
        pytest.param({}, {7: CONTEXT}, CONTEXT, id="one began"),
        pytest.param({7: CONTEXT}, {}, -CONTEXT, id="one ended"),
        pytest.param({7: CONTEXT}, {7: 3 * CONTEXT}, 2 * CONTEXT, id="one has taken more"),
        pytest.param({7: CONTEXT, 8: MIB}, {9: 2 * CONTEXT, 8: MIB}, CONTEXT, id="one after another"),
        pytest.param({7: None}, {7: None}, 0, id="one stays of which nothing is known"),
    ],
)
def test_what_other_processes_have_taken_is_known_where_nvml_says_it(before, now, grown):
    assert growth_of_others(before, now, device="cuda:0") == grown


@pytest.mark.parametrize(("before", "now", "how"), [({}, {7: None}, "began"), ({7: None}, {}, "ended")])
def test_a_process_that_comes_or_goes_and_nobody_knows_what_it_holds_is_a_disturbance(before, now, how):
    with pytest.raises(DeviceDisturbed, match=f"process 7 {how} on cuda:0"):
        growth_of_others(before, now, device="cuda:0")


@pytest.mark.parametrize(
    ("after", "own"),
    [
        pytest.param({7: MIB, OWN: CONTEXT, 8: CONTEXT}, {OWN}, id="its pid"),
        pytest.param({7: MIB, 70001: CONTEXT}, {70001}, id="in a container the number that has joined"),
        pytest.param({7: MIB}, set(), id="none, where nobody has"),
    ],
)
def test_nvml_knows_this_process_by(after, own):
    assert own_numbers({7: MIB}, after, device="cuda:0") == own


def test_of_two_numbers_that_have_joined_nobody_knows_which_it_is():
    with pytest.raises(DeviceDisturbed, match="2 processes began"):
        own_numbers({}, {70001: CONTEXT, 70002: CONTEXT}, device="cuda:0")
