"""Programs that start within a tenth of a second: forked from a process that has imported all.

A proof of hundreds of kills starts hundreds of workers, servers and searches, and of trial servers,
each of which would import torch first. Here a program of `tests/quick_study/` is forked, and what
it starts from it; from the fork on all are what those programs are, with sessions, pipes and
processes of their own. One in twenty starts as a command, and so does what it starts.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import autotune.execution.process.answers
import autotune.execution.process.failures
import autotune.training.trainer  # noqa: F401
from autotune.execution.server import client
from autotune.execution.server.process_tree import become_reaper
from autotune.service import processes
from tests.quick_study import search_process, server, stand_in, worker

ROOT = Path(__file__).resolve().parents[2]
SHARE_OF_COMMANDS = 0.05
_ASKING = threading.Lock()

_STARTED_BY_PROGRAMS: Mapping[str, Callable[[], object]] = {
    str(worker.STAND_IN): stand_in.main,
    server.SEARCH_MODULE: search_process.main,
}
"""What autotune starts as a command, by the word that names it."""


def start(
    program: ModuleType,
    words: Sequence[str],
    *,
    folder: Path,
    chance: random.Random,
    environment: Mapping[str, str],
) -> int:
    """Start a program of `tests/quick_study/` in `folder`; return its process id.

    Turns on the device are those of the folder's programs alone, and temporary files are there.
    What it says is appended to a log of its name.
    """
    log = folder / f"{program.__name__.rpartition('.')[2]}.log"
    of_folder = {
        "AUTOTUNE_LOCK_FOLDER": str(folder),
        "TMPDIR": str(folder / "tmp"),
        "PYTHONPATH": str(ROOT),
    }
    (folder / "tmp").mkdir(exist_ok=True)
    if chance.random() < SHARE_OF_COMMANDS:
        return _start_command(program, words, folder, log, {**of_folder, **environment})
    pid = os.fork()
    if pid == 0:
        _be_the_child(program, words, folder, log, {**of_folder, **environment})
    return pid


def _start_command(
    program: ModuleType,
    words: Sequence[str],
    folder: Path,
    log_file: Path,
    environment: Mapping[str, str],
) -> int:
    with log_file.open("a") as log:
        process = subprocess.Popen(
            [sys.executable, str(program.__file__), *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env={**os.environ, **environment},
        )
    process.returncode = 0  # who started it waits for it by its id, as for the forked ones
    return process.pid


def _be_the_child(
    program: ModuleType,
    words: Sequence[str],
    folder: Path,
    log_file: Path,
    environment: Mapping[str, str],
) -> None:
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    _be_another_program(
        lambda: program.main(words),
        streams=(os.open(os.devnull, os.O_RDONLY), log, log),
        folder=str(folder),
        environment={**os.environ, **environment},
    )


def _be_another_program(
    main: Callable[[], object],
    *,
    streams: Sequence[int],
    folder: str,
    environment: Mapping[str, str],
) -> NoReturn:
    """Run a program in this forked process, with nothing of what its parent has opened."""
    exit_code = 70
    try:
        for target, source in enumerate(streams):
            os.dup2(source, target)
        os.closerange(3, 4096)  # locks and connections of the parent's are not the child's
        # Not the parent's: its input may be read ahead, and its output is a file of pytest's.
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        tempfile.tempdir = None
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        if main is not stand_in.main:  # it starts no program
            forking = partial(_popen, _start_helper())
            replaced = SimpleNamespace(**{**vars(subprocess), "Popen": forking})
            client.subprocess = processes.subprocess = replaced  # type: ignore[attr-defined]
        exit_code = int(main() or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def _start_helper() -> socket.socket:
    """Start a process that forks on request, and return the socket to it.

    This one may not fork what uses SQLite once it has opened a database: SQLite would believe in
    locks that the child does not have.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    become_reaper()  # what it forks becomes a child of this process
    folder = os.getcwd()
    os.chdir("/")  # it is none of those that are killed, which are found by their folder
    if os.fork():
        os.chdir(folder)
        theirs.close()
        return ours
    ours.close()
    while True:
        request, streams, *_ = socket.recv_fds(theirs, 2**18, 3)
        if not request:
            os._exit(0)
        wanted = json.loads(request)
        said, says = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid:
                os.write(says, str(pid).encode())
                os._exit(0)
            os.setsid()
            _be_another_program(
                _STARTED_BY_PROGRAMS[wanted["program"]],
                streams=streams,
                folder=wanted["folder"],
                environment=wanted["environment"],
            )
        os.waitpid(between, 0)
        theirs.send(os.read(said, 100))
        for opened in (said, says, *streams):
            os.close(opened)


def _popen(helper: socket.socket, command: Sequence[str], **options: Any) -> Any:
    """Start what autotune starts; what is no stand-in is a command as always."""
    program = next((word for word in command if word in _STARTED_BY_PROGRAMS), None)
    if program is None:
        return subprocess.Popen(command, **options)
    return _Forked(helper, program, **options)


class _Forked:
    """The part of `subprocess.Popen` that autotune uses, with a fork by a helper."""

    def __init__(
        self,
        helper: socket.socket,
        program: str,
        *,
        stdout: Any,
        stderr: Any,
        env: Mapping[str, str],
        **_: object,
    ) -> None:
        wanted = {
            "program": program,
            "folder": os.getcwd(),
            "environment": dict(env),
        }
        requests, replies = os.pipe(), os.pipe()
        answers = replies[1] if stdout == subprocess.PIPE else stdout.fileno()
        streams = (requests[0], answers, stderr.fileno())
        with _ASKING:
            socket.send_fds(helper, [json.dumps(wanted).encode()], streams)
            self.pid = int(helper.recv(100))
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
