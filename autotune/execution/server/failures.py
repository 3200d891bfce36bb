"""What a trial that failed says it failed of: from an exception inside it, or from how its process ended.

Three kinds. Memory is an outcome, and the message says whose: running out of it has five faces on a
CPU (measured: `RuntimeError` of two kinds, `MemoryError`, an exit of the OpenMP runtime, SIGKILL by
the kernel) and several on CUDA, not all of them torch.OutOfMemoryError. What the machine does to a
trial is TrialLost, and says nothing of its configuration (`infrastructure.py`). All else is the
configuration's: a crash.
"""

import errno
import re
import signal
import traceback
from pathlib import Path

import torch

from autotune.execution.server.infrastructure import (
    causes_of,
    first_line,
    loss_behind,
    loss_by_signal,
    name_of_signal,
)
from autotune.memory.host import HostMemoryExceeded
from autotune.memory.meter import CONTEXT_ALONE
from autotune.spec.result import Measurement
from autotune.training.parity import ParityFailed
from autotune.training.step import Diverged
from autotune.units import format_size

_HOST_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "std::bad_alloc",
    "Cannot allocate memory",
)
"""What an exception of any type says. The last is the kernel's: to mmap, and to the fork of a
compiler."""

_DEVICE_OUT_OF_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Error [CUDA]: out of memory",
    "NVML_SUCCESS == DriverAPI::get()->nvml",
)
"""Those of the allocator, the driver, cuBLAS, cuDNN, Triton and what wraps them. The last is all
that the allocator says where NVML fails, whom it asks for the other processes while it writes its
message."""

_KILLED_HELPER = ("is killed by signal: Killed", "terminated abruptly")
"""A process of the trial's own, a DataLoader's worker or a compiler's, is gone; the kernel's count
says why."""

_OPENMP_OUT_OF_MEMORY = "libgomp: Thread creation failed: Resource temporarily unavailable"
_UNIT_BYTES = {"bytes": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}
_LOG_TAIL_BYTES = 4000


def measurement_of_exception(
    error: BaseException, *, device_type: str, host_killed_for_memory: bool = False
) -> Measurement:
    """The outcome for an exception that ended a training.

    Raises TrialLost where it is not the configuration's.
    """
    text = str(error)
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
    if isinstance(error, torch.OutOfMemoryError) or any(
        face in text for face in _DEVICE_OUT_OF_MEMORY
    ):
        return _device_out_of_memory(error)
    if loss := loss_behind(error, device_type=device_type):
        raise loss from error
    return Measurement(
        outcome="crashed", message=f"{type(error).__name__}: {first_line(text)}".strip(": ")
    )


def measurement_of_exit(
    exit_status: int, *, log_file: Path, host_killed_for_memory: bool
) -> Measurement:
    """The outcome for a process that ended without a result.

    `exit_status` is negative for a signal.

    Raises TrialLost for one that was killed by somebody else.
    """
    if exit_status == -signal.SIGKILL and host_killed_for_memory:
        return Measurement(outcome="out_of_memory", message=_HOST)
    if exit_status < 0:
        if loss := loss_by_signal(-exit_status):
            raise loss
        how = f"was killed by {name_of_signal(-exit_status)}"
    elif _OPENMP_OUT_OF_MEMORY in _tail(log_file):
        return Measurement(outcome="out_of_memory", message=_HOST)
    else:
        how = f"ended with exit code {exit_status}"
    return Measurement(outcome="crashed", message=f"the trial's process {how}; see {log_file}")


_HOST = "the host ran out of memory"


def _is_host_out_of_memory(error: BaseException, *, host_killed_for_memory: bool) -> bool:
    text = str(error)
    return not isinstance(error, torch.OutOfMemoryError) and (
        isinstance(error, MemoryError)
        or any(
            isinstance(cause, OSError) and cause.errno == errno.ENOMEM for cause in causes_of(error)
        )
        or any(face in text for face in _HOST_OUT_OF_MEMORY)
        or ("CUDA error: out of memory" in text and _is_of_pinned_memory(error))
        or (host_killed_for_memory and any(face in text for face in _KILLED_HELPER))
    )


def _is_of_pinned_memory(error: BaseException) -> bool:
    """cudaHostAlloc says what cudaMalloc says; only the line it comes from tells that the host has no more."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "pin_memory" in (frames[-1].line or "")


def _host_out_of_memory(text: str, *, device_type: str) -> Measurement:
    requested_bytes = _requested_bytes(text)
    return Measurement(
        outcome="out_of_memory",
        message=f"{_HOST}{_asked(requested_bytes)}",
        # What the host refused is no size of the device's, unless it is the device.
        requested_bytes=requested_bytes if device_type == "cpu" else None,
    )


def _device_out_of_memory(error: BaseException) -> Measurement:
    text = str(error)
    requested_bytes = _requested_bytes(text)
    asked = f": {text}" if text.startswith(CONTEXT_ALONE) else _asked(requested_bytes)
    return Measurement(
        outcome="out_of_memory",
        message=f"out of device memory{asked}",
        requested_bytes=requested_bytes,
        peak_memory_bytes=_allocated_so_far(error),
    )


def _asked(requested_bytes: int | None) -> str:
    return f": {format_size(requested_bytes)} more asked for" if requested_bytes else ""


def _requested_bytes(text: str) -> int | None:
    """The size of the refused request: "Tried to allocate 2.00 GiB" (CUDA), "tried to ..." (CPU), "Unable to ..."."""
    match = re.search(r"(?:[Tt]ried|Unable) to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)", text)
    return None if match is None else int(float(match[1]) * _UNIT_BYTES[match[2]])


def _allocated_so_far(error: BaseException) -> int | None:
    if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return None


def _tail(log_file: Path) -> str:
    """The end of the log, which may be as large as a trial that writes for ever makes it."""
    try:
        with log_file.open("rb") as log:
            log.seek(max(0, log_file.stat().st_size - _LOG_TAIL_BYTES))
            return log.read(_LOG_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
