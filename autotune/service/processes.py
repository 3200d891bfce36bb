"""The processes of searches: starts them, and finds them again after the server was started anew.

Each is the leader of a session of its own, so that it goes on where the server is killed. A pid is
given to other processes later; together with its start it names one process.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from autotune.spec.queued_search import SearchProcess

_SAME_START_SECONDS = 2.0
"""Where only the clock tells when a process was started, and may be set meanwhile."""
_SAME_TICK_SECONDS = 0.005
_HAS_TICKS = Path("/proc/self/stat").exists()
_NOT_PASSED_ON = ("AUTOTUNE_TOKEN",)
"""Secrets of the server that a search has no use for."""


_PARTS_OF_JOB = 3
"""Of the identity of a machine, after its name: the start, the job and the namespace of pids."""


@cache
def this_host() -> str:
    """Returns the name of this machine, by which processes of others are told apart.

    After a start of the machine it has another name: no process of before is left. A job of Slurm
    counts as a machine of its own: its devices are not those of another job on the same node. So
    does a container with its own namespace of pids, in which those of others mean nothing.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""  # not Linux
    try:
        namespace = os.readlink("/proc/self/ns/pid").removeprefix("pid:").strip("[]")
    except OSError:
        namespace = ""  # not Linux
    job = os.environ.get("SLURM_JOB_ID", "")
    parts = (socket.gethostname()[:80], boot[:13], job[:20], namespace[:20])
    return " ".join(filter(None, parts))


def machine_of(host: str) -> str:
    """Returns the name of a machine as people know it, with the job of Slurm that counts as one."""
    name, *parts = host.split(" ")
    return f"{name}, job {parts[1]}" if len(parts) == _PARTS_OF_JOB else name


def this_process() -> SearchProcess:
    """Returns the identity of this process."""
    return _process_of(os.getpid())


def seconds_since_start() -> float:
    """Returns for how long this process has been there, with its imports."""
    return max(0.0, time.time() - float(psutil.Process().create_time()))


def _process_of(pid: int) -> SearchProcess:
    return SearchProcess(host=this_host(), pid=pid, started_at=_start_of(psutil.Process(pid)))


def _start_of(process: psutil.Process) -> float:
    """Returns when a process was started: on Linux since the machine was, whatever the clock says.

    That is field 22 of /proc/PID/stat (man proc_pid_stat), in clock ticks.
    """
    try:
        content = Path(f"/proc/{process.pid}/stat").read_bytes()
        ticks = int(content.rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return float(process.create_time())
    return ticks / os.sysconf("SC_CLK_TCK")


def find_process(process: SearchProcess) -> psutil.Process | None:
    """Returns a process of this machine; None where it has ended, or its pid is another's now."""
    if process.host != this_host():
        return None
    try:
        found = psutil.Process(process.pid)
        tolerance = _SAME_TICK_SECONDS if _HAS_TICKS else _SAME_START_SECONDS
        is_same = abs(_start_of(found) - process.started_at) < tolerance
        if not is_same or found.status() == psutil.STATUS_ZOMBIE:
            return None
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return None
    return found


def _find_search(process: SearchProcess) -> psutil.Process | None:
    """Returns a process of this machine that may be ended; None where it may not be, or has ended.

    Who may write to the database may write any pid into it. So it must also be what `start_process`
    starts: `python -m` as the leader of a session, of this user.
    """
    found = find_process(process)
    if found is None:
        return None
    try:
        is_search = (
            found.uids().real == os.getuid()
            and os.getsid(found.pid) == found.pid
            and found.cmdline()[1:2] == ["-m"]
        )
    except (psutil.Error, OSError):
        return None
    return found if is_search else None


def stop_process(process: SearchProcess) -> None:
    """Ask a search of this machine to stop, if it is still there."""
    found = _find_search(process)
    if found is not None:
        with suppress(psutil.Error):
            found.terminate()


def kill_process(process: SearchProcess) -> None:
    """Kill a search of this machine; its trials end with it."""
    found = _find_search(process)
    if found is None:
        return
    with suppress(psutil.Error, ProcessLookupError, PermissionError):
        os.killpg(found.pid, signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class StartedProcess:
    """A process that this server has started, which it also has to reap."""

    popen: subprocess.Popen[bytes]
    process: SearchProcess
    started_at: float
    """By the monotonic clock."""

    def how_it_ended(self) -> str | None:
        """Returns in words how it ended; None while it runs."""
        code = self.popen.poll()
        if code is None:
            return None
        if code < 0:
            with suppress(ValueError):
                return f"it was killed by {signal.Signals(-code).name}"
        return f"it ended with exit code {code}"


def start_process(module: str, order: dict[str, Any], *, log_file: Path) -> StartedProcess:
    """Start `python -m module` as the leader of a session, with `order` as JSON on its stdin.

    The order may hold the URL of a database with its password, which a command line would show to
    every user of the machine. What the process prints is appended to `log_file`. Raises OSError.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    with log_file.open("ab") as log:
        popen = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment,
        )
    process = _process_of(popen.pid)  # it waits for its order
    assert popen.stdin is not None
    with suppress(BrokenPipeError), popen.stdin:
        popen.stdin.write(json.dumps(order).encode())
    return StartedProcess(popen=popen, process=process, started_at=time.monotonic())
