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


def test_a_profile_uses_the_devices_that_it_is_given(shared_machine, profiled):
    program = """
import pickle
from pathlib import Path
from autotune.study.profiling import ProfileRequest, profile_trial
wanted = ProfileRequest(study="profiled", trial=1, steps=1, devices=("cuda:1",), out=Path("there"))
profile_trial(wanted)
content = pickle.loads(Path("there/snapshot.pickle").read_bytes())
print(sorted({segment["device"] for segment in content["segments"]}))
"""
    assert shared_machine.python(program, gpus=2) == "[1]"


def test_a_profile_of_a_pair_is_not_taken_with_one_device(shared_machine, profiled):
    program = """
import dataclasses
from pathlib import Path
from autotune.errors import InvalidInput
from autotune.execution.local import LocalExecutor
from autotune.storage.store import StudyStore
from autotune.study.profiling import use_devices
definition, _ = StudyStore("sqlite:///studies/autotune.db").definition("profiled")
workload = dataclasses.replace(definition.workload, devices_per_trial=2)
pair = dataclasses.replace(definition, workload=workload)
with LocalExecutor(Path("work")) as executor:
    try:
        use_devices(executor, pair, ("cuda:1",))
    except InvalidInput as error:
        print(error.message)
with LocalExecutor(Path("work")) as executor:
    first = use_devices(executor, pair, ("cuda:1", "cuda:2"))
    print(first.device, *(other.device for other in executor.other_devices))
"""
    rejected, used = shared_machine.python(program, gpus=3).splitlines()
    assert rejected == (
        "a trial of study 'profiled' uses 2 devices, and the profile may use cuda:1"
    )
    assert used == "cuda:1 cuda:2"
