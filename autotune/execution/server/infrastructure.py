"""Recognizes failures of the machine, which raise TrialLost: the trial may be retried.

Errors of a device are recognized by CUDA's message, because torch passes it on in exceptions of
several types. Each message was classified by NVIDIA's description of its code (CUDA Runtime API,
"cudaError"). The machine is to blame for:

- CUDA-capable device(s) is/are busy or unavailable: another process has the device, or it hangs.
- no CUDA-capable device is detected, No CUDA GPUs are available: the device has disappeared.
- CUDA driver initialization failed, Found no NVIDIA driver: the driver has disappeared.
- uncorrectable ECC error encountered: the memory chip failed.
- uncorrectable NVLink error, hardware error over NVLink: a link failed.
- GPU is lost, GPU requires restart, device is lost, fallen off the bus: from NVML and the driver.
- hardware stack error: an error of the chip, as NVIDIA describes it.
- system not yet initialized, initialization error: the driver or its fabric manager is not running.
- unsupported display driver / cuda driver combination: the driver was replaced during the study.
- MPS ...: the multi-process server of the device failed.
- unknown error: what programs get when a GPU falls off the bus; no faulty kernel has this code.

The configuration is to blame for:

- unspecified launch failure: mostly an invalid access of a kernel, rarely the device.
- illegal memory access, misaligned address, device-side assert, illegal instruction: a kernel.
- the launch timed out and was terminated: a kernel too slow for a device that drives a display.
- CUBLAS_STATUS_..., CUDNN_STATUS_...: any of these errors, reported by a library.

Where the device was to blame for one of the latter after all, `LocalExecutor.check_device` fails.
"""

import errno
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from autotune.errors import TrialLost
from autotune.spec.full_disk import says_full_disk

_DEVICE_LOST = (
    "device(s) is/are busy or unavailable",
    "no CUDA-capable device is detected",
    "No CUDA GPUs are available",
    "Found no NVIDIA driver",
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "over nvlink or a hardware error",
    "hardware stack error",
    "GPU is lost",
    "GPU requires restart",
    "device is lost",
    "device was lost",
    "fallen off the bus",
    "system not yet initialized",
    "CUDA error: initialization error",
    "CUDA driver initialization failed",
    "unsupported display driver / cuda driver combination",
    "MPS client",
    "MPS server",
    "CUDA error: unknown error",
    "CUDA driver error: unknown error",
    "CUDA unknown error",
)

_DISK_ERRORS = (errno.EIO, errno.EROFS, errno.ESTALE)

_HELPER_KILLED = tuple(
    f"is killed by signal: {name}" for name in ("Killed", "Terminated", "Hangup")
)
"""torch's messages about a killed DataLoader worker."""
_PART_OF_COMPILER_KILLED = "signal terminated program"
"""Part of what gcc prints if one of its programs is killed."""

_FROM_OUTSIDE = (
    signal.SIGKILL,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)
"""Signals sent by a person or a batch system. A program causes the others itself: SIGSEGV, SIGBUS,
SIGILL, SIGFPE, SIGABRT, SIGTRAP, SIGSYS, SIGPIPE, SIGALRM."""

_HINT = "nothing of the configuration is known from this; run the same command again to continue"


def machine_failure_behind(error: BaseException, *, device_type: str) -> TrialLost | None:
    """Returns the error to raise where the machine caused an exception in a training; else None.

    Device errors count on CUDA only: a script that requests a GPU in a study on the CPU is wrong.
    """
    for cause in exception_chain(error):
        text = str(cause)
        if device_type == "cuda" and any(message in text for message in _DEVICE_LOST):
            return TrialLost(f"the device failed under the trial: {first_line(text)}", hint=_HINT)
        if any(message in text for message in _HELPER_KILLED):
            return TrialLost(
                f"a process of the trial was killed from outside: {first_line(text)}", hint=_HINT
            )
        if _is_of_killed_compiler(cause):
            return TrialLost("a compiler of the trial was killed from outside", hint=_HINT)
        if getattr(cause, "errno", None) in _DISK_ERRORS or says_full_disk(cause):
            return TrialLost(
                f"the trial could not use its files: {first_line(text)}", hint=_DISK_HINT
            )
    return None


def _is_of_killed_compiler(cause: BaseException) -> bool:
    if isinstance(cause, subprocess.CalledProcessError) and -cause.returncode in _FROM_OUTSIDE:
        return True
    return _PART_OF_COMPILER_KILLED in str(cause)


_DISK_HINT = "see that the disk works and has room; run the same command again to continue"


def machine_failure_by_signal(number: int) -> TrialLost | None:
    """Returns the error to raise where the signal that ended a trial came from outside; else None.

    The server must not call it for a signal that it has sent itself.
    """
    if number not in _FROM_OUTSIDE:
        return None
    return TrialLost(
        f"the trial's process was killed from outside, by {signal_name(number)}", hint=_HINT
    )


def exception_chain(error: BaseException) -> Iterator[BaseException]:
    """Yields the exception, then its cause or context, and so on.

    torch.compile raises another exception from None and has the original as `inner_exception`.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        if current.__cause__ is not None:
            current = current.__cause__
        elif isinstance(inner := getattr(current, "inner_exception", None), BaseException):
            current = inner
        elif current.__suppress_context__:
            current = None
        else:
            current = current.__context__


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def first_line(text: str) -> str:
    """Returns the first line of `text` that is not blank, without surrounding spaces."""
    for line in text.splitlines():
        if line.strip():
            return line.strip()
    return ""


def host_memory_kills(*, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns how many processes the kernel has killed because the host ran out of memory.

    Counts this control group (version 2), which excludes other containers; without one, the whole
    machine since it booted.
    """
    group = re.search(r"^0::/?(.*)$", _read(proc / "self" / "cgroup"), re.MULTILINE)
    if group:
        kills = _oom_kills_in(groups / group[1] / "memory.events")
        if kills is not None:
            return kills
    return _oom_kills_in(proc / "vmstat") or 0


def _oom_kills_in(file: Path) -> int | None:
    match = re.search(r"^oom_kill (\d+)$", _read(file), re.MULTILINE)
    return int(match[1]) if match else None


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="surrogateescape")
    except OSError:
        return ""
