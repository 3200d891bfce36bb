"""Every way to run out of memory is recognised, with whose memory it was, and nothing else."""

import signal

import pytest
import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.cpp_builder import run_compile_cmd
from torch._inductor.exc import CppCompileError, InductorError

from autotune.errors import TrialLost
from autotune.execution.process.failures import measurement_of_exception
from autotune.execution.server.infrastructure import host_memory_kills
from autotune.execution.server.process_exit import measurement_of_exit
from autotune.shipped.checkpointing import recompute
from autotune.shipped.selective import contexts_keeping, selective_contexts
from autotune.techniques.checkpointing import CHANGES_WHAT_IS_KEPT
from autotune.training.parity import ParityFailed
from autotune.training.step import Diverged

CPU_REFUSAL = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. "
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "16777216 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA_REFUSAL = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 23.64 GiB"
)


REFUSAL_WITHOUT_NVML = (
    "NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "
    '"/pytorch/c10/cuda/CUDACachingAllocator.cpp":1135, please report a bug to PyTorch. '
)
HOST, DEVICE = "the host ran out of memory", "out of device memory"


@pytest.mark.parametrize(
    ("error", "whose"),
    [
        pytest.param(RuntimeError(CPU_REFUSAL), HOST, id="cpu allocator"),
        pytest.param(RuntimeError("std::bad_alloc"), HOST, id="bad_alloc"),
        pytest.param(MemoryError(), HOST, id="python"),
        pytest.param(OSError(12, "Cannot allocate memory"), HOST, id="fork"),
        pytest.param(
            RuntimeError("unable to mmap 8 bytes: Cannot allocate memory (12)"), HOST, id="mmap"
        ),
        pytest.param(torch.OutOfMemoryError(CUDA_REFUSAL), DEVICE, id="cuda"),
        pytest.param(
            RuntimeError(f"wrapped: OutOfMemoryError: {CUDA_REFUSAL}"), DEVICE, id="wrapped"
        ),
        pytest.param(RuntimeError("CUDA error: out of memory"), DEVICE, id="driver"),
        pytest.param(
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `c`"),
            DEVICE,
            id="cublas",
        ),
        pytest.param(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), DEVICE, id="cudnn"),
        pytest.param(RuntimeError("Triton Error [CUDA]: out of memory"), DEVICE, id="triton"),
        pytest.param(RuntimeError(REFUSAL_WITHOUT_NVML), DEVICE, id="where NVML fails"),
        pytest.param(
            torch.OutOfMemoryError("the CUDA context alone needs 0.6 GiB of the cap"),
            DEVICE,
            id="context",
        ),
    ],
)
def test_running_out_of_memory_is_recognised_and_whose(error, whose):
    measurement = measurement_of_exception(error, device_type="cuda")
    assert (measurement.outcome, measurement.message.partition(":")[0]) == ("out_of_memory", whose)


def test_memory_pinned_for_the_device_is_the_hosts():
    """The message is that of the device; only the line of code shows that the host is meant."""
    with pytest.raises(RuntimeError) as refused:
        raise RuntimeError("CUDA error: out of memory")  # as torch.empty(..., pin_memory=True) does
    assert measurement_of_exception(refused.value, device_type="cuda").message == HOST


@pytest.mark.parametrize(
    ("error", "device_type", "requested_bytes", "message"),
    [
        (RuntimeError(CPU_REFUSAL), "cpu", 16777216, f"{HOST}: 16.00 MiB more asked for"),
        (RuntimeError(CPU_REFUSAL), "cuda", None, f"{HOST}: 16.00 MiB more asked for"),
        (
            torch.OutOfMemoryError(CUDA_REFUSAL),
            "cuda",
            int(2.5 * 2**30),
            f"{DEVICE}: 2.50 GiB more asked for",
        ),
        (
            MemoryError("Unable to allocate 2.00 TiB for an array"),
            "cpu",
            2**41,
            f"{HOST}: 2.00 TiB more asked for",
        ),
        (RuntimeError("std::bad_alloc"), "cpu", None, HOST),
    ],
    ids=["cpu", "cpu beside a device", "cuda", "numpy", "unsaid"],
)
def test_the_size_of_the_failed_allocation_is_read_from_the_message_for_its_device_only(
    error, device_type, requested_bytes, message
):
    measurement = measurement_of_exception(error, device_type=device_type)
    assert (measurement.requested_bytes, measurement.message) == (requested_bytes, message)


