"""State of a running search for the displays: trials so far, time left and the best so far."""

import math
import time
from dataclasses import dataclass

from autotune.analysis.front import pareto_front
from autotune.analysis.pick import Preferences, choose
from autotune.execution.device_slots import waiting_message
from autotune.reporting.outcomes import outcome_counts
from autotune.reporting.trial_text import format_speed
from autotune.spec.result import StudyResult, TrialRecord
from autotune.spec.study import MOST_TRIALS_IN_TIME
from autotune.study.confirmation.request import seconds_of_search
from autotune.study.eta import eta_seconds
from autotune.study.events import (
    AttemptLost,
    Comparing,
    ConfirmationTime,
    Confirming,
    Event,
    PlaceIsFree,
    PlaceJoined,
    PlaceLeft,
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
from autotune.units import format_decimal, format_duration, format_size


@dataclass(kw_only=True)
class AtPlace:
    """What is going on at one place."""

    since: float
    """When `meanwhile` began."""
    name: str = ""
    meanwhile: str = ""
    """What it does in or between trials."""
    steps: tuple[int, int] | None = None
    """Of the training that `meanwhile` says: how many have ended, of how many."""
    used_bytes: int | None = None
    """Memory in use on a GPU of another machine, as it last said."""
    trial: TrialBegan | None = None
    measuring: str = ""
    """What is measured again: the baseline between two trials, or a finalist after them."""
    task_since: float = 0.0
    """When `trial` or `measuring` began."""

    def do(self, meanwhile: str, *, steps: tuple[int, int] | None = None) -> None:
        if meanwhile != self.meanwhile:
            self.since = time.monotonic()
        self.meanwhile = meanwhile
        self.steps = steps

    def begin(self, trial: TrialBegan) -> None:
        self.trial = trial
        self.measuring = ""
        self.task_since = time.monotonic()

    def measure(self, what: str) -> None:
        if what != self.measuring:
            self.task_since = time.monotonic()
        self.measuring = what
        self.do("")

    def end(self) -> None:
        self.used_bytes = None
        self.trial = None
        self.measuring = ""
        self.do("")

    @property
    def label(self) -> str:
        """What it runs: the trial's name or configuration, or what is measured again."""
        if self.trial is not None:
            return self.trial.name or self.trial.config.describe()
        return self.measuring

    @property
    def doing(self) -> str:
        """What it does, with the step of a training: `training, step 12 of 40`."""
        if self.steps is None:
            return self.meanwhile
        ended, wanted = self.steps
        return f"{self.meanwhile}, step {ended} of {wanted}"

    @property
    def seconds(self) -> float:
        """How long it has been at its trial, at measuring again, or at what `meanwhile` says."""
        since = self.since
        if self.trial is not None or self.measuring:
            since = self.task_since
        return time.monotonic() - since

    def lines(self) -> list[str]:
        """Returns the trial and what it does, each with how long it has been so."""
        now = time.monotonic()
        lines = []
        if self.trial is not None:
            name = f"{self.trial.name}: " if self.trial.name else ""
            trial = f"#{self.trial.number} {name}{self.trial.config.describe()}"
            lines.append(f"{trial}, {format_duration(now - self.task_since)}")
        elif self.measuring:
            lines.append(f"{self.measuring}, {format_duration(now - self.task_since)}")
        if self.meanwhile:
            lines.append(f"{self.doing}, {format_duration(now - self.since)}")
        return lines


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
        self.preparing = ""
        self._began = time.monotonic()
        self._preparing_since = self._began
        self._places: list[str] = []
        """The names of the places, where there are several."""
        self._at: dict[str, AtPlace] = {"": AtPlace(since=self._began)}
        """What is going on at each place by its name; what is at none, or at the only one, at "".
        """

    @property
    def meanwhile(self) -> str:
        """What the search does in or between trials, such as predicting, compiling or waiting."""
        return self._at[""].meanwhile

    @property
    def seconds(self) -> float:
        """How long the search has been running."""
        return time.monotonic() - self._began

    def doing(self) -> list[str]:
        """Returns in lines what the search does now, each with how long it has been doing it.

        What happens at each of several places is left to `places`.
        """
        if self.opened is None:
            seconds = time.monotonic() - self._preparing_since
            return [f"{self.preparing or 'starting'}, {format_duration(seconds)}"]
        return self._at[""].lines()

    def places(self) -> "list[AtPlace]":
        """Returns what goes on at each of several places; nothing for a search with only one."""
        if self.opened is None:
            return []
        now = time.monotonic()
        return [self._at.get(name) or AtPlace(name=name, since=now) for name in self._places]

    @property
    def only_place(self) -> AtPlace:
        """What goes on in a search with only one place."""
        return self._at[""]

    def _end_trial(self, number: int) -> None:
        """Nothing goes on any more at the place where the trial of that number runs."""
        for place in self._at.values():
            if place.trial is not None and place.trial.number == number:
                place.end()

    def _at_place(self, device: str) -> AtPlace:
        return self._at.setdefault(device, AtPlace(name=device, since=time.monotonic()))

    def _do(self, meanwhile: str, device: str = "") -> None:
        self._at_place(device).do(meanwhile)

    def note(self, event: Event) -> None:
        """Update the state with an event."""
        now = time.monotonic()
        match event:
            case Preparing(what=what):
                if what != self.preparing:
                    self._preparing_since = now
                self.preparing = what
            case StudyOpened():
                self._at[""].since = now
                self.opened = event
                self._places = list(event.places)
                self.records = [record for record in event.records if record.is_finished]
                self._ended_at = [time.monotonic()]
            case Predicting(config=config, device=device):
                self._at_place(device).measuring = ""
                self._do(f"predicting {config.describe()}", device)
            case Comparing(config=config, device=device):
                self._do(f"comparing the first steps of {config.describe()}", device)
            case TrialPhase(doing=doing, steps=steps, used_bytes=used_bytes, device=device):
                place = self._at_place(device)
                place.do(doing, steps=steps)
                place.used_bytes = used_bytes or place.used_bytes
            case PlaceIsFree(device=device):
                self._at_place(device).end()
            case PlaceJoined(device=device):
                self._places.append(device)
            case PlaceLeft(device=device):
                self._at_place(device).end()
                self._places.remove(device)
            case Confirming(doing=doing, device=device):
                if not device:  # the trials are done
                    for place in self._at.values():
                        place.end()
                self._at_place(device).measure(f"measuring {doing}")
            case ConfirmationTime(seconds=seconds):
                self._confirmation_ends_at = now + seconds
            case SameProgram():
                self._do("")
            case WaitingForDevice(place=place_name):
                self._do(waiting_text(event), place_name)
            case WaitingForOthers():
                self._do(waiting_text(event))
            case WaitingForStorage(message=message):
                self._do(f"waiting: {message}")
            case StorageBack():
                self._do("")
            case TrialBegan(device=device):
                self._do("", device)
                self._do("")
                self._at[device].begin(event)
            case AttemptLost(number=number):
                self._end_trial(number)
            case TrialEnded(record=record):
                self._end_trial(record.number)
                self._do("")
                self.records.append(record)
                self._ended_at.append(now)

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
        stored = sum(record.is_finished for record in self.opened.records)
        since_then = sum(record.seconds or 0.0 for record in self.records[stored:])
        at_once = max(1, len(self._places))
        of_trials = left + self.opened.seconds_of_trials + since_then / at_once
        return seconds_of_search(of_trials, share=self.opened.confirm_share) - of_trials

    @property
    def is_confirming(self) -> bool:
        """Whether the trials are done, and finalists are measured again."""
        return self._confirmation_ends_at is not None

    def time_left(self) -> str:
        """Returns in words how long the search still takes; empty where that is not known.

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

    def result(self) -> StudyResult:
        """Returns the study so far, without a baseline. Needs the study to be open."""
        assert self.opened is not None
        definition = self.opened.definition
        front = pareto_front(self.records, tolerance=self._preferences.tolerance)
        pick = choose(self.records, front, baseline=None, preferences=self._preferences)
        return StudyResult(
            study=definition.name,
            storage="",
            workload=definition.workload,
            device=definition.device,
            cap_bytes=definition.cap_bytes,
            trials=tuple(self.records),
            front=front,
            pick=pick,
            baseline=None,
        )

    def best(self) -> str:
        """Returns the pick so far in one line."""
        result = self.result()
        if result.pick is None:
            return "nothing feasible yet"
        record = result.trial(result.pick.number)
        size = format_size(record.peak_memory_bytes or 0)
        speed = format_speed(record.tokens_per_second, record.tokens_per_second_spread)
        return (
            f"best so far #{record.number}: {size}, {speed} tokens/s, "
            f"perplexity {format_decimal(record.perplexity or 0.0)}"
        )

    def counts(self) -> str:
        """Returns how many trials there are, of how many, and with which outcomes."""
        counts = outcome_counts(self.records)
        if self.wanted >= MOST_TRIALS_IN_TIME:
            return counts
        return f"{len(self.records)}/{self.wanted}  {counts}"

    def status(self) -> str:
        """Returns the counts and the time left."""
        left = self.time_left()
        return f"{self.counts()}  {left}" if left else self.counts()


def waiting_text(event: WaitingForDevice | WaitingForOthers) -> str:
    """Returns the sentence, without its full stop, that says what is waited for."""
    if isinstance(event, WaitingForDevice):
        return waiting_message(event.device, event.holder)
    trials = "trials" if len(event.numbers) > 1 else "trial"
    numbers = ", ".join(f"#{number}" for number in event.numbers)
    return f"waiting for {trials} {numbers} of other searches"
