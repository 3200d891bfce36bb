"""What the server knows of a process it has forked: what it does, until when, what it has said and how it ended."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from autotune.errors import TrialLost
from autotune.execution.server.limits import REPORT_SECONDS, TimeLimits
from autotune.spec.result import Measurement, Outcome
from autotune.units import format_size

TRAININGS = ("train", "trace")
"""Tasks that get their time to end; the others have nothing to give back and are killed at once."""

GRACE_SECONDS = 2.0
"""From SIGTERM to SIGKILL."""
EXIT_SECONDS = 5.0
"""For a process to leave once its result is here."""
LINGER_SECONDS = 30.0
"""A process that SIGKILL has not ended by then waits in the kernel for what does not answer."""
ATTEMPTS_WHERE_DISTURBED = 3
"""How often a trial is begun in all where another process disturbed what it measures of the device.
"""
SECONDS_BETWEEN_ATTEMPTS = 1.0
"""A program that begins takes its memory within about as much."""

LARGEST_LINE_BYTES = 2**26
"""More is no result; whoever writes it without end must not fill the server's memory."""

LARGEST_LOG_BYTES = 2**30
"""A trial that writes for ever would fill the disk that the study's results are on."""

Ending = Literal["", "timeout", "cancelled", "crashed", "has its result"]
_OUTCOMES: Mapping[Ending, Outcome] = {
    "timeout": "timeout",
    "cancelled": "interrupted",
    "crashed": "crashed",
}


@dataclass(kw_only=True)
class ChildProcess:
    id: int
    task: str
    pid: int
    pipe: int
    log_file: Path
    limits: TimeLimits | None
    host_memory_kills: int
    request: dict[str, Any] = field(default_factory=dict)
    """What it was asked, to ask it again."""
    attempt: int = 1
    """Its number among the processes that were asked the same."""
    may_be_repeated: bool = True
    """False once it was to be ended from here."""
    started: float = field(default_factory=time.monotonic)
    phase: str = "start"
    ended_because: Ending = ""
    """Why it is being ended from here."""
    exit_status: int | None = None
    """Negative for a signal; None while it runs."""
    reply: dict[str, Any] | None = None
    """What it has returned."""
    message: str = ""
    """Why it was ended, in words."""
    kill_at: float | None = None
    give_up_at: float | None = None

    def __post_init__(self) -> None:
        self._phase_began = self.started
        self._outside_seconds = 0.0
        """Spent in what is no part of the training, and so not under its limits."""
        self._unfinished = bytearray()

    # -- what it says ------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Takes what came through the pipe.

        Anything may write there; only what can be read counts.
        """
        self._unfinished += data
        if b"\n" not in data:
            if len(self._unfinished) > LARGEST_LINE_BYTES:
                self._unfinished.clear()
            return
        *lines, rest = self._unfinished.split(b"\n")
        self._unfinished = bytearray(rest)
        for line in lines:
            self._take(bytes(line))

    def _take(self, line: bytes) -> None:
        try:
            said = json.loads(line)
        except ValueError:
            return
        if not isinstance(said, dict):
            return
        if said.get("phase") in ("step", "evaluation", "parity", "compile"):
            now = time.monotonic()
            if self.phase == "parity":
                self._outside_seconds += now - self._phase_began
            self.phase, self._phase_began = said["phase"], now
        elif {"result", "error"} <= said.keys() and not self.ended_because:
            # What comes later than that may be what the signal made of it.
            self.reply, self.ended_because = said, "has its result"
            self.kill_at = time.monotonic() + EXIT_SECONDS

    # -- until when --------------------------------------------------------------------------------

    def deadline(self) -> float | None:
        """When it is to be looked at again: `to_be_ended` and `kill_at` then say what is to be done."""
        if self.ended_because:
            return self.kill_at or self.give_up_at
        return min(self._deadlines()) if self.limits else None

    def to_be_ended(self, now: float) -> tuple[Ending, str]:
        """Which limit it has passed, and in words; empty where none."""
        if self.ended_because:
            return "", ""
        if self.limits is not None:
            for at, words in sorted(self._deadlines().items()):
                if now >= at:
                    return "timeout", f"{words}; see {self.log_file}"
        if self.log_file.exists() and self.log_file.stat().st_size > LARGEST_LOG_BYTES:
            return "crashed", f"wrote more than {format_size(LARGEST_LOG_BYTES)} to {self.log_file}"
        return "", ""

    def _deadlines(self) -> dict[float, str]:
        assert self.limits is not None
        limits = self.limits
        if self.phase == "parity":
            words = f"reading the gradients took more than {limits.trial_seconds:g} s"
            return {self._phase_began + limits.trial_seconds: words}
        whole = self.started + self._outside_seconds + limits.trial_seconds
        deadlines = {whole: f"no result within {limits.trial_seconds:g} s"}
        if self.phase == "compile":
            words = f"compilation took more than {limits.compile_seconds:g} s"
            deadlines[self._phase_began + limits.compile_seconds] = words
        elif self.phase != "start":
            unit = "step" if self.phase == "step" else "batch of evaluation"
            words = f"no {unit} ended within {limits.step_seconds:g} s"
            # The last step may have ended so much later than was said.
            deadlines[self._phase_began + limits.step_seconds + REPORT_SECONDS] = words
        return deadlines

    def hurry(self, *, grace_seconds: float, linger_seconds: float) -> None:
        """Leaves a process that is being ended no more than this."""
        now = time.monotonic()
        if self.kill_at is not None:
            self.kill_at = min(self.kill_at, now + grace_seconds)
        if self.give_up_at is not None:
            self.give_up_at = min(self.give_up_at, now + linger_seconds)

    # -- how it ended ------------------------------------------------------------------------------

    @property
    def was_disturbed(self) -> bool:
        """Whether it says that another process disturbed what it measured of the device."""
        error = None if self.reply is None else self.reply["error"]
        return isinstance(error, dict) and error.get("kind") == "DeviceDisturbed"

    def outcome(self) -> dict[str, Any]:
        """Its own reply, or what its end says where it left none."""
        from autotune.execution.server.failures import measurement_of_exit
        from autotune.execution.server.infrastructure import host_memory_kills

        if self.reply is not None:
            return self.reply
        if self.ended_because:
            ending = Measurement(outcome=_OUTCOMES[self.ended_because], message=self.message)
        else:
            assert self.exit_status is not None
            killed = host_memory_kills() > self.host_memory_kills
            try:
                ending = measurement_of_exit(
                    self.exit_status, log_file=self.log_file, host_killed_for_memory=killed
                )
            except TrialLost as lost:
                return failure_of(lost)
        if self.task == "train":
            return {"result": asdict(ending), "error": None}
        return _failure("PreparationFailed", ending.message, "")


def failure_of(error: TrialLost) -> dict[str, Any]:
    return _failure("TrialLost", error.message, error.hint)


def _failure(kind: str, message: str, hint: str) -> dict[str, Any]:
    return {"result": None, "error": {"kind": kind, "message": message, "hint": hint}}
