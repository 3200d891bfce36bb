"""Every way to run out of memory is recognised; everything else is not mistaken for it."""

import pytest
import torch

from autotune.training_step import Diverged
from autotune.trial.failures import measurement_of_exception, measurement_of_exit

CPU_REFUSAL = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "16777216 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA_REFUSAL = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 23.64 GiB"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(CPU_REFUSAL),
        RuntimeError("std::bad_alloc"),
        MemoryError(),
        torch.OutOfMemoryError(CUDA_REFUSAL),
        RuntimeError(f"wrapped: OutOfMemoryError: {CUDA_REFUSAL}"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=["cpu allocator", "bad_alloc", "python", "cuda", "wrapped", "driver", "cublas", "triton"],
)
def test_running_out_of_memory_is_recognised(error):
    assert measurement_of_exception(error).outcome == "out_of_memory"


@pytest.mark.parametrize(
    ("text", "requested_bytes"), [(CPU_REFUSAL, 16777216), (CUDA_REFUSAL, int(2.5 * 2**30)), ("std::bad_alloc", None)]
)
def test_the_refused_request_is_read_from_the_message(text, requested_bytes):
    assert measurement_of_exception(torch.OutOfMemoryError(text)).requested_bytes == requested_bytes


def test_a_real_refusal_of_the_cpu_allocator_is_recognised():
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**55)
    assert measurement_of_exception(refused.value).outcome == "out_of_memory"


def test_divergence_is_an_outcome_of_its_own():
    assert measurement_of_exception(Diverged("the loss became nan at step 3")).outcome == "diverged"


def test_any_other_error_is_a_crash_with_its_name_and_first_line():
    measurement = measurement_of_exception(ValueError("bad value\nmore"))
    assert (measurement.outcome, measurement.message) == ("crashed", "ValueError: bad value")


def test_a_signal_is_a_crash_that_names_it(tmp_path):
    measurement = measurement_of_exit(-11, log_file=tmp_path / "none.log", host_killed_for_memory=False)
    assert measurement.outcome == "crashed"
    assert "SIGSEGV" in measurement.message


def test_a_kill_by_the_kernel_for_memory_is_out_of_memory(tmp_path):
    measurement = measurement_of_exit(-9, log_file=tmp_path / "none.log", host_killed_for_memory=True)
    assert measurement.outcome == "out_of_memory"


def test_openmp_without_memory_for_threads_is_out_of_memory(tmp_path):
    log = tmp_path / "trial.log"
    log.write_text("libgomp: Thread creation failed: Resource temporarily unavailable\n")
    assert measurement_of_exit(1, log_file=log, host_killed_for_memory=False).outcome == "out_of_memory"


def test_an_exit_code_without_a_result_is_a_crash_that_names_the_log(tmp_path):
    log = tmp_path / "trial.log"
    measurement = measurement_of_exit(7, log_file=log, host_killed_for_memory=False)
    assert "exit code 7" in measurement.message
    assert str(log) in measurement.message
