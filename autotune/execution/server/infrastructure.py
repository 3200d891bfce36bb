"""What a machine does to a trial, and the configuration has no part in: it is TrialLost, and may be tried again.

A device's errors are told by what CUDA says, for torch passes on its words in exceptions of several
types. Decided word by word, from NVIDIA's description of each code (CUDA Runtime API, "cudaError"):

| CUDA says | lost? | because |
|---|---|---|
| CUDA-capable device(s) is/are busy or unavailable | yes | another process has the device, or it does not come back |
| no CUDA-capable device is detected, No CUDA GPUs are available | yes | the study began on one, and it is gone |
| CUDA driver initialization failed, Found no NVIDIA driver | yes | so is the driver |
| uncorrectable ECC error encountered | yes | the memory chip failed |
| uncorrectable NVLink error, hardware error over NVLink | yes | a link failed |
| GPU is lost, GPU requires restart, device is lost, fallen off the bus | yes | NVML and the driver say so |
| hardware stack error | yes | of the chip, as NVIDIA describes it |
| system not yet initialized, initialization error | yes | the driver or its fabric manager is not up |
| unsupported display driver / cuda driver combination | yes | the driver was exchanged under a running study |
| MPS ... | yes | the multi-process server of the device is at fault |
| unknown error | yes | what programs see when a GPU falls off the bus; no kernel's fault has this code |
| unspecified launch failure | no | mostly an access that a kernel of the configuration got wrong; seldom the device |
| illegal memory access, misaligned address, device-side assert, illegal instruction | no | a kernel's own |
| the launch timed out and was terminated | no | a kernel too slow for a device that also drives a display |
| CUBLAS_STATUS_..., CUDNN_STATUS_... | no | what a library makes of any of them |

Where a "no" was the device after all, the next thing that runs there shows it:
`LocalExecutor.check_device`.
"""

import errno
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

from autotune.errors import TrialLost

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

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE)
_DISK_TEXTS = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))
"""What a compiler or torch's own writer passes on as text."""

_HELPER_KILLED = tuple(
    f"is killed by signal: {name}" for name in ("Killed", "Terminated", "Hangup")
)
"""What torch says of a DataLoader's worker."""

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
"""Sent by somebody: a person, a batch system that wants its machine back. The others a program
earns by itself: SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGTRAP, SIGSYS, SIGPIPE, SIGALRM."""

_HINT = "nothing of the configuration is known from this; the same command goes on from here"


def loss_behind(error: BaseException, *, device_type: str) -> TrialLost | None:
    """Whether the machine is to blame for an exception that ended a training.

    On a CPU no device can be lost: a script that asks for a GPU there is wrong itself.
    """
    for cause in causes_of(error):
        text = str(cause)
        if device_type == "cuda" and any(face in text for face in _DEVICE_LOST):
            return TrialLost(f"the device failed under the trial: {first_line(text)}", hint=_HINT)
        if any(face in text for face in _HELPER_KILLED):
            return TrialLost(
                f"a process of the trial was killed from outside: {first_line(text)}", hint=_HINT
            )
        if getattr(cause, "errno", None) in _DISK_ERRORS or any(
            face in text for face in _DISK_TEXTS
        ):
            return TrialLost(
                f"the trial could not use its files: {first_line(text)}", hint=_DISK_HINT
            )
    return None


_DISK_HINT = "see that the disk works and has room; the same command goes on from here"


def loss_by_signal(number: int) -> TrialLost | None:
    """Whether the signal that ended a trial came from somebody else.

    Not to be asked of one that was sent from here.
    """
    if number not in _FROM_OUTSIDE:
        return None
    return TrialLost(
        f"the trial's process was killed from outside, by {name_of_signal(number)}", hint=_HINT
    )


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """The exception, what it was raised from or meanwhile, and so on."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def name_of_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        return f"signal {number}"


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def host_memory_kills(*, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """How many processes the kernel has killed for lack of memory: in this control group, else since it booted.

    A group's own count (version 2) leaves out what was killed elsewhere on the machine, beyond a
    container's walls.
    """
    own_group = re.search(r"^0::/?(.*)$", _read(proc / "self" / "cgroup"), re.MULTILINE)
    in_group = _kills_in(groups / own_group[1] / "memory.events") if own_group else None
    return _kills_in(proc / "vmstat") or 0 if in_group is None else in_group


def _kills_in(file: Path) -> int | None:
    match = re.search(r"^oom_kill (\d+)$", _read(file), re.MULTILINE)
    return int(match[1]) if match else None


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="surrogateescape")
    except OSError:
        return ""
