"""A trial on the stand-in GPU run again under the profiler; times and kernels are hollow there."""

import json
import pickle

import pytest

from tests.stand_in_gpu.machine import Machine


@pytest.fixture(scope="module")
def profiled(shared_machine: Machine):
    """The trial and its profile, and the folder of its files."""
    result = shared_machine.search(
        *("--space", shared_machine.space('checkpointing = "block"')),
        *("--max-mem", "4GiB", "--trials", "2", "--name", "profiled", "--no-predict"),
    )
    output = shared_machine.autotune("profile", "profiled", "1", "--json").stdout
    (profile,) = json.loads(output)["profiles"]
    (trial,) = [one for one in result["trials"] if one["number"] == 1]
    return trial, profile, shared_machine.folder / profile["folder"]


def test_a_profiled_step_has_the_peak_of_the_trial(profiled):
    trial, profile, _ = profiled
    assert profile["peak_memory_bytes"] == pytest.approx(trial["peak_memory_bytes"], rel=0.005)


def test_the_peak_is_known_by_kind(profiled):
    _, profile, _ = profiled
    sizes = profile["bytes_by_category"]
    assert sum(sizes.values()) == profile["peak_memory_bytes"]
    assert sizes["parameters"] > 0
    assert sizes["optimizer_state"] > sizes["parameters"]


def test_the_snapshot_is_in_the_protocol_that_the_viewer_reads(profiled):
    _, _, folder = profiled
    content = (folder / "snapshot.pickle").read_bytes()
    assert content[:2] == b"\x80\x04"
    assert pickle.loads(content)["device_traces"]


def test_forward_passes_that_run_again_are_told_apart(profiled):
    _, profile, _ = profiled
    assert 0 < profile["recomputed_seconds"] < profile["phase_seconds"]["backward"]


def test_the_profile_leaves_nothing_on_the_device(profiled, shared_machine):
    assert shared_machine.processes() == []
