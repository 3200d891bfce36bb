"""Reports the phase of a trial to the server, which has a deadline for each phase.

A line in the result pipe names the phase that begins, {"phase": "compile"}, and how many steps have
ended of how many: {"phase": "step", "steps": [12, 40]}. Lines are written at most ten times a
second: each one wakes the server, which on a machine with few cores would slow down the measured
training. To write one takes 2 microseconds, half of it for the step.

A training on several devices that is ended adds what each of them was doing: {"remark": "..."}.
"""

import json
import os
import time
from typing import Any

import torch._dynamo.callback

from autotune.execution.server.limits import REPORT_SECONDS
from autotune.spec.training_request import Stage

_LINES = {
    phase: b'{"phase": "%s"}\n' % phase.encode()
    for phase in ("step", "evaluation", "parity", "compile", "waiting")
}


class PipeProgress:
    """Called by a training at every step; it detects compilation itself, through torch._dynamo."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._phase = "start"
        self._reported_at = 0.0
        self._steps = (0, 0)

    def __call__(self, stage: Stage, steps_ended: int = 0, steps_wanted: int = 0, /) -> None:
        if steps_wanted:
            self._steps = (steps_ended, steps_wanted)
        now = time.monotonic()
        if stage != self._phase or now - self._reported_at >= REPORT_SECONDS:
            self._report(stage, now)

    def remark(self, text: str) -> None:
        """Report what is to be added to the message of a trial that the server ends."""
        line = json.dumps({"remark": text}).encode() + b"\n"
        try:
            os.write(self._pipe, line)
        except OSError:
            pass  # the server is dead, and the kernel is ending this process

    def _report(self, phase: str, now: float) -> None:
        self._phase, self._reported_at = phase, now
        self._watch_compilation()
        line = _LINES[phase]
        if phase == "step" and self._steps[1]:
            line = b'{"phase": "step", "steps": [%d, %d]}\n' % self._steps
        try:
            os.write(self._pipe, line)
        except OSError:
            pass  # the server is dead, and the kernel is ending this process

    def _watch_compilation(self) -> None:
        """Registers the callback, also again, because torch._dynamo.reset() removes it."""
        callbacks = torch._dynamo.callback.callback_handler
        if self._compilation_begins not in callbacks.start_callbacks:
            callbacks.register_start_callback(self._compilation_begins)

    def _compilation_begins(self, _: Any) -> None:
        """Reports compilation once a step, for any number of graphs; the start includes its own."""
        if self._phase in ("step", "evaluation"):
            self._report("compile", time.monotonic())
