"""What happens in a forked process: its own session, its own log, its limits, the task, the reply."""

import fcntl
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from autotune.errors import AutotuneError
from autotune.execution.server import socket_lock
from autotune.execution.server.child_process import TRAININGS

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""By which a terminal or a batch system ends all processes at once."""

HOLDERS_OF_A_TURN = 8
"""Processes that may hold one turn at a time: a trial, and those before it that could not be ended.
"""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def be_the_child(
    request: dict[str, Any], *, server_pid: int, result_pipe: int, begins: float
) -> None:
    """Runs the request and leaves by os._exit: the parts of the server that were copied by the fork never run on.

    Waits until the monotonic clock says `begins`.
    """
    exit_code = 1
    try:
        _take_signals_back()
        os.setsid()
        _die_with(server_pid)
        become_reaper()  # what it starts and loses stays its own, and goes when it goes
        time.sleep(max(0.0, begins - time.monotonic()))
        write_line(result_pipe, _run(request, result_pipe=result_pipe))
        exit_code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        _leave(exit_code)


def _leave(exit_code: int) -> NoReturn:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        pass  # the log's disk is full, or it was closed
    finally:
        os._exit(exit_code)


def _run(request: dict[str, Any], *, result_pipe: int) -> dict[str, Any]:
    from autotune.execution.server.progress import PipeProgress
    from autotune.execution.server.tasks import TASKS

    is_training = request["task"] in TRAININGS
    try:
        _settle(request)
        watched = {"progress": PipeProgress(result_pipe)} if is_training else {}
        return {"result": TASKS[request["task"]](**request["payload"], **watched), "error": None}
    except AutotuneError as error:
        kind, message, hint = type(error).__name__, error.message, error.hint
    except OSError as error:
        kind = "TrialLost" if is_training else "StorageUnavailable"
        message, hint = str(error), "choose a folder that can be written to"
    except Exception as error:
        import traceback

        traceback.print_exc()
        kind, message = "PreparationFailed", f"{type(error).__name__}: {error}"
        hint = f"the whole story is in {request['log_file']}"
    return {"result": None, "error": {"kind": kind, "message": message, "hint": hint}}


def _settle(request: dict[str, Any]) -> None:
    _redirect_output(Path(request["log_file"]))
    os.environ.update(request.get("environment") or {})
    if request.get("turn"):
        _hold_turn(request["turn"])
    if request.get("limit_host_memory"):
        _limit_host_memory()


def _take_signals_back() -> None:
    """What the server ignores or waits for ends a trial as it ends any program; Ctrl-C stays the search's."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, *(number for number in END_SIGNALS if number != signal.SIGINT)):
        signal.signal(number, signal.SIG_DFL)


def _redirect_output(log_file: Path) -> None:
    log_file.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)


def _die_with(server_pid: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server_pid:
        os._exit(1)


def _hold_turn(slot: str) -> None:
    """Holds the device's turn until this process, and all that it forks, have ended.

    `slot` is a lock file, which is shared with the search's other processes, or `@` and the
    beginning of the names of abstract sockets, each of which one process takes.
    """
    if not slot.startswith("@"):
        fcntl.flock(os.open(slot, os.O_RDWR | os.O_NOFOLLOW), fcntl.LOCK_SH)
        return
    for number in range(HOLDERS_OF_A_TURN):
        if socket_lock.take(f"{slot[1:]}.{number}") is not None:  # never closed
            return


def _limit_host_memory() -> None:
    """Lets this process take what is available now and no more, so that it fails instead of the machine."""
    sizes = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    status = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text(errors="replace").splitlines()
    )
    available_kib, data_kib = (
        int(text.split()[0]) for text in (sizes["MemAvailable"], status["VmData"])
    )
    limit = (available_kib + data_kib) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def become_reaper() -> None:
    """Makes orphaned descendants this process's own children, so that it can wait for them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    """Linux's prctl; elsewhere nothing, and only what the server does itself holds."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def write_line(pipe: int, value: dict[str, Any]) -> None:
    data = json.dumps(value).encode() + b"\n"
    while data:
        data = data[os.write(pipe, data) :]
