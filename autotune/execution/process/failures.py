"""Determines why a trial failed, from an exception inside it.

`server/process_exit.py` does it from how a process ended.

There are three kinds of failures. Running out of memory is an outcome, and its message says whose
memory: on a CPU it appears in five forms (measured: two kinds of `RuntimeError`, `MemoryError`, an
exit of the OpenMP runtime, SIGKILL by the kernel), on CUDA in several, not all of them
torch.OutOfMemoryError. A failure of the machine is TrialLost and says nothing about the
configuration (`infrastructure.py`). Everything else is a crash of the configuration; where torch
could not compile or recompute the model, the message names the technique and what to use instead.
"""

import errno
import re
import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException

from autotune.errors import BudgetTooSmall, PredictionImpossible
from autotune.execution.server.infrastructure import (
    exception_chain,
    first_line,
    machine_failure_behind,
)
from autotune.execution.server.process_exit import OUT_OF_HOST_MEMORY
from autotune.memory.host import HostMemoryExceeded
from autotune.memory.meter import CONTEXT_ALONE
from autotune.spec.result import Measurement
from autotune.spec.setting import NO_LIMIT
from autotune.system.build_tools import first_compile_error
from autotune.techniques.checkpointing import CHANGES_WHAT_IS_KEPT, why_not_again
from autotune.training.parity import ParityFailed
from autotune.training.step import Diverged
from autotune.units import format_size

_HOST_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "std::bad_alloc",
    "Cannot allocate memory",
)
"""Parts of the messages of exceptions of any type. The last is the kernel's, for mmap and for the
fork of a compiler."""

_DEVICE_OUT_OF_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Error [CUDA]: out of memory",
    "NVML_SUCCESS == DriverAPI::get()->nvml",
)
"""Messages of the allocator, the driver, cuBLAS, cuDNN, Triton and their wrappers. The last one
replaces the allocator's message where NVML fails, which it asks for the other processes."""

_KILLED_HELPER = (
    "is killed by signal: Killed",
    "terminated abruptly",
    "Killed signal terminated program",
    "died with <Signals.SIGKILL",
)
"""Messages about a killed DataLoader worker or compiler; the kernel's count of kills says whether
memory was the reason."""

_UNIT_BYTES = {"bytes": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}


def measurement_of_exception(
    error: BaseException,
    *,
    device_type: str,
    config: Mapping[str, Any] | None = None,
    host_killed_for_memory: bool = False,
) -> Measurement:
    """Returns the outcome for an exception that ended a training with the techniques of `config`.

    Raises TrialLost where the machine is to blame and not the configuration.
    """
    text = str(error)
    if isinstance(error, BudgetTooSmall):
        return Measurement(outcome="predicted_over_cap", message=text)
    if isinstance(error, PredictionImpossible):
        return Measurement(outcome="crashed", message=f"activation_budget has no plan: {text}")
    if isinstance(error, Diverged):
        return Measurement(outcome="diverged", message=text)
    if isinstance(error, ParityFailed):
        message = f"computes another training: {text}"
        return Measurement(
            outcome="parity_failed", message=message, parity="failed", parity_message=text
        )
    if isinstance(error, HostMemoryExceeded):
        return Measurement(outcome="out_of_memory", message=text)
    if _is_host_out_of_memory(error, host_killed_for_memory=host_killed_for_memory):
        return _host_out_of_memory(text, device_type=device_type)
    is_device_out_of_memory = isinstance(error, torch.OutOfMemoryError) or any(
        message in text for message in _DEVICE_OUT_OF_MEMORY
    )
    if is_device_out_of_memory:
        return _device_out_of_memory(error)
    loss = machine_failure_behind(error, device_type=device_type)
    if loss:
        raise loss from error
    message = f"{type(error).__name__}: {first_line(text)}{first_compile_error(text)}".strip(": ")
    limit = _limit_of_torch(error, config or {})
    if limit:
        message = f"{limit} ({message})"
    return Measurement(outcome="crashed", message=message)


def _limit_of_torch(error: BaseException, config: Mapping[str, Any]) -> str:
    """Returns which technique torch cannot apply to this model, and what to use instead.

    Empty for an error that is not of torch.compile or of checkpointing.
    """
    checkpointing = config.get("checkpointing", "none")
    budget = config.get("activation_budget", NO_LIMIT)
    scope = config.get("compile", "none")
    for cause in exception_chain(error):
        why = why_not_again(cause)
        if why and budget != NO_LIMIT:
            return (
                f"activation_budget {budget} cannot recompute this model: {why}; use "
                "activation_budget none"
            )
        if why and checkpointing != "none":
            instead = "block" if why == CHANGES_WHAT_IS_KEPT else "none"
            return (
                f"checkpointing {checkpointing} cannot recompute this model: {why}; use "
                f"checkpointing {instead}"
            )
        if isinstance(cause, TorchDynamoException) and scope != "none":
            return f"torch.compile cannot compile this model with compile {scope}; use compile none"
    return ""


def _is_host_out_of_memory(error: BaseException, *, host_killed_for_memory: bool) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return False
    if isinstance(error, MemoryError):
        return True
    for cause in exception_chain(error):
        if isinstance(cause, OSError) and cause.errno == errno.ENOMEM:
            return True
    text = str(error)
    if any(message in text for message in _HOST_OUT_OF_MEMORY):
        return True
    if "CUDA error: out of memory" in text and _is_of_pinned_memory(error):
        return True
    return host_killed_for_memory and any(
        message in str(cause) for cause in exception_chain(error) for message in _KILLED_HELPER
    )


def _is_of_pinned_memory(error: BaseException) -> bool:
    """Whether pinning host memory raised the error.

    cudaHostAlloc and cudaMalloc have the same message; only the line of code tells them apart.
    """
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "pin_memory" in (frames[-1].line or "")


def _host_out_of_memory(text: str, *, device_type: str) -> Measurement:
    requested_bytes = _requested_bytes(text)
    return Measurement(
        outcome="out_of_memory",
        message=f"{OUT_OF_HOST_MEMORY}{_requested_text(requested_bytes)}",
        # The size of a host allocation says nothing about the device, unless that is the CPU.
        requested_bytes=requested_bytes if device_type == "cpu" else None,
    )


def _device_out_of_memory(error: BaseException) -> Measurement:
    text = str(error)
    requested_bytes = _requested_bytes(text)
    details = f": {text}" if text.startswith(CONTEXT_ALONE) else _requested_text(requested_bytes)
    allocated_bytes = None
    if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_initialized():
        allocated_bytes = int(torch.cuda.max_memory_allocated())
    return Measurement(
        outcome="out_of_memory",
        message=f"out of device memory{details}",
        requested_bytes=requested_bytes,
        peak_memory_bytes=allocated_bytes,
    )


def _requested_text(requested_bytes: int | None) -> str:
    return f": {format_size(requested_bytes)} more asked for" if requested_bytes else ""


def _requested_bytes(text: str) -> int | None:
    """Returns the size of the failed allocation in bytes, from the message of the exception.

    CUDA says "Tried to allocate 2.00 GiB", the CPU allocator "tried to ...", others "Unable to
    ...".
    """
    match = re.search(r"(?:[Tt]ried|Unable) to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)", text)
    if match is None:
        return None
    return int(float(match[1]) * _UNIT_BYTES[match[2]])
