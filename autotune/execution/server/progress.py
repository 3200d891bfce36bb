"""How a trial's process tells the server what it is doing, so that a deadline can be kept for it.

A line in the result pipe says what begins now: {"phase": "step"}. It is written at most ten times a
second, from bytes that are there already: a line wakes the server, and on a machine with few cores
that would be measured.
"""

import os
import time
from typing import Any

import torch._dynamo.callback

from autotune.execution.server.limits import REPORT_SECONDS
from autotune.spec.training_request import Stage

_LINES = {
    phase: b'{"phase": "%s"}\n' % phase.encode()
    for phase in ("step", "evaluation", "parity", "compile")
}


class PipeProgress:
    """What a training calls whenever it goes on; notices by itself that code is compiled, whoever compiles it."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._phase = "start"
        self._reported_at = 0.0

    def __call__(self, stage: Stage) -> None:
        now = time.monotonic()
        if stage != self._phase or now - self._reported_at >= REPORT_SECONDS:
            self._report(stage, now)

    def _report(self, phase: str, now: float) -> None:
        self._phase, self._reported_at = phase, now
        self._watch_compilation()
        try:
            os.write(self._pipe, _LINES[phase])
        except OSError:
            pass  # the server is gone, and this process soon will be

    def _watch_compilation(self) -> None:
        """Again if need be: torch._dynamo.reset() forgets who watches."""
        callbacks = torch._dynamo.callback.callback_handler
        if self._compilation_begins not in callbacks.start_callbacks:
            callbacks.register_start_callback(self._compilation_begins)

    def _compilation_begins(self, _: Any) -> None:
        """Once in a step, however many graphs it compiles; what compiles while the trial starts is part of that."""
        if self._phase in ("step", "evaluation"):
            self._report("compile", time.monotonic())