@pytest.mark.parametrize(
    "text",
    [
        "DataLoader worker (pid 7) is killed by signal: Killed. ",
        "A child process terminated abruptly",
    ],
)
def test_a_child_process_that_the_kernel_killed_for_memory_is_out_of_memory(text):
    error = RuntimeError(text)
    measurement = measurement_of_exception(error, device_type="cuda", host_killed_for_memory=True)
    assert (measurement.outcome, measurement.message) == ("out_of_memory", HOST)


def test_a_real_failure_of_the_cpu_allocator_is_recognised():
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**55)
    assert measurement_of_exception(refused.value, device_type="cpu").requested_bytes == 4 * 2**55


def _of(error, *, device_type="cuda"):
    return measurement_of_exception(error, device_type=device_type)


def test_another_training_is_a_separate_outcome():
    assert _of(ParityFailed("the loss of step 2 is off")).outcome == "parity_failed"


def test_divergence_is_a_separate_outcome():
    assert _of(Diverged("the loss became nan at step 3")).outcome == "diverged"


def test_any_other_error_is_a_crash_with_its_name_and_first_line():
    measurement = _of(ValueError("bad value\nmore"))
    assert (measurement.outcome, measurement.message) == ("crashed", "ValueError: bad value")


def test_a_model_that_recomputes_something_else_is_a_limit_of_the_checkpointing():
    seen = []

    class Storing(nn.Module):
        def forward(self, x):
            seen.append(x)
            stored = seen[0] if len(seen) == 1 else torch.cat(seen)
            return stored[: len(x)].exp().exp()

    block = Storing()
    recompute(block, context_fn=selective_contexts)
    with pytest.raises(RuntimeError) as ended:
        block(torch.ones(2, requires_grad=True)).sum().backward()
    measurement = measurement_of_exception(
        ended.value, device_type="cpu", config={"checkpointing": "selective", "compile": "block"}
    )
    assert measurement.outcome == "crashed"
    assert measurement.message.startswith("checkpointing selective cannot recompute this model")
    assert "use checkpointing none" in measurement.message
    assert "aten." in measurement.message


@pytest.mark.parametrize("setting", ["checkpointing", "activation_budget"])
def test_a_model_that_changes_what_is_kept_is_a_limit_of_the_checkpointing(setting):
    class Adding(nn.Module):
        def forward(self, x):
            return (x @ x).add_(1).exp()

    block = Adding()
    of_setting = {
        "checkpointing": ("selective", selective_contexts),
        "activation_budget": ("1GiB", contexts_keeping(frozenset({("aten.mm", 0)}))),
    }
    value, contexts = of_setting[setting]
    recompute(block, context_fn=contexts)
    with pytest.raises(RuntimeError) as ended:
        block(torch.ones(2, 2, requires_grad=True)).sum().backward()
    config = {"checkpointing": "none", setting: value}
    measurement = measurement_of_exception(ended.value, device_type="cpu", config=config)
    assert measurement.message.startswith(
        f"{setting} {value} cannot recompute this model: {CHANGES_WHAT_IS_KEPT}; use {setting} "
    )


def test_code_that_torch_cannot_compile_is_a_limit_of_compilation():
    def breaks(x):
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(TorchDynamoException) as ended:
        torch.compile(breaks, fullgraph=True, backend="eager")(torch.ones(2))
    measurement = measurement_of_exception(
        ended.value, device_type="cpu", config={"checkpointing": "none", "compile": "model"}
    )
    assert measurement.message.startswith(
        "torch.compile cannot compile this model with compile model; use compile none (Unsupported:"
    )


