"""The stand-in itself counts memory as a driver does, and fails as one does."""

import subprocess

import pytest

from tests.stand_in_gpu.machine import Machine, wait_until

DRIVER = """
import ctypes, os, sys
cuda = ctypes.CDLL("libcuda.so.1")
MIB = 1024**2
def context(ordinal=0):
    device, made = ctypes.c_int(), ctypes.c_void_p()
    error = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    error = error or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(made), device)
    return error or cuda.cuCtxSetCurrent(made)
def take(mebibytes):
    return cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(mebibytes * MIB))
def launch(times=1, kernel=1):
    kernel = ctypes.c_void_p(kernel)
    return max(cuda.cuLaunchKernel(kernel, *[1] * 7, None, None, None) for _ in range(times))
def count():
    number = ctypes.c_int(-1)
    cuda.cuInit(0)
    cuda.cuDeviceGetCount(ctypes.byref(number))
    return number.value
import pynvml
def used(index=0):
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).used // MIB
"""
"""A driver's own functions, without torch: a program with it takes a tenth of a second."""

FIRST_GPU, SECOND_GPU = (f"GPU-57a2d14e-603f-4c81-9b05-e72230bc00{gpu:02x}" for gpu in (0, 1))
FIRST_INSTANCE, SECOND_INSTANCE = (
    f"MIG-57a2d14e-603f-4c81-9b05-e72230bc{instance:02x}00" for instance in (1, 2)
)


def driver(machine: Machine, program: str, **settings) -> list[str]:
    return machine.python(DRIVER + program, **settings).split()


def test_a_context_allocates_memory_that_nvml_reports(machine):
    program = "print(used(), context(), used())"
    assert driver(machine, program, base_mib=600, context_mib=480) == ["600", "0", "1080"]


def test_memory_runs_out_at_the_size_of_the_device(machine):
    program = "print(context(), take(400), take(20), take(60))"
    assert driver(machine, program, gpu_mib=1024, base_mib=64, context_mib=500) == [
        "0",
        "0",
        "0",
        "2",
    ]


def test_memory_of_another_process_cannot_be_allocated(machine):
    settings = {"gpu_mib": 2000, "base_mib": 0, "context_mib": 100}
    with machine.intruder(**settings) as intruder:
        assert intruder.do("take 1000") == "done"
        assert driver(machine, "print(context(), used(), take(1000), take(700))", **settings) == [
            "0",
            "1200",
            "2",
            "0",
        ]


def test_a_killed_process_releases_its_memory(machine):
    with machine.intruder() as intruder:
        intruder.do("take 1000")
        assert machine.used_bytes() == (1000 + 480) * 1024**2
    assert machine.used_bytes() == 0


def test_nvml_lists_who_uses_a_device_and_how_much(machine):
    program = """
context(), take(10)
pynvml.nvmlInit()
process, = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
print(process.pid == os.getpid(), process.usedGpuMemory // MIB)
"""
    assert driver(machine, program) == ["True", "490"]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, "2"),
        ("", "0"),
        ("0,1", "2"),
        ("1", "1"),
        ("0,0", "0"),
        ("1,7,0", "1"),
        ("-1", "0"),
        (SECOND_GPU, "1"),
        ("GPU-57a2d14e", "0"),
        ("GPU-ffffffff", "0"),
    ],
)
def test_cuda_sees_the_devices_that_the_variable_names(machine, visible, expected):
    assert driver(machine, "print(count())", gpus=2, visible=visible) == [expected]


def test_two_devices_have_separate_memory(machine):
    program = "print(context(1), take(100), used(0), used(1))"
    assert driver(machine, program, gpus=2, base_mib=0, context_mib=50) == ["0", "0", "0", "150"]


def test_a_uuid_names_the_device_that_nvml_knows_by_it(machine):
    program = f"""
context()
pynvml.nvmlInit()
print(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID("{SECOND_GPU}")).used // MIB)
"""
    assert driver(machine, program, gpus=2, base_mib=0, visible=SECOND_GPU) == ["480"]


