"""Runs one request in a forked process: sets up session, log and limits, runs the task, replies."""

import os
import resource
import signal
import sys
import time
import traceback
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from autotune.errors import PreparationFailed, StorageUnavailable, TrialLost
from autotune.execution.server import socket_lock
from autotune.execution.server.process_tree import become_reaper, die_with
from autotune.execution.server.replies import TaskReply, failure, reply_after, write_line
from autotune.spec.full_disk import disk_full, is_of_full_disk
from autotune.system import files
from autotune.system.standard_streams import protect_streams

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a terminal or a batch system sends to all processes at once."""

MAX_SLOT_HOLDERS = 8
"""How many processes may hold one slot: a trial, and earlier ones that could not be ended."""


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
        write_line(result_pipe, asdict(_reply_to(request, result_pipe=result_pipe)))
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


def _reply_to(request: dict[str, Any], *, result_pipe: int) -> TaskReply:
    # torch, which the server imports after its environment and signals are set (fork_server.py).
    from autotune.execution.process import answers, progress  # noqa: PLC0415

    is_training = request["is_training"]
    try:
        _set_up_process(request)
        told = progress.PipeProgress(result_pipe)
        return reply_after(partial(answers.run_task, request, told))
    except Exception as error:
        if is_of_full_disk(error) and not is_training:
            return failure(disk_full(Path(request["log_file"]).parent))
        if isinstance(error, OSError):
            kind = TrialLost if is_training else StorageUnavailable
            return failure(kind(str(error), hint="choose a folder that can be written to"))
        traceback.print_exc()
        hint = f"the full traceback is in {request['log_file']}"
        return failure(PreparationFailed(f"{type(error).__name__}: {error}", hint=hint))


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
