"""The state of a forked process, as the server sees it: phase, deadlines, reply and exit."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autotune.errors import TrialLost
from autotune.execution.server.infrastructure import host_memory_kills
from autotune.execution.server.limits import REPORT_SECONDS, TimeLimits
from autotune.execution.server.process_exit import measurement_of_exit
from autotune.execution.server.replies import (
    LastSign,
    LineBuffer,
    MalformedReply,
    PhaseReport,
    TaskReply,
    failure,
    of_malformed,
    parse_line,
)
from autotune.execution.server.trial_log import MOST_WRITTEN_BYTES, TrialLog
from autotune.spec.result import Measurement, Outcome
from autotune.spec.training_request import TIMED_STAGES
from autotune.units import format_size

GRACE_SECONDS = 2.0
"""From SIGTERM to SIGKILL."""
EXIT_SECONDS = 5.0
"""How long a process may take to exit after its result has arrived."""
LINGER_SECONDS = 30.0
"""How long to wait after SIGKILL; a process that still exists hangs in the kernel."""
MAX_DISTURBED_ATTEMPTS = 3
"""How often a trial is started in all where another process disturbed its device measurements."""
SECONDS_BETWEEN_ATTEMPTS = 1.0
"""Within about this time, a program that starts has allocated its memory."""

STEP_SECONDS = 0.5
"""How often the search is told which step a training is at."""

Ending = Literal["", "timeout", "cancelled", "crashed", "has its result"]
_OUTCOMES: Mapping[Ending, Outcome] = {
    "timeout": "timeout",
    "cancelled": "interrupted",
    "crashed": "crashed",
}


@dataclass(kw_only=True)
class ChildProcess:
    """A forked process and what is known about it. Times are of the monotonic clock."""

    id: int
    pid: int
    pipe: int
    log_file: Path
    limits: TimeLimits | None
    host_memory_kills: int
    request: dict[str, Any] = field(default_factory=dict)
    """The request, which may be repeated."""
    attempt: int = 1
    """1 for the first process of this request."""
    may_be_repeated: bool = True
    """False once the server was to end it."""
    started: float = field(default_factory=time.monotonic)
    phase: str = "start"
    steps: tuple[int, int] | None = None
    """How many steps have ended, of how many; None where that is not known."""
    ended_because: Ending = ""
    """Why the server is ending it; empty while it may run."""
    exit_status: int | None = None
    """Negative for a signal; None while it runs."""
    reply: TaskReply | None = None
    """Its result or error, once it has arrived."""
    malformed: MalformedReply | None = None
    """What is wrong with a line that it has written: nothing that it writes is believed then."""
    message: str = ""
    """Why it was ended, for the user."""
    remark: str = ""
    """What it was doing when it was ended, where it has said so."""
    kill_at: float | None = None
    """When to send SIGKILL."""
    give_up_at: float | None = None
    """When to stop waiting for the end after SIGKILL."""
    rests_since: float | None = None
    """Since when it stands still; None: it runs."""

    def __post_init__(self) -> None:
        self._phase_began = self.started
        self._outside_seconds = 0.0
        """Time spent on work that the limits of the training do not include."""
        self._parity_seconds = 0.0
        """The part of it that has its own limit."""
        self._told = self.phase, self.steps
        self._told_at = self.started
        self._lines = LineBuffer()
        self.log = TrialLog(self.log_file)

    # -- output ------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Handles data from the pipe, up to the first line that is malformed."""
        if self.malformed is not None:
            return
        try:
            for line in self._lines.lines(data):
                self._take(parse_line(line))
        except MalformedReply as error:
            self.malformed = error

    def _take(self, message: PhaseReport | LastSign | TaskReply) -> None:
        if isinstance(message, LastSign):
            self.remark = message.text
        elif isinstance(message, PhaseReport):
            now = time.monotonic()
            if self.phase in ("parity", "waiting"):
                self._outside_seconds += now - self._phase_began
            if self.phase == "parity":
                self._parity_seconds += now - self._phase_began
            self.phase = message.phase
            self.steps = message.steps
            self._phase_began = now
        elif not self.ended_because:
            # A result that arrives while the process is being ended may come from the signal.
            self.reply = message
            self.ended_because = "has its result"
            self.kill_at = time.monotonic() + EXIT_SECONDS

    def news(self, now: float) -> dict[str, Any] | None:
        """Returns what the search is to be told: another phase at once, another step now and then.

        None where there is nothing new, or it has its result.
        """
        if self.reply is not None or (self.phase, self.steps) == self._told:
            return None
        if self.phase == self._told[0] and now - self._told_at < STEP_SECONDS:
            return None
        self._told = self.phase, self.steps
        self._told_at = now
        return {"id": self.id, "phase": self.phase, "steps": self.steps}

    # -- rest --------------------------------------------------------------------------------------

    @property
    def is_timed(self) -> bool:
        """Whether it is a training whose speed other processes could change now."""
        is_training = bool(self.request.get("is_training"))
        return is_training and self.phase in TIMED_STAGES and not self.ended_because

    def is_to_change(self, *, rests: bool) -> bool:
        """Whether it is to be stopped, or to go on, where a training is timed or no longer is."""
        may_rest = self.request.get("rests") and not self.ended_because
        return bool(may_rest) and (self.rests_since is not None) != rests

    def rest(self, now: float) -> None:
        """Takes note that it was stopped; no limit of time applies until it goes on."""
        self.rests_since = now

    def go_on(self, now: float) -> None:
        """Takes note that it runs again, with as much time left as it had."""
        assert self.rests_since is not None
        rested_seconds = now - self.rests_since
        self.rests_since = None
        self._outside_seconds += rested_seconds
        self._phase_began += rested_seconds

    # -- deadlines ---------------------------------------------------------------------------------

    def deadline(self) -> float | None:
        """Returns when to check `exceeded_limit`, `kill_at` and `give_up_at` next."""
        if self.ended_because:
            return self.kill_at or self.give_up_at
        if self.limits is None:
            return None
        return min(self._deadlines(), default=None)

    def exceeded_limit(self, now: float) -> tuple[Ending, str]:
        """Returns why the process must be ended at `now`, and a message; empty if it may go on."""
        if self.ended_because:
            return "", ""
        if self.malformed is not None:
            return "crashed", ""  # `outcome` says why
        if self.limits is not None:
            for deadline, message in sorted(self._deadlines().items()):
                if now >= deadline:
                    return "timeout", f"{message}; see {self.log_file}"
        if self.log.shorten() > MOST_WRITTEN_BYTES:
            return (
                "crashed",
                f"wrote more than {format_size(MOST_WRITTEN_BYTES)} to {self.log_file}",
            )
        return "", ""

    def _deadlines(self) -> dict[float, str]:
        """Returns {deadline: what to say when it has passed} for the current phase."""
        assert self.limits is not None
        limits = self.limits
        if self.phase == "waiting" or self.rests_since is not None:
            return {}  # for its turn, or until no training is timed, however long that takes
        if self.phase == "parity":
            message = f"reading the gradients took more than {limits.trial_seconds:g} s"
            return {self._phase_began - self._parity_seconds + limits.trial_seconds: message}
        whole = self.started + self._outside_seconds + limits.trial_seconds
        deadlines = {whole: f"no result within {limits.trial_seconds:g} s"}
        if self.phase == "compile":
            message = f"compilation took more than {limits.compile_seconds:g} s"
            deadlines[self._phase_began + limits.compile_seconds] = message
        elif self.phase != "start":
            unit = "step" if self.phase == "step" else "batch of evaluation"
            message = f"no {unit} ended within {limits.step_seconds:g} s"
            # A step that ends within REPORT_SECONDS of the last report is not reported.
            deadlines[self._phase_began + limits.step_seconds + REPORT_SECONDS] = message
        return deadlines

    def shorten_deadlines(self, *, grace_seconds: float, linger_seconds: float) -> None:
        """Leaves a process that is being ended at most these times."""
        now = time.monotonic()
        if self.kill_at is not None:
            self.kill_at = min(self.kill_at, now + grace_seconds)
        if self.give_up_at is not None:
            self.give_up_at = min(self.give_up_at, now + linger_seconds)

    # -- end ---------------------------------------------------------------------------------------

    @property
    def was_disturbed(self) -> bool:
        """Whether it reports that another process disturbed its device measurements."""
        error = None if self.reply is None else self.reply.error
        return error is not None and error.kind == "DeviceDisturbed"

    def outcome(self) -> TaskReply:
        """Returns the process's reply; where it has sent none, one that is derived from its end."""
        if self.reply is not None:
            return self.reply
        if self.malformed is not None and self.ended_because in ("", "crashed"):
            return TaskReply(ended=of_malformed(self.malformed, log_file=self.log_file))
        if self.ended_because:
            message = self.message
            if self.ended_because == "timeout" and self.remark:
                message += f": {self.remark}"
            ending = Measurement(outcome=_OUTCOMES[self.ended_because], message=message)
        else:
            assert self.exit_status is not None
            killed = host_memory_kills() > self.host_memory_kills
            try:
                ending = measurement_of_exit(
                    self.exit_status, log_file=self.log_file, host_killed_for_memory=killed
                )
            except TrialLost as lost:
                return failure(lost)
        return TaskReply(ended=ending)
