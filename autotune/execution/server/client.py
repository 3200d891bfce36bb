"""The client of the trial server: starts it, sends requests and returns futures, without torch."""

import itertools
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from autotune.errors import AutotuneError, TrialServerLost
from autotune.execution.server.limits import TimeLimits
from autotune.execution.server.process_tree import descendants, kill_all, send, started_under
from autotune.execution.server.replies import (
    LineBuffer,
    MalformedReply,
    decode,
    line_of,
    phase_of,
)
from autotune.execution.server.silence import Silence
from autotune.execution.tasks import Task, value_of
from autotune.system.python_environment import python_environment

R = TypeVar("R")

SERVER_COMMAND = (sys.executable, "-P", "-m", "autotune.execution.server.fork_server")
"""-P: a datasets.py or json.py in the current folder must not shadow the real module."""

SILENCE_SECONDS = 120.0
"""A server that has not said anything for so long is ended. It does so every 5 s
(`fork_server.BEAT_SECONDS`), and serves one line at a time, so that the longest pause is that of a
machine without a processor for it."""
START_SECONDS = 900.0
"""The same for one that still imports torch, which a slow network disk may hold up."""
_WATCH_SECONDS = 1.0
"""How often to look whether the server lives and whether it is silent."""
_SECONDS_TO_END = 5.0
_PIPE_BYTES = 65536
_MOST_BYTES_AFTER_END = 2**20
"""What a server that has ended can have left in its pipe, which a trial may still hold open."""


@dataclass(frozen=True, kw_only=True)
class Doing:
    """What a process does, as far as it is known."""

    phase: str = ""
    """Such as `compile`; empty before it has reported anything."""
    steps: tuple[int, int] | None = None
    """How many steps of its training have ended, and of how many."""
    used_bytes: int | None = None
    """Memory in use on the GPU, where a node of a cluster says it."""


@dataclass(kw_only=True)
class _Request:
    """A request without a reply."""

    task: Task[Any]
    log_file: Path
    future: Future[Any] = field(default_factory=Future)
    doing: Doing = field(default_factory=Doing)


