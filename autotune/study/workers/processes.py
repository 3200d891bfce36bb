"""The other processes of a search with `--workers`: each joins the study as a search of its own would.

They are told what to do on stdin, and stop as on SIGTERM when it closes: none outlives the search
that began them.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from autotune.errors import Stopped
from autotune.execution.server.client import python_environment
from autotune.execution.server_tasks import POLL_SECONDS
from autotune.spec.result import DeviceInfo
from autotune.study.events import Listener, WorkerEnded
from autotune.study.request import SearchRequest

_SECONDS_TO_END = 10.0

_NOT_FOR_WORKERS = (
    "space",
    "scale",
    "cap_bytes",
    "sampler",
    "seed",
    "workload",
    "fresh",
    "trials",
    "preferences",
)
"""What the study was begun with is in the database; how its result is seen is the search's own."""


class Workers:
    """Use as a context manager round the search's own work on the study; it ends when they all have ended.

    `devices`: what they run on, in turn; the search itself is on the first.
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
        self._request = replace(request, name=name, workers=1)
        self._devices = [
            devices[number % len(devices)].device for number in range(1, request.workers)
        ]
        self._log_folder = log_folder
        self._listener, self._check_stop = listener, check_stop
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
            while kind is None and any(
                process.poll() is None for process in self._processes.values()
            ):
                self._check_stop()  # they finish what they have begun
                time.sleep(POLL_SECONDS)
        finally:
            self._stop()

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
                # Ctrl-C at the terminal reaches the search, which ends them
                start_new_session=True,
                env=python_environment(),
            )
        assert process.stdin is not None
        process.stdin.write(
            json.dumps(_told(replace(self._request, device=device))).encode() + b"\n"
        )
        process.stdin.flush()
        return process

    def _log_file(self, number: int) -> Path:
        return self._log_folder / f"worker-{number}.log"


def _told(request: SearchRequest) -> dict[str, Any]:
    """The fields of the request that a worker needs."""
    return {
        f.name: getattr(request, f.name) for f in fields(request) if f.name not in _NOT_FOR_WORKERS
    }
