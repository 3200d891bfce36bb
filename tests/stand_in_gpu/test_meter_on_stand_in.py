"""Memory where the device has slices, no NVML, one process at a time, or another process on it."""

import json

import pytest

from tests.stand_in_gpu.machine import FOLDER, Machine

MIB = 1024**2
CONTEXT_MIB = 480
FIRST_INSTANCE, SECOND_INSTANCE = (
    f"MIG-57a2d14e-603f-4c81-9b05-e72230bc{instance:02x}00" for instance in (1, 2)
)
GPU = "GPU-57a2d14e-603f-4c81-9b05-e72230bc0000"

METER = f"""
import os, subprocess, sys, torch
from pathlib import Path
from autotune.errors import DeviceDisturbed
from autotune.memory.cuda import CudaMeter
MIB = 1024**2

class Intruder:
    def __init__(self):
        command = [sys.executable, {str(FOLDER / "intruder.py")!r}, "cuda:0"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )
    def do(self, command):
        self.process.stdin.write(command + "\\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\\n"
    def leave(self):
        self.process.communicate("leave\\n")

def meter(cap_mib=None, uuid={GPU!r}):
    cap = None if cap_mib is None else cap_mib * MIB
    return CudaMeter(
        torch.device("cuda:0"), uuid=uuid, cap_bytes=cap, new_context_bytes={CONTEXT_MIB} * MIB
    )
"""
"""A process that measures as a trial does, and what it needs to make another one come and go."""


def context_sizes(found):
    return {trial["context_bytes"] for trial in found["trials"]}


def outcomes(found):
    return {trial["outcome"] for trial in found["trials"]}


# -- other processes -------------------------------------------------------------------------------


ENTERS = "intruder = Intruder(); intruder.do('take 100')"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("", ENTERS, id="begins"),
        pytest.param(ENTERS, "intruder.leave()", id="ends"),
        pytest.param(ENTERS, "intruder.do('take 200')", id="takes more"),
        pytest.param(ENTERS, "", id="stays as it was"),
    ],
)
def test_a_process_does_not_change_a_trials_context_that(machine, before, after):
    program = f"""
{before or "pass"}
cuda_meter = meter(cap_mib=640)
{after}
cuda_meter.kernels_have_run()
fraction = torch.cuda.get_per_process_memory_fraction()
print(cuda_meter.reading().context_bytes // MIB, int(fraction * 80 * 1024))
intruder.leave() if intruder.process.poll() is None else None
"""
    assert machine.python(METER + program) == f"{CONTEXT_MIB} {640 - CONTEXT_MIB}"


DURING_CREATION = """
import autotune.memory.context as context
intruder = Intruder()
intruder.do("context")
create = context.touch

def touch(device):
    intruder.leave()
    create(device)

context.touch = touch
"""


def test_a_process_that_ends_while_a_context_is_created_does_not_change_it(machine):
    program = "print(meter(cap_mib=640).reading().context_bytes // MIB)"
    assert machine.python(METER + DURING_CREATION + program) == str(CONTEXT_MIB)


NAMES_NONE = """
from autotune.memory.nvml import NvmlDevice
NvmlDevice.processes = lambda self: {}
"""
"""As in a container."""


def test_a_process_unknown_to_nvml_does_not_change_the_measured_context(machine):
    """Otherwise the trial would fail, or the allocator would get the whole cap."""
    program = """
cuda_meter = meter(cap_mib=640)
cuda_meter.kernels_have_run()
fraction = torch.cuda.get_per_process_memory_fraction()
print(cuda_meter.reading().context_bytes // MIB, int(fraction * 80 * 1024))
"""
    assert (
        machine.python(METER + NAMES_NONE + DURING_CREATION + program)
        == f"{CONTEXT_MIB} {640 - CONTEXT_MIB}"
    )


@pytest.mark.parametrize("nvml", ["names no processes", "does not start"])
def test_a_trial_continues_where_an_unknown_process_releases_memory(tmp_path, nvml):
    """Kernels that are loaded later count, also those loaded before a reading."""
    machine = Machine(tmp_path / "machine", no_nvml=1 if nvml == "does not start" else None)
    uuid = GPU if nvml == "names no processes" else None
    program = f"""
intruder = Intruder()
intruder.do("take 3000")
cuda_meter = meter(uuid={uuid!r})
intruder.do("give")
cuda_meter.kernels_have_run()
intruder.leave()
sizes = [cuda_meter.reading().context_bytes // MIB]
Path({str(tmp_path / "loaded")!r}).touch()
x = torch.zeros(8, device="cuda") + 1
print(*sizes, cuda_meter.reading().context_bytes // MIB)
"""
    program = METER + (NAMES_NONE if uuid else "") + program
    found = machine.python(program, modules_mib=70, modules_after=tmp_path / "loaded")
    assert found == f"{CONTEXT_MIB} {CONTEXT_MIB + 70}"


