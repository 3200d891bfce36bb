"""Starts the other processes of a search with `--workers`; each joins the study as a search would.

They read their request from stdin, and stop as on SIGTERM when it closes, so that none outlives the
search that started them.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from autotune.errors import Stopped
from autotune.execution.server.client import python_environment
from autotune.execution.server_tasks import POLL_SECONDS
from autotune.spec.result import DeviceInfo
from autotune.study.events import Listener, WorkerEnded
from autotune.study.request import SearchRequest

_SECONDS_TO_END = 10.0


class Workers:
    """The worker processes of a search. Use it as a context manager around the search's own work.

    The block ends when all workers have ended. They are assigned to `devices` round-robin; the
    search itself, worker 1, is on the first. Logs go to `log_folder`.
    """

    def __init__(
        self,
        request: SearchRequest,
        *,
        name: str,
        devices: Sequence[DeviceInfo],
        log_folder: Path,
        listener: Listener,
        check_stop: Callable[[], None],
    ) -> None:
        # The study stores its search space: the file it was read from may be gone by now.
        self._request = replace(request, name=name, space=None, workers=1)
        self._devices = [
            devices[number % len(devices)].device for number in range(1, request.workers)
        ]
        self._log_folder = log_folder
        self._listener = listener
        self._check_stop = check_stop
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Workers":
        for number, device in enumerate(self._devices, start=2):
            self._processes[number] = self._start(number, device)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._wait()
        finally:
            self._stop()

    def _wait(self) -> None:
        """Waits until the workers have finished the trials that they are working on."""
        while any(process.poll() is None for process in self._processes.values()):
            self._check_stop()
            time.sleep(POLL_SECONDS)

    def _stop(self) -> None:
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        end = time.monotonic() + _SECONDS_TO_END
        for number, process in self._processes.items():
            try:
                exit_code = process.wait(timeout=max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                exit_code = process.wait()
            if exit_code not in (0, Stopped.exit_code):
                self._listener(
                    WorkerEnded(
                        number=number, exit_code=exit_code, log_file=str(self._log_file(number))
                    )
                )

    def _start(self, number: int, device: str) -> "subprocess.Popen[bytes]":
        self._log_folder.mkdir(parents=True, exist_ok=True)
        with self._log_file(number).open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "autotune.study.workers.worker"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches the search only, which stops the workers
                env=python_environment(),
            )
        assert process.stdin is not None
        request = replace(self._request, device=device).to_dict()
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        return process

    def _log_file(self, number: int) -> Path:
        return self._log_folder / f"worker-{number}.log"
