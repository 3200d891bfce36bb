"""Workers that start in a tenth of a second: forked from a process that has imported all they need.

A proof of hundreds of kills starts hundreds of workers and of trial servers, each of which would
import torch first. Here a worker is forked, and its server from it; from the fork on both are what
`worker.py` and `stand_in.py` of `tests/quick_study/` are, with sessions, pipes and processes of
their own. `start_command` starts the same as a command, to compare.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import autotune.execution.process.answers
import autotune.execution.process.failures
import autotune.training.trainer  # noqa: F401
from autotune.execution.server import client
from tests.quick_study import stand_in, worker


def start_forked(
    words: Sequence[str], *, folder: Path, environment: Mapping[str, str] | None = None
) -> int:
    """A worker in `folder`; its process id.

    Turns on the device are those of the folder's workers alone.
    """
    pid = os.fork()
    if pid == 0:
        _be_the_child(words, folder, environment or {})
    return pid


def start_command(
    words: Sequence[str], *, folder: Path, environment: Mapping[str, str] | None = None
) -> int:
    with (folder / "workers.log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, worker.__file__, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env={**os.environ, "AUTOTUNE_LOCK_FOLDER": str(folder), **(environment or {})},
        )
    process.returncode = 0  # who started it waits for it by its id, as for the forked ones
    return process.pid


def _be_the_child(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    exit_code = 70
    try:
        os.closerange(3, 4096)
        os.chdir(folder)
        os.environ.update({"AUTOTUNE_LOCK_FOLDER": str(folder), **environment})
        _write_to(folder / "workers.log")
        _start_servers_by_fork()
        exit_code = worker.main(words)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(exit_code)


def _start_servers_by_fork() -> None:
    """In this process, which has imported what a server needs."""
    forking = SimpleNamespace(**{**vars(subprocess), "Popen": _ForkedServer})
    client.subprocess = forking  # type: ignore[attr-defined]


def _write_to(log_file: Path) -> None:
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target in (1, 2):
        os.dup2(log, target)
    os.close(log)


class _ForkedServer:
    """The part of `subprocess.Popen` that the trial server's client uses, with a fork."""

    def __init__(self, command: Sequence[str], *, stderr: Any, **_: object) -> None:
        requests, replies = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                for source, target in ((requests[0], 0), (replies[1], 1), (stderr.fileno(), 2)):
                    os.dup2(source, target)
                os.closerange(3, 4096)  # locks and connections of the worker's are not the server's
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
                stand_in.main()
            finally:
                os._exit(0)
        os.close(requests[0])
        os.close(replies[1])
        self.stdin, self.stdout = os.fdopen(requests[1], "wb"), os.fdopen(replies[0], "rb")
        self._exit_code: int | None = None
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        with self._reaping:  # the thread that reads replies asks, too
            if self._exit_code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._exit_code = os.waitstatus_to_exitcode(status) if pid else None
            return self._exit_code

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (1e9 if timeout is None else timeout)
        while (exit_code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("server", timeout or 0.0)
            time.sleep(0.01)
        return exit_code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