def test_without_nvml_memory_in_use_before_does_not_count_for_the_context(tmp_path):
    machine = Machine(tmp_path / "machine", no_nvml=1)
    with machine.intruder() as intruder:
        intruder.do("take 3000")
        assert machine.python(
            METER + "print(meter(uuid=None).reading().context_bytes // MIB)"
        ) == str(CONTEXT_MIB)


# -- slices, and no NVML ---------------------------------------------------------------------------


@pytest.mark.parametrize("visible", [None, SECOND_INSTANCE])
def test_a_search_runs_on_a_slice_of_a_gpu(tmp_path, visible):
    machine = Machine(tmp_path / "machine", mig=2)
    found = machine.search(
        "--space", "quick", "--trials", "1", "--max-mem", "2GiB", visible=visible
    )
    assert found["device"]["uuid"] == (visible or FIRST_INSTANCE)
    assert (outcomes(found), context_sizes(found)) == ({"ok"}, {CONTEXT_MIB * MIB})
    assert any("slice of a GPU (MIG)" in note for note in found["device"]["notes"])


def test_a_search_runs_without_nvml(tmp_path):
    machine = Machine(tmp_path / "machine", no_nvml=1)
    found = machine.search("--space", "quick", "--trials", "1", "--max-mem", "2GiB")
    assert (outcomes(found), context_sizes(found)) == ({"ok"}, {CONTEXT_MIB * MIB})
    assert any("NVML does not start" in note for note in found["device"]["notes"])


def test_on_a_device_with_host_memory_the_context_is_not_counted(tmp_path):
    machine = Machine(tmp_path / "machine", no_nvml=1, integrated=1)
    found = machine.search("--space", "quick", "--trials", "1", "--max-mem", "2GiB")
    assert (outcomes(found), context_sizes(found)) == ({"ok"}, {0})
    assert any("the memory of cuda:0 is the host's" in note for note in found["device"]["notes"])


def test_growth_by_more_than_kernels_is_attributed_to_another_process(tmp_path):
    machine = Machine(tmp_path / "machine", no_nvml=1)
    program = """
cuda_meter = meter(uuid=None)
intruder = Intruder()
intruder.do("take 3000")
try:
    cuda_meter.kernels_have_run()
except DeviceDisturbed as disturbed:
    print(disturbed.message)
intruder.leave()
"""
    assert "the CUDA context on cuda:0 seems to have grown from 480.0 MiB to 3." in machine.python(
        METER + program
    )


def test_without_nvml_more_than_the_cap_is_still_out_of_memory(tmp_path):
    """torch queries NVML for the other processes for its message, which fails."""
    machine = Machine(tmp_path / "machine", no_nvml=1)
    arguments = (
        "--space",
        "quick",
        "--trials",
        "1",
        "--max-mem",
        f"{CONTEXT_MIB + 8}MiB",
        "--no-predict",
    )
    done = machine.autotune(*machine.search_arguments(*arguments), codes=(1,))
    assert "out of device memory" in done.stderr or "needs" in done.stderr


# -- one process at a time -------------------------------------------------------------------------


def test_a_search_runs_on_a_device_in_exclusive_mode_and_reports_it(tmp_path):
    machine = Machine(tmp_path / "machine", compute_mode="exclusive")
    arguments = machine.search_arguments(
        "--space", "quick", "--trials", "1", "--max-mem", "2GiB", "--no-predict"
    )
    done = machine.autotune(*arguments)
    assert outcomes(json.loads(done.stdout)) == {"ok"}
    assert "cuda:0 is in exclusive-process mode" in done.stderr


def test_several_trials_on_a_device_in_exclusive_mode_are_rejected(tmp_path):
    machine = Machine(tmp_path / "machine", compute_mode="exclusive")
    arguments = machine.search_arguments(
        "--space", "quick", "--max-mem", "2GiB", "--trials-per-device", "2"
    )
    done = machine.autotune(*arguments, codes=(2,))
    assert (
        "--trials-per-device 2 is not possible: cuda:0 is in exclusive-process mode" in done.stderr
    )


