"""Events of a running search: each is a value that says itself what a user is told of it.

A listener is any callable that takes one event. A server's stream carries them as JSON
(`stream_form`), which its clients read into the same classes (`ServerEvent.of_search`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from autotune.execution.device_slots import waiting_message
from autotune.spec.config import TrainingConfig
from autotune.spec.result import TrialRecord
from autotune.spec.schema import Schema
from autotune.spec.study import counted_trials
from autotune.study.event_text import record_line
from autotune.units import format_duration, format_percent


@dataclass(frozen=True, kw_only=True)
class Event(Schema):
    """Something that happens in a running search."""

    kind: ClassVar[str] = ""
    """Its name in a server's stream; empty for a `notice`, and for what only this process needs."""

    def sentences(self) -> Iterator[str]:
        """Yield what a user is told of it, a line each; nothing for one that only changes a state.

        `Progress.lines` puts the time before those that happen again and again.
        """
        yield from ()

    def to_dict(self) -> dict[str, Any]:
        """Returns what a server's stream has of it, for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Preparing(Event):
    """A step before the first trial begins that takes a while."""

    what: str

    def sentences(self) -> Iterator[str]:
        yield f"{_with_capital(self.what)} ..."


@dataclass(frozen=True, kw_only=True)
class Notice(Event):
    """A warning about this machine or the user's script; the search goes on."""

    message: str

    def sentences(self) -> Iterator[str]:
        yield f"Note: {self.message}."


@dataclass(frozen=True, kw_only=True)
class StudyOpened(Event):
    """The study of the search is there; what is not known of one on a server is empty."""

    kind = "opened"

    study: str
    lines: tuple[str, ...] = ()
    """What the search is of, under which limits, and what it takes over (`opening_lines`)."""
    trials_wanted: int
    records: tuple[TrialRecord, ...] = ()
    """Trials stored already, by an earlier run of this study or reused from earlier studies."""
    is_new: bool = False
    cap_bytes: int | None = None
    device: str = ""
    """The vendor's name of the device."""
    is_cuda: bool = False
    baseline: TrainingConfig = field(default_factory=TrainingConfig)
    """What savings are relative to."""
    default_time_budget_seconds: float | None = None
    """The time budget that applies because the request does not say when to end."""
    seconds_for_trials: float | None = None
    seconds_left: float | None = None
    """Of the time budget from now, confirmation included; None without one."""
    """The part of a time budget in which trials begin; the rest is for the confirmation."""
    confirm_share: float | None = None
    """The largest share of the search's time for measuring the finalists again after the trials;
    None where nothing is measured again."""
    seconds_of_trials: float = 0.0
    """For how long any trial of `records` ran; a time in which several did counts once."""
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The places of the search by name, such as cuda:1, each with the UUID by which NVML knows its
    GPU, and None without; empty where the search has only one place."""

    def sentences(self) -> Iterator[str]:
        yield from self.lines

    @property
    def finished(self) -> tuple[TrialRecord, ...]:
        """The trials with a result."""
        return tuple(record for record in self.records if record.is_finished)

    def to_dict(self) -> dict[str, Any]:
        """Returns what a server's stream has of it; the trials are read from the study."""
        return {
            "trials_wanted": self.trials_wanted,
            "trials": len(self.finished),
            "cap_bytes": self.cap_bytes,
            "device": self.device,
            "is_new": self.is_new,
            "places": list(self.places),
            "lines": list(self.lines),
            "baseline": self.baseline.to_dict(),
        }


@dataclass(frozen=True, kw_only=True)
class TrialBegan(Event):
    kind = "trial_began"

    number: int
    config: TrainingConfig
    name: str | None
    device: str = ""
    """The place where it runs, such as cuda:1; empty where the search has only one."""

    @property
    def label(self) -> str:
        return self.name or self.config.describe()

    @property
    def description(self) -> str:
        """The number, the name and the configuration."""
        named = f"{self.name}: " if self.name else ""
        return f"#{self.number} {named}{self.config.describe()}"

    def sentences(self) -> Iterator[str]:
        yield f"{_at(self.device)}{self.description} ..."

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "label": self.config.describe()}