DIES = "kill -9 $$"
LOSES_A_PROGRAM = "echo 'fatal error: Killed signal terminated program cc1plus'; exit 1"


def _failed_compilation(folder, end):
    """Returns what torch.compile raises where the compiler ends so."""
    compiler = folder / "c++"
    compiler.write_text(f"#!/bin/sh\n{end}\n")
    compiler.chmod(0o755)
    try:
        run_compile_cmd(f"{compiler} one.cpp", cwd=str(folder))
    except CppCompileError as error:
        with pytest.raises(TorchDynamoException) as ended:
            raise InductorError(error, None) from None
        return ended.value


@pytest.mark.parametrize("end", [DIES, LOSES_A_PROGRAM])
def test_a_killed_compiler_says_nothing_about_the_configuration(end, tmp_path):
    error = _failed_compilation(tmp_path, end)
    with pytest.raises(TrialLost, match="a compiler of the trial was killed from outside"):
        measurement_of_exception(error, device_type="cpu", config={"compile": "block"})
    measurement = measurement_of_exception(error, device_type="cpu", host_killed_for_memory=True)
    assert (measurement.outcome, measurement.message) == ("out_of_memory", HOST)


def test_code_that_the_compiler_rejects_is_a_crash_with_its_first_error(tmp_path):
    rejects = "echo 'one.cpp:2:3: error: no such instruction'; exit 1"
    error = _failed_compilation(tmp_path, rejects)
    measurement = measurement_of_exception(error, device_type="cpu", config={"compile": "block"})
    assert measurement.outcome == "crashed"
    assert measurement.message == (
        "torch.compile cannot compile this model with compile block; use compile none "
        "(InductorError: CppCompileError: C++ compile error: one.cpp:2:3: error: no such "
        "instruction)"
    )


def test_a_signal_is_a_crash_that_names_it(tmp_path):
    measurement = measurement_of_exit(
        -11, log_file=tmp_path / "none.log", host_killed_for_memory=False
    )
    assert measurement.outcome == "crashed"
    assert "SIGSEGV" in measurement.message


def test_a_kill_by_the_kernel_for_memory_is_out_of_memory(tmp_path):
    measurement = measurement_of_exit(
        -9, log_file=tmp_path / "none.log", host_killed_for_memory=True
    )
    assert measurement.outcome == "out_of_memory"


def test_openmp_without_memory_for_threads_is_out_of_memory(tmp_path):
    log = tmp_path / "trial.log"
    log.write_text("libgomp: Thread creation failed: Resource temporarily unavailable\n")
    assert (
        measurement_of_exit(1, log_file=log, host_killed_for_memory=False).outcome
        == "out_of_memory"
    )


def test_an_exit_code_without_a_result_is_a_crash_that_names_the_log(tmp_path):
    log = tmp_path / "trial.log"
    measurement = measurement_of_exit(7, log_file=log, host_killed_for_memory=False)
    assert "exit code 7" in measurement.message
    assert str(log) in measurement.message


def test_the_log_of_a_trial_that_wrote_without_end_is_not_read_whole(tmp_path):
    log = tmp_path / "trial.log"
    with log.open("wb") as file:
        file.truncate(2**40)  # takes no room
        file.seek(2**40)
        file.write(b"libgomp: Thread creation failed: Resource temporarily unavailable\n")
    assert (
        measurement_of_exit(1, log_file=log, host_killed_for_memory=False).outcome
        == "out_of_memory"
    )


