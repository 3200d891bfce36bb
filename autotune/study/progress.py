"""State of a running search for the displays: trials so far, time left and the best so far."""

import math
import time
from collections.abc import Sequence

from autotune.analysis.front import pareto_front
from autotune.analysis.pick import Preferences, choose
from autotune.execution.device_slots import waiting_message
from autotune.reporting.outcomes import outcome_counts
from autotune.reporting.trial_text import format_speed
from autotune.spec.result import TrialRecord
from autotune.study.confirmation.request import seconds_of_search
from autotune.study.eta import eta_seconds
from autotune.study.events import (
    AttemptLost,
    Comparing,
    ConfirmationTime,
    Confirming,
    Event,
    Predicting,
    Preparing,
    SameProgram,
    StorageBack,
    StudyOpened,
    TrialBegan,
    TrialEnded,
    TrialPhase,
    WaitingForDevice,
    WaitingForOthers,
    WaitingForStorage,
)
from autotune.units import format_duration, format_size


class Progress:
    """Collects the events of a running search and estimates the time left."""

    def __init__(
        self,
        *,
        preferences: Preferences,
        until_converged: bool = False,
    ) -> None:
        self._preferences = preferences
        self._until_converged = until_converged
        self._confirmation_ends_at: float | None = None
        """When the confirmation ends, by the clock; None before it has begun."""
        self._ended_at = [time.monotonic()]
        self.opened: StudyOpened | None = None
        self.records: list[TrialRecord] = []
        self.running: TrialBegan | None = None
        self.preparing = ""
        self.meanwhile = ""
        """What the search does in or between trials, such as predicting, compiling or waiting."""
        self.measuring = ""
        """What is measured again: the baseline between two trials, or a finalist after them."""
        self._began = self._phase_began = self._task_began = time.monotonic()

    def note(self, event: Event) -> None:
        """Update the state with an event."""
        phase, task = self._phase(), self._task()
        self._take(event)
        now = time.monotonic()
        if self._phase() != phase:
            self._phase_began = now
        if self._task() != task:
            self._task_began = now

    def _phase(self) -> tuple[bool, str, str]:
        return self.opened is None, self.preparing, self.meanwhile

    def _task(self) -> tuple[int | None, str]:
        return None if self.running is None else self.running.number, self.measuring

    @property
    def seconds(self) -> float:
        """How long the search has been running."""
        return time.monotonic() - self._began

    @property
    def phase_seconds(self) -> float:
        """How long the search does what `preparing`, or once it is open `meanwhile`, says."""
        return time.monotonic() - self._phase_began

    @property
    def task_seconds(self) -> float:
        """How long the trial in `running`, or what `measuring` says, has been running."""
        return time.monotonic() - self._task_began

    def doing(self) -> list[str]:
        """Return in lines what the search does now, each with how long it has been doing it."""
        if self.opened is None:
            return [f"{self.preparing or 'starting'}, {format_duration(self.phase_seconds)}"]
        doing = []
        if self.running is not None:
            name = f"{self.running.name}: " if self.running.name else ""
            trial = f"#{self.running.number} {name}{self.running.config.describe()}"
            doing.append(f"{trial}, {format_duration(self.task_seconds)}")
        elif self.measuring:
            doing.append(f"{self.measuring}, {format_duration(self.task_seconds)}")
        if self.meanwhile:
            doing.append(f"{self.meanwhile}, {format_duration(self.phase_seconds)}")
        return doing

    def _take(self, event: Event) -> None:
        match event:
            case Preparing(what=what):
                self.preparing = what
            case StudyOpened():
                self.opened = event
                self.records = [record for record in event.records if record.is_finished]
                self._ended_at = [time.monotonic()]
            case Predicting(config=config):
                self.measuring = ""
                self.meanwhile = f"predicting {config.describe()}"
            case Comparing(config=config):
                self.meanwhile = f"comparing the first steps of {config.describe()}"
            case TrialPhase(doing=doing):
                self.meanwhile = doing
            case Confirming(doing=doing):
                self.measuring = f"measuring {doing}"
                self.meanwhile = ""
            case ConfirmationTime(seconds=seconds):
                self._confirmation_ends_at = time.monotonic() + seconds
            case SameProgram():
                self.meanwhile = ""
            case WaitingForDevice(device=device, holder=holder):
                self.meanwhile = waiting_message(device, holder)
            case WaitingForOthers(numbers=numbers):
                self.meanwhile = f"waiting for {_trials(numbers)} of other workers"
            case WaitingForStorage(message=message):
                self.meanwhile = f"waiting: {message}"
            case StorageBack():
                self.meanwhile = ""
            case TrialBegan():
                self.running = event
                self.measuring = ""
                self.meanwhile = ""
            case AttemptLost(number=number) if (
                self.running is not None and self.running.number == number
            ):
                self.running = None
                self.meanwhile = ""
            case TrialEnded(record=record):
                if self.running is not None and self.running.number == record.number:
                    self.running = None
                self.meanwhile = ""
                self.records.append(record)
                self._ended_at.append(time.monotonic())

    @property
    def wanted(self) -> int:
        return self.opened.trials_wanted if self.opened else 0

    def eta_seconds(self) -> float | None:
        """Estimate the seconds left for the trials, at most while new ones may begin.

        Returns None before the first trial has ended.
        """
        now = time.monotonic()
        left = eta_seconds(self._ended_at, now=now, trials_left=self.wanted - len(self.records))
        limit = self.opened.seconds_for_trials if self.opened else None
        if left is None or limit is None:
            return left
        return min(left, max(0.0, limit - (now - self._ended_at[0])))

    def seconds_of_confirmation(self) -> float | None:
        """Estimate for how long the finalists may be measured again once the trials have ended.

        Returns None before the first trial has ended, and where nothing is measured again.
        """
        left = self.eta_seconds()
        if left is None or self.opened is None or self.opened.confirm_share is None:
            return None
        of_trials = left + sum(record.seconds or 0.0 for record in self.records)
        return seconds_of_search(of_trials, share=self.opened.confirm_share) - of_trials

    @property
    def is_confirming(self) -> bool:
        """Whether the trials are done, and finalists are measured again."""
        return self._confirmation_ends_at is not None

    def time_left(self) -> str:
        """Return in words how long the search still takes; empty where that is not known.

        `about 40 s left, then up to 25 s of confirmation`, and later `at most 20 s left`.
        """
        if self._confirmation_ends_at is not None:
            of_confirmation = self._confirmation_ends_at - time.monotonic()
            is_limited = 0 < of_confirmation < math.inf
            return f"at most {format_duration(of_confirmation)} left" if is_limited else ""
        parts = []
        left = self.eta_seconds()
        if left is not None and round(left) > 0:
            about = "at most" if self._until_converged else "about"
            parts.append(f"{about} {format_duration(left)} left")
        if confirmation := self.seconds_of_confirmation():
            parts.append(f"then up to {format_duration(confirmation)} of confirmation")
        return ", ".join(parts)

    def best(self) -> str:
        """Return the pick so far in one line."""
        front = pareto_front(self.records, tolerance=self._preferences.tolerance)
        pick = choose(self.records, front, baseline=None, preferences=self._preferences)
        if pick is None:
            return "nothing feasible yet"
        record = next(record for record in self.records if record.number == pick.number)
        size = format_size(record.peak_memory_bytes or 0)
        speed = format_speed(record.tokens_per_second, record.tokens_per_second_spread)
        return (
            f"best so far #{record.number}: {size}, {speed} tokens/s, "
            f"perplexity {record.perplexity:.2f}"
        )

    def counts(self) -> str:
        """Return how many trials there are, of how many, and with which outcomes."""
        return f"{len(self.records)}/{self.wanted}  {outcome_counts(self.records)}"

    def status(self) -> str:
        """Return the counts and the time left."""
        left = self.time_left()
        return f"{self.counts()}  {left}" if left else self.counts()


def _trials(numbers: Sequence[int]) -> str:
    """`trial #3`, `trials #3, #5`."""
    return f"trial{'s' * (len(numbers) > 1)} {', '.join(f'#{number}' for number in numbers)}"
