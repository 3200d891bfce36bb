"""One trial server for many executors: each that is started takes seconds to import torch."""

import contextlib
import os
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from unittest import mock

from autotune.execution import local
from autotune.execution.server.client import SERVER_COMMAND, Doing, TrialServer

STAND_IN = Path(__file__).parents[1] / "quick_study" / "stand_in.py"
_RUN_STAND_IN = f"""
import runpy
import autotune.execution.process.failures
import autotune.execution.process.progress
runpy.run_path({str(STAND_IN)!r}, run_name="__main__")
"""
STAND_IN_COMMAND = (sys.executable, "-c", _RUN_STAND_IN)
"""The stand-in for trainings, with the modules that each of its processes would import itself."""


class TrialServers:
    """Running servers, at most one of each command, which executors borrow one after another.

    A server's trials have the environment of the executor that borrowed it, but run in `folder`.
    """

    def __init__(self, folder) -> None:
        self._folder = folder
        self._running: dict[tuple[str, ...], TrialServer] = {}
        self._environments: dict[tuple[str, ...], dict[str, str]] = {}
        self._lending = threading.Lock()

    @contextlib.contextmanager
    def lent_to_executors(self):
        """Lend the servers to all executors that are made in the block."""
        with mock.patch.object(local, "TrialServer", self.lend):
            yield

    def lend(self, *, log_file, command=SERVER_COMMAND, environment=None) -> "BorrowedServer":
        """Returns the running server of a command, which is started where there is none."""
        log_file.parent.mkdir(parents=True, exist_ok=True)
        command = tuple(command)
        with self._lending:  # the places of a search each ask in their own thread
            server = self._running.get(command)
            if server is None or server.is_lost:
                log = self._folder / f"server-{len(self._running)}.log"
                with contextlib.chdir(self._folder):
                    server = self._running[command] = TrialServer(log_file=log, command=command)
                self._environments[command] = {**os.environ}
        before = self._environments[command]
        changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
        return BorrowedServer(server, {**changed, **(environment or {})})

    def close(self) -> None:
        for server in self._running.values():
            server.close()


class BorrowedServer:
    """What an executor sees of a server that others use too: closing it ends its own requests."""

    def __init__(self, server: TrialServer, environment: dict[str, str]) -> None:
        self._server = server
        self._environment = environment
        self._futures: list[Future] = []

    @property
    def pid(self) -> int:
        return self._server.pid

    @property
    def is_lost(self) -> bool:
        return self._server.is_lost

    def submit(self, task, *, environment=None, modules=(), **options) -> Future:
        """Send the request, without the modules: trainings of other tests may need a GPU."""
        environment = {**self._environment, **(environment or {})}
        future = self._server.submit(task, environment=environment, **options)
        self._futures.append(future)
        return future

    def doing(self, future: Future) -> Doing:
        return self._server.doing(future)

    def cancel(self, future: Future) -> None:
        self._server.cancel(future)

    def close(self) -> None:
        for future in self._futures:
            if not future.done():
                self._server.cancel(future)
