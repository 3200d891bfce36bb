"""What a trial that failed says it failed of: from an exception inside it, or from how its process ended.

Running out of memory has five faces on a CPU (measured: `RuntimeError` of two kinds, `MemoryError`, an exit of the
OpenMP runtime, SIGKILL by the kernel) and several on CUDA, not all of them torch.OutOfMemoryError.
"""

import re
import signal
from pathlib import Path

import torch

from autotune.memory import CONTEXT_ALONE
from autotune.parity_watch import ParityFailed
from autotune.quantities import format_size
from autotune.result import Measurement
from autotune.training_step import Diverged

_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "std::bad_alloc",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Error [CUDA]: out of memory",
)
"""What an exception of any type says: CUDA's are those of the driver, cuBLAS, Triton and what wraps them."""

_OPENMP_OUT_OF_MEMORY = "libgomp: Thread creation failed: Resource temporarily unavailable"
_UNIT_BYTES = {"bytes": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


def measurement_of_exception(error: BaseException) -> Measurement:
    """The outcome for an exception that ended a training."""
    text = str(error)
    if isinstance(error, Diverged):
        return Measurement(outcome="diverged", message=text)
    if isinstance(error, ParityFailed):
        message = f"computes another training: {text}"
        return Measurement(outcome="parity_failed", message=message, parity="failed", parity_message=text)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(face in text for face in _OUT_OF_MEMORY):
        requested_bytes = _requested_bytes(text)
        asked = f": {format_size(requested_bytes)} more asked for" if requested_bytes else ""
        if text.startswith(CONTEXT_ALONE):
            asked = f": {text}"
        return Measurement(
            outcome="out_of_memory",
            message=f"out of memory{asked}",
            requested_bytes=requested_bytes,
            peak_memory_bytes=_allocated_so_far(error),
        )
    first_line = next((line for line in text.splitlines() if line.strip()), "")
    return Measurement(outcome="crashed", message=f"{type(error).__name__}: {first_line}".strip(": "))


def measurement_of_exit(exit_status: int, *, log_file: Path, host_killed_for_memory: bool) -> Measurement:
    """The outcome for a process that ended without a result. `exit_status` is negative for a signal."""
    log_tail = log_file.read_text(errors="replace")[-4000:] if log_file.exists() else ""
    if _OPENMP_OUT_OF_MEMORY in log_tail or (exit_status == -signal.SIGKILL and host_killed_for_memory):
        return Measurement(outcome="out_of_memory", message="the host ran out of memory")
    if exit_status < 0:
        how = f"was killed by {signal.Signals(-exit_status).name}"
    else:
        how = f"ended with exit code {exit_status}"
    return Measurement(outcome="crashed", message=f"the trial's process {how}; see {log_file}")


def _requested_bytes(text: str) -> int | None:
    """The size of the refused request: CUDA's "Tried to allocate 2.00 GiB", the CPU's "tried to allocate 16 bytes"."""
    match = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", text)
    return None if match is None else int(float(match[1]) * _UNIT_BYTES[match[2]])


def _allocated_so_far(error: BaseException) -> int | None:
    if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return None


def host_memory_kills() -> int:
    """How many processes the kernel has killed for lack of memory since it booted."""
    try:
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else 0