@pytest.mark.parametrize(
    ("visible", "used"), [(None, "480 0"), (SECOND_INSTANCE, "0 480"), ("0", "480 0")]
)
def test_a_process_uses_one_instance_of_a_gpu_in_mig_mode(machine, visible, used):
    program = f"""
print(count(), context())
pynvml.nvmlInit()
for name in ("{FIRST_INSTANCE}", "{SECOND_INSTANCE}"):
    print(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(name)).used // MIB)
"""
    assert driver(machine, program, mig=2, base_mib=0, visible=visible) == ["1", "0", *used.split()]


def test_cuda_reports_an_instance_s_uuid_that_nvml_knows_under_mig_only(machine):
    program = """
import torch, pynvml
uuid = torch.cuda.get_device_properties(0).uuid
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
print(pynvml.nvmlDeviceGetMemoryInfo(handle).total // 1024**3)
try:
    pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
except pynvml.NVMLError as error:
    print(error)
"""
    assert machine.python(program, mig=2).splitlines() == ["40", "Not Found"]


def test_without_nvml_its_functions_fail(machine):
    program = (
        "import pynvml\ntry: pynvml.nvmlInit()\nexcept pynvml.NVMLError as error: print(error)"
    )
    assert "not loaded" in machine.python(program, no_nvml=1).lower()


def test_an_exclusive_device_allows_one_process(machine):
    with machine.intruder(compute_mode="exclusive") as intruder:
        assert intruder.do("context") == "done"
        assert driver(machine, "print(context())", compute_mode="exclusive") == ["46"]
    assert driver(machine, "print(context())", compute_mode="exclusive") == ["0"]


@pytest.mark.parametrize(
    "how", ["pinned_use_cuda_host_register:False", "pinned_use_cuda_host_register:True"]
)
def test_pinned_memory_runs_out(machine, how):
    program = f"""
import os
os.environ["PYTORCH_ALLOC_CONF"] = "{how}"
import torch
torch.empty(8 * 2**20, dtype=torch.uint8, pin_memory=True)
try:
    torch.empty(64 * 2**20, dtype=torch.uint8, pin_memory=True)
except Exception as error:
    print(error)
"""
    assert "out of memory" in machine.python(program, pinned_mib=32)


def test_each_cublas_handle_has_a_workspace(machine):
    program = """
import torch
x = torch.zeros(8, 8, device="cuda", requires_grad=True)
before = torch.cuda.memory_allocated()
y = x @ x
first = torch.cuda.memory_allocated() - before
y.sum().backward()  # in another thread, with another handle
print(first // 2**20, (torch.cuda.memory_allocated() - before) // 2**20)
"""
    assert machine.python(program, cc=89) == "8 16"


def test_modules_grow_the_context_outside_the_allocator(machine):
    program = "context(); before = used(); [launch(kernel=16 * k) for k in (1, 1, 2)]\n"
    program += "middle = used(); launch(kernel=48)\n"
    program += "print(middle - before, used() - before)"
    assert driver(machine, program, modules_mib=70, modules_after=3) == ["0", "70"]


@pytest.mark.parametrize(("xid", "error"), [(79, "999"), (48, "214"), (31, "700"), (719, "719")])
def test_an_xid_fails_every_later_call(machine, xid, error):
    program = "context(); print(launch(2), launch(), cuda.cuCtxSynchronize(), take(1))"
    assert driver(machine, program, xid=xid, xid_after=3) == ["0", "0", error, error]


def test_a_gpu_that_has_fallen_off_the_bus_fails_in_every_process_until_it_is_back(
    machine, tmp_path
):
    trigger = tmp_path / "trigger"
    program = """
print(context())
try: print(used())
except pynvml.NVMLError as error: print(str(error).replace(" ", "-"))
"""
    assert driver(machine, program, xid=79, xid_after=trigger)[0] == "0"
    trigger.touch()
    assert driver(machine, program, xid=79, xid_after=trigger) == ["46", "GPU-is-lost"]
    trigger.unlink()
    assert driver(machine, program, xid=79, xid_after=trigger)[0] == "0"


