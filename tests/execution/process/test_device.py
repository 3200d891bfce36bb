"""What a device is, and the size of a new context: two measurements must agree."""

import os
from dataclasses import asdict

import pytest

from autotune.errors import DeviceDisturbed, InvalidInput
from autotune.execution.process.device import identify, measure_repeatedly
from autotune.execution.server.forked import ForkFailed, run_in_fork

MIB = 1024**2


def measuring(*sizes_mib):
    """A measurement that gives these sizes in turn, and how many are left."""
    left = [size * MIB for size in sizes_mib]
    return lambda: left.pop(0), left


@pytest.mark.parametrize(
    ("sizes", "unused"),
    [
        pytest.param((480, 480, 1), 1, id="the first two agree"),
        pytest.param((480, 490, 1), 1, id="nearly"),
        pytest.param((0, 0, 490, 490), 0, id="nothing is no size, however often"),
        pytest.param((960, 480, 5, 490), 0, id="one before the last agrees"),
    ],
)
def test_a_context_has_the_size_on_which_two_measurements_agree(sizes, unused):
    measure, left = measuring(*sizes)
    assert measure_repeatedly(measure).size_bytes == pytest.approx(485 * MIB, abs=10 * MIB)
    assert len(left) == unused


def test_where_no_two_measurements_agree_the_size_is_unknown_and_the_note_says_why():
    measure, _ = measuring(480, 960, 240, 0, 1440)
    found = measure_repeatedly(measure)
    assert found.size_bytes is None
    assert found.why.endswith("none agree: 480.0 MiB, 960.0 MiB, 240.0 MiB, 0 B, 1.41 GiB")


def test_a_disturbed_measurement_is_made_again():
    measure, _ = measuring(480, 480)
    disturbances = [DeviceDisturbed("process 7 began")]

    def disturbed_once():
        if disturbances:
            raise disturbances.pop()
        return measure()

    assert measure_repeatedly(disturbed_once).size_bytes == 480 * MIB


def test_a_measurement_that_fails_is_the_reason():
    def measure():
        raise ForkFailed("RuntimeError: two processes could not use the device at the same time")

    found = measure_repeatedly(measure)
    assert (found.size_bytes, "at the same time" in found.why) == (None, True)


def test_the_cpu_is_identified():
    assert identify("cpu").device == "cpu"


# -- in a process of its own -----------------------------------------------------------------------


def test_a_fork_returns_what_its_function_returns():
    assert run_in_fork(lambda: [os.getpid()]) != [os.getpid()]


def test_an_error_of_ours_passes_out_of_a_fork_whole():
    with pytest.raises(InvalidInput, match="no device cuda:99") as raised:
        run_in_fork(lambda: asdict(identify("cuda:99")))
    assert "cpu is always there" in raised.value.hint


def test_any_other_error_raises_fork_failed_with_its_text():
    with pytest.raises(ForkFailed, match="ZeroDivisionError: division by zero"):
        run_in_fork(lambda: 1 / 0)


def test_a_process_that_dies_raises_fork_failed():
    with pytest.raises(ForkFailed, match="exit code 7"):
        run_in_fork(lambda: os._exit(7))