@dataclass(frozen=True, kw_only=True)
class TrialEnded(Event):
    kind = "trial_ended"

    record: TrialRecord

    def sentences(self) -> Iterator[str]:
        seconds = self.record.seconds
        took = "" if seconds is None else f", in {format_duration(seconds)}"
        yield f"{record_line(self.record)}{took}"

    def to_dict(self) -> dict[str, Any]:
        return {"trial": self.record.to_dict()}


@dataclass(frozen=True, kw_only=True)
class Predicting(Event):
    """The peak memory of a suggestion is being predicted."""

    config: TrainingConfig
    device: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparing(Event):
    """The first steps of a configuration are being run, to compare them with others."""

    config: TrainingConfig
    device: str = ""


@dataclass(frozen=True, kw_only=True)
class TrialPhase(Event):
    """Another phase of the running trial begins, or another step of its training has ended."""

    kind = "step"

    doing: str
    """In a word: starting, training, compiling or evaluating."""
    steps: tuple[int, int] | None = None
    """How many steps have ended, of how many; None where that is not known."""
    used_bytes: int | None = None
    """Memory in use on a GPU of another machine; None where it is not known."""
    device: str = ""


@dataclass(frozen=True, kw_only=True)
class PlaceIsFree(Event):
    """A place has nothing to do at the moment."""

    device: str


@dataclass(frozen=True, kw_only=True)
class PlaceJoined(Event):
    """A device has joined the search, such as that of a new node."""

    device: str

    def sentences(self) -> Iterator[str]:
        yield f"Note: {self.device} has joined the search."


@dataclass(frozen=True, kw_only=True)
class PlaceLeft(Event):
    """A place can no longer be used; the search goes on with the others."""

    device: str
    reason: str

    def sentences(self) -> Iterator[str]:
        yield f"Note: the search goes on without {self.device}: {self.reason}."


@dataclass(frozen=True, kw_only=True)
class Confirming(Event):
    """A measurement after the trials begins."""

    kind = "confirming"

    doing: str
    """What is measured and why."""
    device: str = ""

    @property
    def label(self) -> str:
        return f"measuring {self.doing}"

    description = label

    def sentences(self) -> Iterator[str]:
        yield f"{_at(self.device)}{_with_capital(self.label)} ..."


@dataclass(frozen=True, kw_only=True)
class ConfirmationTime(Event):
    """The trials are done, and the confirmation has time for what is left of it."""

    seconds: float
    """For how long measurements may go on from now; infinite without a limit."""


@dataclass(frozen=True, kw_only=True)
class SameProgram(Event):
    """A suggestion compiles to the program of an earlier trial, so it is not run."""

    config: TrainingConfig
    number: int

    def sentences(self) -> Iterator[str]:
        described = self.config.describe()
        yield f"{described}: not run, it compiles to the same program as #{self.number}"


@dataclass(frozen=True, kw_only=True)
class SpaceExhausted(Event):
    """Every legal configuration has a trial, repeats one's program, or will not fit or improve."""

    trials: int

    def sentences(self) -> Iterator[str]:
        yield (
            f"Nothing worth trying is left after {self.trials} trials: every other configuration "
            "compiles to the program of one of them, does not fit or is dominated."
        )


@dataclass(frozen=True, kw_only=True)
class Converged(Event):
    """No remaining configuration is expected to improve the front by much."""

    trials: int
    relative_improvement: float
    """Largest expected hypervolume improvement of a trial, relative to the hypervolume."""

    def sentences(self) -> Iterator[str]:
        added = format_percent(self.relative_improvement, digits=2)
        yield (
            f"Converged after {self.trials} trials: the most promising configuration left is "
            f"expected to add {added} % to the hypervolume of the front."
        )


@dataclass(frozen=True, kw_only=True)
class BudgetSpent(Event):
    """The time budget ended before the study had the number of trials wanted."""

    trials: int
    trials_wanted: int

    def sentences(self) -> Iterator[str]:
        tried = counted_trials(self.trials, self.trials_wanted, between=" of ")
        yield f"The time budget is used up after {tried} trials."