def test_an_xid_on_one_gpu_does_not_change_the_other(machine):
    program = "context({0}); launch(9); print(cuda.cuCtxSynchronize())"
    settings = {"gpus": 2, "xid": 79, "xid_after": 5, "xid_gpu": 1}
    assert driver(machine, program.format(0), **settings) == ["0"]
    assert driver(machine, program.format(1), **settings) == ["999"]


def test_a_hang_ends_with_its_process_only(machine, tmp_path):
    trigger = tmp_path / "trigger"
    program = (
        "context(); print('up', flush=True); sys.stdin.readline(); "
        "print(cuda.cuCtxSynchronize(), flush=True)"
    )
    with machine.start("-c", DRIVER + program, hang_after=trigger) as process:
        assert process.stdout.readline() == "up\n"
        trigger.touch()
        process.stdin.write("\n")
        process.stdin.flush()
        wait_until(lambda: machine.logged("hangs"), what="the hang")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.kill()


def test_a_child_forked_after_cuinit_cannot_use_cuda(machine):
    program = """
cuda.cuInit(0)
if os.fork() == 0:
    print(context(), flush=True)
    os._exit(0)
os.wait()
"""
    assert driver(machine, program) == ["3"]


def test_a_child_forked_before_cuinit_has_a_separate_entry(machine):
    program = """
before = used()  # maps the ledger
if os.fork() == 0:
    print(context(), used() - before, flush=True)
    os._exit(0)
os.wait()
print(used() - before)
"""
    assert driver(machine, program, context_mib=480) == ["0", "480", "0"]


@pytest.mark.parametrize("allocator", ["expandable_segments:False", "expandable_segments:True"])
def test_torch_runs_out_of_memory_at_the_limit_of_the_process(machine, allocator):
    program = f"""
import os
os.environ["PYTORCH_ALLOC_CONF"] = "{allocator}"
import torch
torch.cuda.set_per_process_memory_fraction(0.5)
held = [torch.empty(2**20, 64, dtype=torch.uint8, device="cuda") for _ in range(7)]
try:
    torch.empty(2**20, 128, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print(torch.cuda.memory_reserved() // 2**20)
"""
    assert 448 <= int(machine.python(program, gpu_mib=1024, base_mib=0, context_mib=50)) <= 512


def test_memory_is_there_after_a_request_for_more_than_a_process_can_address(machine):
    program = """
import torch
huge = torch.zeros(1, dtype=torch.uint8, device="cuda").as_strided((2**47,), (0,))
try:
    torch.empty_like(huge, device="cpu", pin_memory=True)
except RuntimeError as error:
    print("out of memory" in str(error), torch.ones(2**24, device="cuda").numel())
"""
    assert machine.python(program) == f"True {2**24}"


def test_device_memory_costs_the_host_nothing_until_it_is_written(machine):
    program = """
import torch, resource
torch.zeros(1, device="cuda")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
held = torch.zeros(8 * 2**30, dtype=torch.uint8, device="cuda")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024 < 100)
"""
    assert machine.python(program) == "True"


def test_data_copied_to_the_device_can_be_read_back(machine):
    program = "import torch; print(torch.arange(5).cuda().cpu().tolist())"
    assert machine.python(program) == "[0, 1, 2, 3, 4]"


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_a_library_of_kernels_finds_its_code_on_every_capability(machine, capability):
    program = """
import torch
embedding = torch.nn.Embedding(256, 64, device="cuda")
# more than 3,072 indices are sorted
embedding(torch.zeros(4000, dtype=torch.long, device="cuda")).sum().backward()
print("done")
"""
    assert machine.python(program, cc=capability) == "done"