class TrialServer:
    """Starts a server process and keeps the futures of its requests.

    Use it as a context manager, or `close` it. `environment` are variables for all its processes; a
    request can override them.

    A server that is silent for `silence_seconds` is ended, with everything that it has started. A
    trial may have stopped it, since both are processes of one user, and would then have no limit of
    time. Halfway, and once only, the server is sent SIGCONT: one that was stopped by mistake goes
    on, and ends what has passed its limits. A trial that stops it again and again ends it.
    """

    def __init__(
        self,
        *,
        log_file: Path,
        command: Sequence[str] = SERVER_COMMAND,
        environment: Mapping[str, str] | None = None,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self._log_file = log_file
        self._silence_seconds = silence_seconds
        self._requests: dict[int, _Request] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        """Two locks: a write may block until the server's replies are read, which needs `_lock`."""
        self._is_ready = False
        self._is_lost = False
        self._is_closing = False
        self._why_lost = "has ended"
        self._mark = uuid.uuid4().hex
        with log_file.open("a") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C at the terminal reaches the search only
                env={**_environment_of_trials(self._mark), **(environment or {})},
                bufsize=0,
            )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._reader = threading.Thread(
            target=self._read_replies, name="trial replies", daemon=True
        )
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_lost(self) -> bool:
        """Whether the server has ended, so that it takes no more requests."""
        return self._is_lost

    def submit(
        self,
        task: Task[R],
        *,
        log_file: Path,
        limits: TimeLimits | None = None,
        environment: dict[str, str] | None = None,
        slots: Sequence[str] = (),
        cpus: Sequence[int] | None = None,
        modules: Sequence[str] = (),
    ) -> Future[R]:
        """Carries out a task in a new process.

        The process and all that it forks hold `slots`, locks of `execution/device_slots.py`, and
        run on `cpus` only, numbers of the operating system, with a thread on each. The server
        imports `modules` first, once for all its processes, as if there were no GPU: only for a
        server that trains nothing. The future's exception is the AutotuneError that the task
        raised, TrialLost where the machine ended it, or PreparationFailed.
        """
        future: Future[R] = Future()
        request_id = next(self._ids)
        request = {
            "id": request_id,
            "task": task.name,
            "payload": asdict(task),
            "is_training": task.is_training,
            "rests": task.rests,
            "requested_at": time.monotonic(),
            "log_file": log_file.absolute(),
            "limits": limits,
            "environment": environment,
            "limit_host_memory": task.limits_host_memory,
            "turn": slots,
            "cpus": cpus,
            "modules": modules,
        }
        with self._lock:
            if self._is_lost:
                future.set_exception(self._loss())
                return future
            self._requests[request_id] = _Request(task=task, log_file=log_file, future=future)
        self._send(request)
        return future

    def cancel(self, future: Future[Any]) -> None:
        """Ends the process of `future`; within seconds a training has the outcome `interrupted`."""
        with self._lock:
            ids = [number for number, known in self._requests.items() if known.future is future]
        for request_id in ids:
            self._send({"cancel": request_id})

    def doing(self, future: Future[Any]) -> Doing:
        """Returns what the process of `future` does."""
        with self._lock:
            for known in self._requests.values():
                if known.future is future:
                    return known.doing
        return Doing()

    def close(self) -> None:
        """Ends the server and everything it runs."""
        assert self._process.stdin is not None
        self._is_closing = True
        with self._writing:
            self._process.stdin.close()
        if not self._is_ready:
            # Still importing: it runs nothing and would notice the end of its input much later.
            self._process.kill()
        try:
            self._process.wait(timeout=_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._kill()
        self._reader.join(timeout=_SECONDS_TO_END)

    def __enter__(self) -> "TrialServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, request: dict[str, Any]) -> None:
        """Writes a request; does not wait for a server that has ended or is to end.

        A trial may hold the other end of the pipe open, which then nobody reads.
        """
        assert self._process.stdin is not None
        data = line_of(request)
        room = select.poll()
        with self._writing:
            while data and not (self._is_lost or self._is_closing):
                try:
                    pipe = self._process.stdin.fileno()
                    data = data[os.write(pipe, data) :]
                except BlockingIOError:
                    room.register(pipe, select.POLLOUT)
                    room.poll(_WATCH_SECONDS * 1000)
                except BrokenPipeError:
                    return  # the reader sees the end of the server and fails every future

    # -- replies: all of it in the thread that reads them ------------------------------------------

    def _read_replies(self) -> None:
        try:
            self._read_until_the_end()
        finally:  # whatever goes wrong here, no caller waits for ever
            self._kill()
            with self._lock:
                self._is_lost = True
                unanswered = list(self._requests.values())
                self._requests = {}
            for request in unanswered:
                request.future.set_exception(self._loss())

    def _read_until_the_end(self) -> None:
        """Handles replies until the server has ended, or is silent for too long.

        That its pipe is closed does not always show its end: a trial may hold the pipe open.
        """
        assert self._process.stdout is not None
        replies = self._process.stdout.fileno()
        lines = LineBuffer()
        silence = Silence(step_seconds=_WATCH_SECONDS)
        was_continued = False
        bytes_left = _MOST_BYTES_AFTER_END
        with selectors.DefaultSelector() as selector:
            selector.register(replies, selectors.EVENT_READ)
            while bytes_left > 0:
                has_ended = self._process.poll() is not None
                if selector.select(0.0 if has_ended else _WATCH_SECONDS):
                    received = os.read(replies, _PIPE_BYTES)
                    if not received:
                        return
                    for line in lines.lines(received):
                        self._handle(line)
                    silence.end()
                elif has_ended:
                    return
                if has_ended:
                    bytes_left -= _PIPE_BYTES
                limit = self._silence_seconds if self._is_ready else START_SECONDS
                seconds = silence.seconds()
                if seconds > limit:
                    self._why_lost = f"did not answer for {limit:.0f} s, and was ended"
                    return
                if seconds > limit / 2 and not was_continued:
                    was_continued = True
                    send([self.pid], signal.SIGCONT)

    def _handle(self, line: bytes) -> None:
        try:
            message = decode(line)
        except MalformedReply:
            return  # half a line of a killed server, or output of the interpreter before it begins
        if isinstance(message.get("failed"), str):
            self._why_lost = f"has ended: {message['failed']}"
            return
        self._is_ready = True
        request_id = message.get("id")
        if not isinstance(request_id, int):
            return
        with self._lock:
            request = self._requests.get(request_id)
            if request is None:
                return
            if "phase" in message:
                request.doing = _doing_of(message, known=request.doing)
                return
            del self._requests[request_id]
        try:
            request.future.set_result(value_of(message, request.task, log_file=request.log_file))
        except AutotuneError as error:
            request.future.set_exception(error)

    def _kill(self) -> None:
        """Kills what is left of the server and of all that it has started.

        The server comes last: until then its processes are its descendants, whatever environment
        they have chosen.
        """
        if self._process.poll() is None:
            kill_all(
                lambda: descendants(self.pid),
                within_seconds=_LEFTOVER_SECONDS,
                between=self._process.poll,
            )
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
            self._process.wait(timeout=_SECONDS_TO_END)
        kill_all(
            lambda: started_under(self._mark),
            within_seconds=_LEFTOVER_SECONDS,
            between=self._process.poll,
        )

    def _loss(self) -> TrialServerLost:
        return TrialServerLost(
            f"the process that starts the trials {self._why_lost}",
            hint=f"see {self._log_file}; run the same command again to continue",
        )


def _doing_of(message: Mapping[str, Any], *, known: Doing) -> Doing:
    try:
        report = phase_of(message)
    except MalformedReply:
        return known
    return Doing(phase=report.phase, steps=report.steps)


_MARK = "AUTOTUNE_TRIAL_SERVER"
"""Environment variable of a server that all its descendants inherit: it finds them after the
server has died."""
_LEFTOVER_SECONDS = 2.0


def _environment_of_trials(mark: str) -> dict[str, str]:
    """Returns the caller's environment, with the caching allocator, whose peaks are measured."""
    environment = python_environment()
    environment.pop("PYTORCH_NO_CUDA_MEMORY_CACHING", None)
    environment[_MARK] = mark
    return environment
