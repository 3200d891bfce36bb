"""Workers of one machine, each with GPUs of its own."""

import signal
from contextlib import contextmanager

import pytest

from tests.stand_in_gpu.machine import Machine


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path / "machine", gpus=2)


@contextmanager
def worker(machine, visible):
    """Yields what a worker of the machine says once it has begun."""
    process = machine.start(
        "-m", "autotune", "worker", "--storage", f"sqlite:///{machine.folder}/q.db", visible=visible
    )
    try:
        yield process.stderr.readline()
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def groups(said):
    return said.partition("groups of devices: ")[2].partition(";")[0].split(", ")


def test_two_workers_share_only_the_groups_of_gpus_that_both_see(machine):
    with (
        worker(machine, "0") as first,
        worker(machine, "1") as second,
        worker(machine, "1,0") as both,
    ):
        assert groups(first) + groups(second) == groups(both)[::-1]
        assert groups(first) != groups(second)
