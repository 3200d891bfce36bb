"""Runs one request in a forked process: sets up session, log and limits, runs the task, replies."""

import ctypes
import json
import os
import resource
import signal
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from autotune import files
from autotune.errors import AutotuneError
from autotune.execution.server import socket_lock
from autotune.execution.server.replies import MEASURED_TASKS, TRAININGS
from autotune.spec.full_disk import disk_full, is_of_full_disk
from autotune.spec.result import Measurement
from autotune.standard_streams import protect_streams

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a terminal or a batch system sends to all processes at once."""

MAX_SLOT_HOLDERS = 8
"""How many processes may hold one slot: a trial, and earlier ones that could not be ended."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def run_child(request: dict[str, Any], *, server_pid: int, result_pipe: int, begins: float) -> None:
    """Runs the request once the monotonic clock has reached `begins`, and writes the reply.

    Leaves by os._exit, so that no code of the server runs on in the fork.
    """
    exit_code = 1
    try:
        _restore_signals()
        os.setsid()
        die_with(server_pid)
        become_reaper()  # orphans of the trial stay its descendants, and end with it
        time.sleep(max(0.0, begins - time.monotonic()))
        write_line(result_pipe, _run(request, result_pipe=result_pipe))
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(exit_code)


def _leave(exit_code: int) -> NoReturn:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        pass  # the log's disk is full, or the log was closed
    finally:
        os._exit(exit_code)


def _run(request: dict[str, Any], *, result_pipe: int) -> dict[str, Any]:
    # torch, which the server imports after its environment and signals are set (fork_server.py).
    from autotune.execution.server import progress, tasks  # noqa: PLC0415

    is_training = request["task"] in TRAININGS
    try:
        _set_up_process(request)
        arguments = dict(request["payload"])
        if is_training:
            arguments["progress"] = told = progress.PipeProgress(result_pipe)
            arguments["remark"] = told.remark
        return {"result": tasks.TASKS[request["task"]](**arguments), "error": None}
    except AutotuneError as error:
        kind, message, hint = type(error).__name__, error.message, error.hint
    except Exception as error:
        if is_of_full_disk(error) and not is_training:
            full = disk_full(Path(request["log_file"]).parent)
            return _failed(type(full).__name__, full.message, full.hint)
        if isinstance(error, OSError):
            kind = "TrialLost" if is_training else "StorageUnavailable"
            return _failed(kind, str(error), "choose a folder that can be written to")
        traceback.print_exc()
        kind = "PreparationFailed"
        message = f"{type(error).__name__}: {error}"
        hint = f"the full traceback is in {request['log_file']}"
        if request["task"] in MEASURED_TASKS:  # as where a script has replaced what we use
            ending = Measurement(outcome="crashed", message=f"{message}; {hint}")
            return {"result": asdict(ending), "error": None}
    return _failed(kind, message, hint)


def _failed(kind: str, message: str, hint: str) -> dict[str, Any]:
    return {"result": None, "error": {"kind": kind, "message": message, "hint": hint}}


def _set_up_process(request: dict[str, Any]) -> None:
    _redirect_output(Path(request["log_file"]))
    os.environ.update(request.get("environment") or {})
    if request.get("cpus"):
        _bind_to(request["cpus"])
    for slot in request.get("turn") or ():
        _hold_slot(slot)
    if request.get("limit_host_memory"):
        _limit_host_memory()


def _restore_signals() -> None:
    """Restores default handlers for signals that the server handles, except SIGINT.

    Ctrl-C concerns the search only.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, *END_SIGNALS):
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)


def _redirect_output(log_file: Path) -> None:
    """Has everything that is printed appended to the log, which is shortened meanwhile."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    protect_streams(is_answer=False)  # a log whose disk is full ends no trial


def die_with(parent_pid: int) -> None:
    """Has the kernel kill this process when its parent dies, such as the server."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _bind_to(cpus: list[int]) -> None:
    """Runs this process and all that it starts on these CPUs, with a thread on each at most.

    OpenMP has counted the CPUs when the server imported torch.
    """
    os.sched_setaffinity(0, cpus)
    torch = sys.modules.get("torch")  # a stand-in of the tests has none
    if torch is not None:
        torch.set_num_threads(min(torch.get_num_threads(), len(cpus)))


def _hold_slot(slot: str) -> None:
    """Holds the device slot until this process, and all that it forks, have ended.

    `slot` is a lock file, which is shared with the search's other processes, or `@` and the prefix
    of abstract socket names, each of which one process can take.
    """
    if not slot.startswith("@"):
        files.acquire(os.open(slot, os.O_RDWR | os.O_NOFOLLOW), shared=True)
        return
    for number in range(MAX_SLOT_HOLDERS):
        if socket_lock.acquire(f"{slot[1:]}.{number}") is not None:  # never closed
            return


def _limit_host_memory() -> None:
    """Limits this process to the memory available now, so that it fails instead of the machine."""
    available_kib = _kib_of(Path("/proc/meminfo"), "MemAvailable")
    data_kib = _kib_of(Path("/proc/self/status"), "VmData")
    limit_bytes = (available_kib + data_kib) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


def _kib_of(file: Path, field: str) -> int:
    """Returns the value of a line such as `VmData:  1234 kB`. Raises KeyError without one."""
    for line in file.read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0])
    raise KeyError(field)


def become_reaper() -> None:
    """Makes orphaned descendants children of this process, so that it can wait for them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    """Calls Linux's prctl; does nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def write_line(pipe: int, value: dict[str, Any]) -> None:
    """Writes `value` as a line of JSON to a descriptor."""
    data = json.dumps(value).encode() + b"\n"
    while data:
        data = data[os.write(pipe, data) :]