@dataclass(frozen=True, kw_only=True)
class AttemptLost(Event):
    """An attempt failed because of the machine; the trial is retried now or by a later search."""

    number: int
    cause: str
    attempts_left: int

    def sentences(self) -> Iterator[str]:
        then = "it is left for a later search"
        if self.attempts_left:
            then = f"it is tried again, {self.attempts_left} attempts left"
        yield f"#{self.number} failed for a reason outside the trial: {self.cause}; {then}."


@dataclass(frozen=True, kw_only=True)
class PoisonTrial(Event):
    """A poison trial: its attempts ended so many workers that the other trials run before it."""

    number: int
    deaths: int

    def sentences(self) -> Iterator[str]:
        yield (
            f"#{self.number} was running each time when {self.deaths} searches died; it is run "
            "last."
        )


@dataclass(frozen=True, kw_only=True)
class ResultRejected(Event):
    """A result arrived after the lease of its attempt had expired; it is stored separately."""

    number: int

    def sentences(self) -> Iterator[str]:
        yield (
            f"A stale result of #{self.number} was rejected: another search has the trial. The "
            "result is stored separately."
        )


@dataclass(frozen=True, kw_only=True)
class WaitingForStorage(Event):
    """The studies database is unreachable; the search waits for it."""

    message: str
    limit_seconds: float

    def sentences(self) -> Iterator[str]:
        yield (
            f"{_with_capital(self.message)}; waiting up to {format_duration(self.limit_seconds)}, "
            "no result is lost."
        )


@dataclass(frozen=True, kw_only=True)
class StorageBack(Event):
    seconds: float
    """How long the database was unreachable."""

    def sentences(self) -> Iterator[str]:
        unreachable = format_duration(self.seconds)
        yield f"The studies database can be reached again after {unreachable}."


@dataclass(frozen=True, kw_only=True)
class WaitingForDevice(Event):
    """Another search holds the device slot."""

    device: str
    holder: str = ""
    """Which process of which user holds it, if that is known."""
    place: str = ""
    """The place that waits; empty where the search has only one."""

    @property
    def doing(self) -> str:
        return waiting_message(self.device, self.holder)

    def sentences(self) -> Iterator[str]:
        yield f"{_with_capital(self.doing)}."


@dataclass(frozen=True, kw_only=True)
class WaitingForOthers(Event):
    """All remaining trials are running in other searches."""

    numbers: tuple[int, ...]

    @property
    def doing(self) -> str:
        trials = "trials" if len(self.numbers) > 1 else "trial"
        numbers = ", ".join(f"#{number}" for number in self.numbers)
        return f"waiting for {trials} {numbers} of other searches"

    def sentences(self) -> Iterator[str]:
        yield f"{_with_capital(self.doing)}."


@dataclass(frozen=True, kw_only=True)
class ServerMessage(Event):
    """What a server says of a search, in lines."""

    message: str

    def sentences(self) -> Iterator[str]:
        yield from self.message.splitlines()


@dataclass(frozen=True, kw_only=True)
class WaitingForServer(ServerMessage):
    """A search of a server waits in its queue, or the server is away."""


def stream_form(event: Event, lines: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Returns the kind and the data of an event in a server's stream; `lines` say it to readers.

    What has no kind of its own is a notice, which also readers show that do not know its class.
    """
    if event.kind:
        return event.kind, event.to_dict()
    notice = {"message": "\n".join(lines), "type": type(event).__name__}
    return "notice", {**notice, "values": event.to_dict()}


def _at(place: str) -> str:
    return f"{place}  " if place else ""


def _with_capital(sentence: str) -> str:
    return f"{sentence[0].upper()}{sentence[1:]}"


LASTING_EVENTS = (
    Notice,
    StudyOpened,
    SameProgram,
    SpaceExhausted,
    Converged,
    BudgetSpent,
    AttemptLost,
    PoisonTrial,
    ResultRejected,
    WaitingForStorage,
    StorageBack,
    ServerMessage,
)
"""Events whose lines stay readable while a live table changes below them."""
WAITING = (WaitingForDevice, WaitingForOthers, WaitingForStorage, StorageBack, WaitingForServer)
"""Events that say what a search waits for, or that the wait is over."""
EVENTS_OF_A_PLACE = (Predicting, Comparing, TrialPhase, Confirming)
"""Events that name the place they are about, as `TrialBegan` does, where a search has several."""
Listener = Callable[[Event], None]