def test_a_device_in_prohibited_mode_is_rejected_with_its_mode(tmp_path):
    machine = Machine(tmp_path / "machine", compute_mode="prohibited")
    arguments = machine.search_arguments(
        "--space", "quick", "--max-mem", "2GiB", "--device", "cuda:0"
    )
    assert "cuda:0 is in prohibited mode" in machine.autotune(*arguments, codes=(2,)).stderr


def test_trials_that_share_a_device_count_the_probes_context_and_report_it(machine):
    arguments = machine.search_arguments(
        "--space", "quick", "--trials", "1", "--max-mem", "2GiB", "--no-predict"
    )
    done = machine.autotune(*arguments, "--trials-per-device", "2", modules_mib=70)
    assert context_sizes(json.loads(done.stdout)) == {CONTEXT_MIB * MIB}
    assert (
        "2 trials at a time share cuda:0: their speeds are those of sharing it, "
        "and each counts 480.0 MiB" in done.stderr
    )


# -- contexts and device slots ---------------------------------------------------------------------


def test_devices_are_identified_without_a_context(machine):
    program = (
        "from autotune.execution.process.device import all_devices\n"
        "print([found.device for found in all_devices()])"
    )
    assert machine.python(program, gpus=2) == "['cuda:0', 'cuda:1', 'cpu']"
    assert machine.logged("context") == []


@pytest.mark.parametrize(
    ("device", "found"),
    [
        (None, "('cuda', '8.9')"),
        ("cuda:1", "('cuda', '8.9')"),
        ("cuda:2", "('cuda', None)"),
        ("cpu", "('cpu', None)"),
    ],
)
def test_the_device_to_predict_for_is_found_without_a_context(machine, device, found):
    program = f"""
from autotune.execution.local import LocalExecutor
from autotune.study.prediction.predicted_device import predicted_device_of
with LocalExecutor(Path("work")) as executor:
    found = predicted_device_of({device!r}, executor=executor)
    print((found.type, found.compute_capability))
"""
    assert machine.python("from pathlib import Path\n" + program, gpus=2) == found
    assert machine.logged("context") == []


def test_kernels_that_are_loaded_after_the_first_step_count_as_any_others(machine, tmp_path):
    program = f"""
cuda_meter = meter()
cuda_meter.kernels_have_run()
Path({str(tmp_path / "loaded")!r}).touch()
x = torch.zeros(8, device="cuda") + 1
print(cuda_meter.reading().context_bytes // MIB)
"""
    found = machine.python(METER + program, modules_mib=70, modules_after=tmp_path / "loaded")
    assert found == str(CONTEXT_MIB + 70)


def test_cached_blocks_make_room_for_kernels_that_are_loaded_later(machine, tmp_path):
    """As if the allocator had been limited for those kernels from the start."""
    program = f"""
cuda_meter = meter(cap_mib=640)
cuda_meter.kernels_have_run()
with cuda_meter.measuring(list):
    for size in (70, 80):
        block = torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
        del block
Path({str(tmp_path / "loaded")!r}).touch()
x = torch.zeros(8, device="cuda") + 1
found = cuda_meter.reading()
reserved = torch.cuda.max_memory_reserved()
print(reserved // MIB, found.device_bytes // MIB, found.peak_memory_bytes // MIB)
"""
    found = machine.python(METER + program, modules_mib=24, modules_after=tmp_path / "loaded")
    assert found == "152 640 80"


HOLD = f"""
from autotune.execution.device_slots import DeviceSlots
from autotune.spec.result import DeviceInfo
device = DeviceInfo(device="cuda:0", name="", total_memory_bytes=1, versions={{}}, uuid={GPU!r})
with DeviceSlots(device).slot(lambda: None):
    print("held", flush=True)
    input()
"""
"""A search that holds the device slot until it reads a line."""

MODEL = ("--layers", "1", "--width", "32", "--heads", "2", "--seq-len", "32")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("doctor", "--device", "cuda:0"), id="doctor"),
        pytest.param(
            (
                "fit",
                "--max-mem",
                "1GiB",
                "--vary",
                "micro-batch",
                "--checkpointing",
                "block",
                *MODEL,
            ),
            id="fit",
        ),
    ],
)
def test_commands_that_need_a_context_wait_for_the_device_slot(machine, command):
    with machine.start("-c", HOLD) as search:
        assert search.stdout.readline() == "held\n"
        with machine.start("-m", "autotune", *command) as waiting:
            output = ""
            while "aiting for cuda:0" not in output:
                line = waiting.stderr.readline()
                assert line, output
                output += line
            assert machine.processes() == []
            search.communicate("\n")
            waiting.communicate()
            assert waiting.returncode == 0