# -- what is not the configuration's ---------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable\n"
        "CUDA kernel errors might be asynchronous",
        "CUDA error: no CUDA-capable device is detected",
        "No CUDA GPUs are available",
        "Found no NVIDIA driver on your system.",
        "CUDA driver initialization failed, you might not have a CUDA gpu.",
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: uncorrectable NVLink error detected during the execution",
        "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
        "CUDA error: hardware stack error",
        "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
        "CUDA error: system has unsupported display driver / cuda driver combination",
        "CUDA error: MPS server is not ready to accept new MPS client requests",
        "CUDA error: unknown error",
        "GPU is lost",
    ],
)
def test_a_device_that_fails_is_no_result_of_the_configuration(text):
    with pytest.raises(TrialLost, match="device"):
        _of(RuntimeError(text))


def test_a_device_that_fails_is_found_behind_the_error_it_was_wrapped_in():
    error = RuntimeError("backend='inductor' raised")
    error.__cause__ = RuntimeError("CUDA error: uncorrectable ECC error encountered")
    with pytest.raises(TrialLost, match="ECC"):
        _of(error)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: unspecified launch failure",
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: device-side assert triggered",
        "CUDA error: misaligned address",
        "CUDA error: the launch timed out and was terminated",
        "CUDA error: invalid device ordinal",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`",
    ],
)
def test_a_kernel_that_fails_is_the_configurations(text):
    assert _of(RuntimeError(text)).outcome == "crashed"


def test_a_script_that_wants_a_gpu_on_a_cpu_is_wrong_itself():
    assert _of(RuntimeError("No CUDA GPUs are available"), device_type="cpu").outcome == "crashed"


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device", "weights.pt"),
        OSError(122, "Disk quota exceeded"),
        OSError(5, "Input/output error"),
        RuntimeError("CppCompileError: g++: fatal error: cannot write: No space left on device"),
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated. "),
    ],
    ids=["full", "quota", "broken", "compiler", "worker"],
)
def test_a_full_disk_and_a_killed_worker_are_no_result_of_the_configuration(error):
    with pytest.raises(TrialLost):
        _of(error, device_type="cpu")


def test_a_missing_file_of_a_script_is_a_crash():
    assert (
        _of(FileNotFoundError(2, "No such file or directory", "my.txt"), device_type="cpu").outcome
        == "crashed"
    )


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1]
)
def test_a_signal_that_somebody_sent_is_no_result_of_the_configuration(number, tmp_path):
    with pytest.raises(TrialLost, match=number.name):
        measurement_of_exit(-number, log_file=tmp_path / "none.log", host_killed_for_memory=False)


@pytest.mark.parametrize("number", [6, 7, 4, 8, 5, 31, 13, 40])
def test_a_signal_that_a_program_earns_is_a_crash(number, tmp_path):
    exit_of = measurement_of_exit(
        -number, log_file=tmp_path / "none.log", host_killed_for_memory=False
    )
    assert exit_of.outcome == "crashed"


# -- how often the kernel has killed for memory ----------------------------------------------------


def _kernel(folder, *, group, events=None, vmstat=None):
    """host_memory_kills over files as the kernel writes them."""
    proc, groups = folder / "proc", folder / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(group)
    if vmstat is not None:
        (proc / "vmstat").write_text(f"pgfault 12\noom_kill {vmstat}\n")
    if events is not None:
        (groups / "box").mkdir(parents=True)
        (groups / "box" / "memory.events").write_text(
            f"low 0\noom 4\noom_kill {events}\noom_group_kill 9\n"
        )
    return host_memory_kills(proc=proc, groups=groups)


def test_the_count_of_the_control_group_excludes_the_rest_of_the_machine(tmp_path):
    assert _kernel(tmp_path, group="0::/box\n", events=3, vmstat=70) == 3


def test_without_a_group_that_counts_it_is_the_machines(tmp_path):
    assert _kernel(tmp_path, group="4:memory:/box\n0::/\n", vmstat=70) == 70


def test_where_nothing_counts_there_were_none(tmp_path):
    assert _kernel(tmp_path, group="") == 0
