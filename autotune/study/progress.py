"""State of a running search for the displays: trials so far, time left and the best so far."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from autotune.analysis.front import pareto_front
from autotune.analysis.pick import Preferences, choose
from autotune.reporting.outcomes import outcome_counts
from autotune.reporting.trial_text import format_speed
from autotune.spec.result import Pick, TrialRecord, terms_of
from autotune.spec.study import MOST_TRIALS_IN_TIME
from autotune.spec.terms import TOKENS, Terms
from autotune.study.confirmation.request import seconds_of_search
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
from autotune.study.running.eta import eta_seconds
from autotune.units import format_duration, format_size


@dataclass(frozen=True, kw_only=True)
class StudySoFar:
    """What a table of trials has to know of a study that runs."""

    is_cuda: bool
    front: tuple[int, ...]
    pick: Pick | None
    baseline: int | None = None
    initial_perplexity: float | None = None
    initial_perplexity_remark: str = ""
    terms: Terms = TOKENS


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
    task: TrialBegan | Confirming | None = None
    """A trial, or what is measured again: the baseline between two, or a finalist after them."""
    task_since: float = 0.0
    """When `task` began."""

    def do(self, meanwhile: str, *, steps: tuple[int, int] | None = None) -> None:
        if meanwhile != self.meanwhile:
            self.since = time.monotonic()
        self.meanwhile = meanwhile
        self.steps = steps

    def take(self, task: TrialBegan | Confirming | None) -> None:
        if task != self.task:
            self.task_since = time.monotonic()
        self.task = task
        self.do("")

    def end(self) -> None:
        self.used_bytes = None
        self.take(None)

    @property
    def trial(self) -> TrialBegan | None:
        return self.task if isinstance(self.task, TrialBegan) else None

    @property
    def label(self) -> str:
        """What it runs: the trial's name or configuration, or what is measured again."""
        return "" if self.task is None else self.task.label

    @property
    def doing(self) -> str:
        """What it does, with the step of a training: `training, step 12 of 40`."""
        if self.steps is None:
            return self.meanwhile
        ended, wanted = self.steps
        return f"{self.meanwhile}, step {ended} of {wanted}"

    @property
    def seconds(self) -> float:
        """How long it has been at its task or, without one, at what `meanwhile` says."""
        return time.monotonic() - (self.since if self.task is None else self.task_since)

    def lines(self) -> list[str]:
        """Returns its task and what it does, each with how long it has been so."""
        now = time.monotonic()
        lines = []
        if self.task is not None:
            lines.append(f"{self.task.description}, {format_duration(now - self.task_since)}")
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
        self._reported_waits: set[str | tuple[int, ...]] = set()
        self._ended_at = [time.monotonic()]
        self.opened: StudyOpened | None = None
        self.records: list[TrialRecord] = []
        self._began = time.monotonic()
        self._places: dict[str, None] = {}
        """The names of the places in their order, where there are several."""
        self._at: dict[str, AtPlace] = {"": AtPlace(since=self._began, meanwhile="starting")}
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
        return self._at[""].lines()

    def places(self) -> "list[AtPlace]":
        """Returns what goes on at each of several places; nothing for a search with only one."""
        if self.opened is None:
            return []
        now = time.monotonic()
        return [self._at.get(name) or AtPlace(name=name, since=now) for name in self._places]

    def _end_trial(self, number: int) -> None:
        """Nothing goes on any more at the place where the trial of that number runs."""
        for place in self._at.values():
            if place.trial is not None and place.trial.number == number:
                place.end()

    def at_place(self, device: str) -> AtPlace:
        """Returns what goes on at a place; at "" in a search with only one."""
        return self._at.setdefault(device, AtPlace(name=device, since=time.monotonic()))

    def _do(self, meanwhile: str, device: str = "") -> None:
        self.at_place(device).do(meanwhile)

    def note(self, event: Event) -> None:
        """Update the state with an event."""
        now = time.monotonic()
        match event:
            case Preparing(what=what):
                self._do(what)
            case StudyOpened():
                self._do("")
                self.opened = event
                self._places = dict.fromkeys(event.places)
                self.records = list(event.finished)
                self._ended_at = [time.monotonic()]
            case Predicting(config=config, device=device):
                place = self.at_place(device)
                place.take(place.trial)
                place.do(f"predicting {config.describe()}")
            case Comparing(config=config, device=device):
                self._do(f"comparing the first steps of {config.describe()}", device)
            case TrialPhase(doing=doing, steps=steps, used_bytes=used_bytes, device=device):
                place = self.at_place(device)
                place.do(doing, steps=steps)
                place.used_bytes = used_bytes or place.used_bytes
            case PlaceIsFree(device=device):
                self.at_place(device).end()
            case PlaceJoined(device=device):
                self._places[device] = None
            case PlaceLeft(device=device):
                self.at_place(device).end()
                self._places.pop(device, None)  # a client may not have seen it join
            case Confirming(device=device):
                if not device:  # the trials are done
                    for place in self._at.values():
                        place.end()
                self.at_place(device).take(event)
            case ConfirmationTime(seconds=seconds):
                self._confirmation_ends_at = now + seconds
            case SameProgram():
                self._do("")
            case WaitingForDevice(place=place_name):
                self._do(event.doing, place_name)
            case WaitingForOthers():
                self._do(event.doing)
            case WaitingForStorage(message=message):
                self._do(f"waiting: {message}")
            case StorageBack():
                self._do("")
            case TrialBegan(device=device):
                self._do("")
                self.at_place(device).take(event)
            case AttemptLost(number=number):
                self._end_trial(number)
            case TrialEnded(record=record):
                self._end_trial(record.number)
                self._do("")
                self.records.append(record)
                self._ended_at.append(now)

    def lines(self, event: Event) -> Iterator[str]:
        """Yield what a user is told of an event, after `note`; of a wait only once.

        The time stands before what goes on: how long the search has been running, how long its
        confirmation still may, and, before a result, how many trials there are.
        """
        elapsed, before = format_duration(self.seconds), ""
        match event:
            case WaitingForDevice(device=waited_for) | WaitingForOthers(numbers=waited_for):
                if waited_for in self._reported_waits:
                    return
                self._reported_waits.add(waited_for)
            case Preparing() | TrialBegan():
                before = f"[{elapsed}]  "
            case Confirming():
                left = self.time_left() if self.is_confirming else ""
                before = f"[{elapsed}, {left}]  " if left else f"[{elapsed}]  "
            case TrialEnded():
                before = f"[{self.status()}]  "
        for sentence in event.sentences():
            yield f"{before}{sentence}"

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
        stored = len(self.opened.finished)
        since_then = sum(record.seconds or 0.0 for record in self.records[stored:])
        at_once = max(1, len(self._places))
        of_trials = left + self.opened.seconds_of_trials + since_then / at_once
        allowed = seconds_of_search(of_trials, share=self.opened.confirm_share) - of_trials
        if self.opened.seconds_left is None:
            return allowed
        of_budget = self.opened.seconds_left - (time.monotonic() - self._ended_at[0])
        return max(0.0, min(allowed, of_budget - left))

    def seconds_left(self) -> float | None:
        """Estimate the seconds until the search ends, its confirmation included.

        Returns None where that is not known: before the first trial has ended, and while what goes
        on takes longer than was expected.
        """
        if self._confirmation_ends_at is not None:
            left = self._confirmation_ends_at - time.monotonic()
        else:
            left = (self.eta_seconds() or 0.0) + (self.seconds_of_confirmation() or 0.0)
        return left if 0.0 < left < math.inf else None

    @property
    def is_confirming(self) -> bool:
        """Whether the trials are done, and finalists are measured again."""
        return self._confirmation_ends_at is not None

    def time_left(self) -> str:
        """Returns in words how long the search still takes; empty where that is not known.

        `about 40 s left, then up to 25 s of confirmation`, and later `at most 20 s left`.
        """
        if self._confirmation_ends_at is not None:
            of_confirmation = self.seconds_left()
            return f"at most {format_duration(of_confirmation)} left" if of_confirmation else ""
        parts = []
        left = self.eta_seconds()
        if left is not None and round(left) > 0:
            about = "at most" if self._until_converged else "about"
            parts.append(f"{about} {format_duration(left)} left")
        if confirmation := self.seconds_of_confirmation():
            parts.append(f"then up to {format_duration(confirmation)} of confirmation")
        return ", ".join(parts)

    def so_far(self) -> StudySoFar:
        """Returns the front and the pick so far. Needs the study to be open."""
        assert self.opened is not None
        front = pareto_front(self.records, tolerance=self._preferences.tolerance)
        pick = choose(self.records, front, baseline=None, preferences=self._preferences)
        return StudySoFar(
            is_cuda=self.opened.is_cuda, front=front, pick=pick, terms=terms_of(self.records)
        )

    def best(self) -> str:
        """Returns the pick so far in one line."""
        pick = self.so_far().pick
        if pick is None:
            return "nothing feasible yet"
        record = next(record for record in self.records if record.number == pick.number)
        size = format_size(record.peak_memory_bytes or 0)
        speed = format_speed(record.tokens_per_second, record.tokens_per_second_spread)
        return (
            f"best so far #{record.number}: {size}, {speed} {record.terms.speed}, "
            f"{record.terms.quality} {record.terms.text(record.perplexity or 1.0)}"
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
