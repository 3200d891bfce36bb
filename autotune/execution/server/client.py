"""The client of the trial server: starts it, sends requests and returns futures, without torch."""

import itertools
import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from autotune import errors
from autotune.errors import AutotuneError, TrialServerLost
from autotune.execution.server.limits import TimeLimits
from autotune.execution.server.process_tree import kill_all, started_under

SERVER_COMMAND = (sys.executable, "-P", "-m", "autotune.execution.server.fork_server")
"""-P: a datasets.py or json.py in the current folder must not shadow the real module."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The return value of any task, as JSON, and the wall-clock seconds of its process.

    That of a training becomes a `FinishedTrial` in `execution/local.py`.
    """

    result: Any
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Doing:
    """What a process does, as far as it is known."""

    phase: str = ""
    """Such as `compile`; empty before it has reported anything."""
    steps: tuple[int, int] | None = None
    """How many steps of its training have ended, and of how many."""
    used_bytes: int | None = None
    """Memory in use on the GPU, where a node of a cluster says it."""


class TrialServer:
    """Starts a server process and keeps the futures of its requests.

    Use it as a context manager, or `close` it. `environment` are variables for all its processes; a
    request can override them.
    """

    def __init__(
        self,
        *,
        log_file: Path,
        command: Sequence[str] = SERVER_COMMAND,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self._log_file = log_file
        self._futures: dict[int, Future[Reply]] = {}
        self._doing: dict[int, Doing] = {}
        """What each running process does, by the id of its request."""
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        """Two locks: a write may block until the server's replies are read, which needs `_lock`."""
        self._is_ready = False
        self._is_lost = False
        self._why_lost = ""
        self._mark = uuid.uuid4().hex
        with log_file.open("a") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C at the terminal reaches the search only
                env={**_environment_of_trials(self._mark), **(environment or {})},
            )
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
        task: str,
        payload: dict[str, Any],
        *,
        log_file: Path,
        limits: TimeLimits | None = None,
        environment: dict[str, str] | None = None,
        limit_host_memory: bool = False,
        slot: str | None = None,
        cpus: Sequence[int] | None = None,
    ) -> "Future[Reply]":
        """Runs `task` of `autotune/execution/server/tasks.py` in a new process.

        The process and all that it forks hold `slot`, a lock of `execution/device_slots.py`, and
        run on `cpus` only, numbers of the operating system, with a thread on each. The
        future's exception is the AutotuneError that the task raised, TrialLost where the machine
        ended it, or PreparationFailed.
        """
        future: Future[Reply] = Future()
        request_id = next(self._ids)
        request = {
            "id": request_id,
            "task": task,
            "payload": payload,
            "log_file": str(log_file.absolute()),
            "limits": None if limits is None else asdict(limits),
            "environment": environment,
            "limit_host_memory": limit_host_memory,
            "turn": slot,
            "cpus": None if cpus is None else list(cpus),
        }
        with self._lock:
            if self._is_lost:
                future.set_exception(self._loss())
                return future
            self._futures[request_id] = future
        self._send(request)
        return future

    def cancel(self, future: "Future[Reply]") -> None:
        """Ends the process of `future`; within seconds a training has the outcome `interrupted`."""
        with self._lock:
            ids = [request_id for request_id, known in self._futures.items() if known is future]
        for request_id in ids:
            self._send({"cancel": request_id})

    def doing(self, future: "Future[Reply]") -> Doing:
        """Returns what the process of `future` does."""
        with self._lock:
            for request_id, known in self._futures.items():
                if known is future:
                    return self._doing.get(request_id, Doing())
        return Doing()

    def close(self) -> None:
        """Ends the server and everything it runs."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        if not self._is_ready:
            # Still importing: it runs nothing and would notice the end of its input much later.
            self._process.kill()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=5)

    def __enter__(self) -> "TrialServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            with self._writing:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the reader sees the end of the server and fails every future

    def _read_replies(self) -> None:
        assert self._process.stdout is not None
        replies: IO[bytes] = self._process.stdout
        try:
            for line in replies:
                reply = _parse_reply(line)
                if reply is None:
                    continue
                if "failed" in reply:
                    self._why_lost = f": {reply['failed']}"
                    continue
                self._is_ready = True
                if "phase" in reply:
                    with self._lock:
                        self._doing[reply["id"]] = _doing_of(reply)
                elif "id" in reply:
                    with self._lock:
                        future = self._futures.pop(reply["id"])
                        self._doing.pop(reply["id"], None)
                    _resolve(future, reply)
            kill_all(
                lambda: started_under(self._mark),
                within_seconds=_LEFTOVER_SECONDS,
                between=self._process.poll,
            )
        finally:  # whatever goes wrong here, no caller waits for ever
            with self._lock:
                self._is_lost = True
                unresolved = list(self._futures.values())
                self._futures = {}
            for future in unresolved:
                future.set_exception(self._loss())

    def _loss(self) -> TrialServerLost:
        return TrialServerLost(
            f"the process that starts the trials has ended{self._why_lost}",
            hint=f"see {self._log_file}; run the same command again to continue",
        )


def _parse_reply(line: bytes) -> dict[str, Any] | None:
    """Returns the reply in a line; None for another line.

    That is a partial line of a killed server, or output of the interpreter before the server
    starts.
    """
    try:
        reply = json.loads(line)
    except ValueError:
        return None
    return reply if isinstance(reply, dict) else None


def _doing_of(reply: Mapping[str, Any]) -> Doing:
    if reply["steps"] is None:
        return Doing(phase=reply["phase"])
    ended, wanted = reply["steps"]
    return Doing(phase=reply["phase"], steps=(ended, wanted))


def _resolve(future: "Future[Reply]", reply: dict[str, Any]) -> None:
    if reply["error"] is None:
        future.set_result(Reply(result=reply["result"], seconds=reply["seconds"]))
        return
    kind: type[AutotuneError] = getattr(errors, reply["error"]["kind"])
    future.set_exception(kind(reply["error"]["message"], hint=reply["error"]["hint"]))


_MARK = "AUTOTUNE_TRIAL_SERVER"
"""Environment variable of a server that all its descendants inherit: it finds them after the
server has died."""
_LEFTOVER_SECONDS = 2.0

_ALLOCATOR_VARIABLES = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)


def _environment_of_trials(mark: str) -> dict[str, str]:
    """Returns the caller's environment without settings of the allocator, which trials choose."""
    environment = python_environment()
    for name in _ALLOCATOR_VARIABLES:
        environment.pop(name, None)
    environment[_MARK] = mark
    return environment


def python_environment() -> dict[str, str]:
    """Returns the caller's environment, in which another Python imports this same package.

    It also works for a checkout that is not installed.
    """
    return {**os.environ, "PYTHONPATH": _python_path()}


def _python_path() -> str:
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    root = Path(__file__).resolve().parents[2]
    if root.name != "site-packages":
        paths.append(str(root))
    return os.pathsep.join(paths)
