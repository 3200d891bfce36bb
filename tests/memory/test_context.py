"""Detects other processes that disturb the measurement of a CUDA context.

They show in the sizes, and in NVML's list of processes.
"""

import os

import pytest

from autotune.errors import DeviceDisturbed, TrialLost
from autotune.memory.context import (
    MOST_KERNEL_BYTES,
    TOLERANCE_BYTES,
    ContextSize,
    growth_of_others,
    new_context_bytes,
    pids_of_this_process,
)

MIB = 1024**2
CONTEXT = 480 * MIB
OWN = os.getpid()


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [CONTEXT, CONTEXT - TOLERANCE_BYTES, CONTEXT + TOLERANCE_BYTES])
def test_a_new_context_may_differ_from_the_probes_by_the_tolerance(size):
    assert new_context_bytes(size, expected_bytes=CONTEXT, device="cuda:0") == size


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param(CONTEXT - 2 * TOLERANCE_BYTES, id="another process released a little"),
        pytest.param(0, id="another process ended, with a context as large"),
        pytest.param(-CONTEXT, id="one that held more ended"),
    ],
)
def test_a_new_context_that_seems_too_small_has_the_size_that_the_probe_measured(seen):
    assert new_context_bytes(seen, expected_bytes=CONTEXT, device="cuda:0") == CONTEXT


def test_a_new_context_larger_than_the_probes_is_a_disturbance():
    with pytest.raises(DeviceDisturbed, match=r"creating the CUDA context .* not 480.0 MiB"):
        new_context_bytes(2 * CONTEXT, expected_bytes=CONTEXT, device="cuda:0")


def test_a_new_context_of_nothing_is_a_disturbance_where_the_probe_measured_none():
    with pytest.raises(DeviceDisturbed):
        new_context_bytes(0, expected_bytes=None, device="cuda:0")


@pytest.mark.parametrize(
    ("first_seen", "seen", "sizes"),
    [
        pytest.param(480, (550, 560), (550, 560), id="kernels are loaded"),
        pytest.param(480, (470, 490), (480, 490), id="the driver's usage varies"),
        pytest.param(480, (-3520,), (480,), id="another process releases 4000 MiB"),
        pytest.param(
            480, (550, 50, 150), (550, 550, 650), id="one does, and kernels are loaded later"
        ),
        pytest.param(0, (70,), (550,), id="one did while the context was created"),
        pytest.param(5480, (5550,), (550,), id="5000 MiB were in use before"),
    ],
)
def test_a_context_grows_with_its_kernels_and_never_shrinks(first_seen, seen, sizes):
    """All in MiB; the new context has 480."""
    context = ContextSize(CONTEXT, seen_bytes=first_seen * MIB, device="cuda:0")
    assert [context.at(mebibytes * MIB) // MIB for mebibytes in seen] == list(sizes)


def test_a_context_that_grows_by_more_than_all_kernels_is_a_disturbance():
    context = ContextSize(CONTEXT, seen_bytes=CONTEXT, device="cuda:0")
    with pytest.raises(DeviceDisturbed, match=r"seems to have grown from 480.0 MiB to 2.47 GiB"):
        context.at(CONTEXT + MOST_KERNEL_BYTES + MIB)


def test_a_disturbance_is_a_lost_trial():
    assert issubclass(DeviceDisturbed, TrialLost)


# -- processes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "now", "grown"),
    [
        pytest.param({}, {}, 0, id="there is none"),
        pytest.param({7: CONTEXT}, {7: CONTEXT}, 0, id="one stays as it was"),
        pytest.param({}, {7: CONTEXT}, CONTEXT, id="one began"),
        pytest.param({7: CONTEXT}, {}, -CONTEXT, id="one ended"),
        pytest.param({7: CONTEXT}, {7: 3 * CONTEXT}, 2 * CONTEXT, id="one has taken more"),
        pytest.param(
            {7: CONTEXT, 8: MIB}, {9: 2 * CONTEXT, 8: MIB}, CONTEXT, id="one after another"
        ),
        pytest.param({7: None}, {7: None}, 0, id="one stays of which nothing is known"),
    ],
)
def test_growth_of_other_processes_is_computed_where_nvml_reports_it(before, now, grown):
    assert growth_of_others(before, now, device="cuda:0") == grown


@pytest.mark.parametrize(
    ("before", "now", "how"), [({}, {7: None}, "began"), ({7: None}, {}, "ended")]
)
def test_a_process_of_unknown_size_that_starts_or_ends_is_a_disturbance(before, now, how):
    with pytest.raises(DeviceDisturbed, match=f"process 7 {how} on cuda:0"):
        growth_of_others(before, now, device="cuda:0")


@pytest.mark.parametrize(
    ("after", "own"),
    [
        pytest.param({7: MIB, OWN: CONTEXT, 8: CONTEXT}, {OWN}, id="its pid"),
        pytest.param(
            {7: MIB, 70001: CONTEXT}, {70001}, id="in a container the number that has joined"
        ),
        pytest.param({7: MIB}, set(), id="none, where nobody has"),
    ],
)
def test_nvml_knows_this_process_by(after, own):
    assert pids_of_this_process({7: MIB}, after, device="cuda:0") == own


def test_of_two_numbers_that_have_joined_nobody_knows_which_it_is():
    with pytest.raises(DeviceDisturbed, match="2 processes began"):
        pids_of_this_process({}, {70001: CONTEXT, 70002: CONTEXT}, device="cuda:0")
