"""The meter on a real device: first step, `aside` and context, with a cap and without."""

import sys
from pathlib import Path

import pytest

from autotune.errors import DeviceDisturbed, PreparationFailed
from autotune.execution.server.client import TrialServer
from autotune.execution.tasks import Probe
from autotune.memory.context import TOLERANCE_BYTES
from tests.memory.meter_server import Measured

pytestmark = pytest.mark.gpu

MIB = 1024**2
SERVER = Path(__file__).with_name("meter_server.py")


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """ask(task) is what a process of `meter_server.py` answers."""
    folder = tmp_path_factory.mktemp("server")
    with TrialServer(
        log_file=folder / "server.log", command=(sys.executable, str(SERVER))
    ) as server:
        yield lambda task: server.submit(task, log_file=folder / "task.log").result(120)


@pytest.fixture(scope="module")
def device(ask):
    """What the probe reports of the device."""
    return ask(Probe(device="cuda:0", choices={}, with_context=True)).device


@pytest.fixture
def read(ask, device):
    """read(first_step_mib=600) is what a training with such phases measures."""

    def reading(**options):
        known = {"uuid": device.uuid_of_nvml, "context_bytes": device.context_bytes}
        return ask(Measured(name="reading", arguments={**known, **options}))

    return reading


def test_a_device_is_identified_without_a_context_on_it(ask, device):
    if not device.is_known_to_nvml:
        pytest.skip("cannot be measured without NVML")
    growth = "growth_of_used_memory_by_identifying"
    grown = ask(Measured(name=growth, arguments={"uuid": device.uuid}))
    assert grown < device.context_bytes / 4


def test_a_trials_context_is_the_one_that_the_probe_has_measured(read, device):
    assert read()["context"] == pytest.approx(device.context_bytes, abs=TOLERANCE_BYTES)


def test_a_context_larger_than_the_probes_is_a_disturbance(read, device):
    if not device.is_known_to_nvml:
        pytest.skip("without NVML the size of a new context is taken from the probe")
    with pytest.raises(DeviceDisturbed, match="creating the CUDA context"):
        read(context_bytes=device.context_bytes - 128 * MIB)


def test_a_context_smaller_than_the_probes_counts_as_the_probes(read, device):
    """The missing bytes were released by another process in the meantime."""
    expected = device.context_bytes + 256 * MIB
    assert read(context_bytes=expected)["context"] == pytest.approx(expected, abs=TOLERANCE_BYTES)


def test_without_nvml_the_context_is_what_cuda_reports_as_used(read, device):
    assert read(uuid=None)["context"] == pytest.approx(device.context_bytes, abs=TOLERANCE_BYTES)


def test_on_a_shared_device_the_context_is_the_probes(read, device):
    assert read(shares_device=True)["context"] == device.context_bytes


def test_a_first_step_that_needs_more_than_the_cap_does_not_fit(read):
    with pytest.raises(
        PreparationFailed, match=r"OutOfMemoryError|NVML_SUCCESS"
    ):  # as torch says it without NVML
        read(room_mib=256, first_step_mib=320)


def test_without_a_cap_the_first_step_counts_for_the_device_but_not_as_the_peak(read):
    found = read(first_step_mib=320, steady_mib=100)
    assert 100 * MIB <= found["peak"] < 110 * MIB
    assert found["device"] >= 320 * MIB + found["context"]


def test_the_whole_cap_can_be_used(read):
    """No memory is reserved for kernels that may be loaded later."""
    assert read(room_mib=256, steady_mib=220)["peak"] >= 220 * MIB


def test_the_peak_of_aside_does_not_count_for_the_training(read):
    found = read(steady_mib=100, aside_mib=320)
    assert (found["phase"], 100 * MIB <= found["peak"] < 110 * MIB) == ("forward", True)


def test_the_peak_of_aside_counts_for_the_device(read):
    found = read(aside_mib=320)
    assert found["device"] >= 320 * MIB + found["context"]
