"""Events of a running search, for a display to show.

Events are plain values; a listener is any callable that takes one event.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autotune.spec.config import TrainingConfig
from autotune.spec.result import TrialRecord
from autotune.spec.schema import Schema
from autotune.spec.search_space import LegalSpace
from autotune.spec.study import StudyDefinition


@dataclass(frozen=True, kw_only=True)
class Preparing:
    """A step before the first trial begins that takes a while."""

    what: str


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A warning about this machine or the user's script; the search goes on."""

    message: str


@dataclass(frozen=True, kw_only=True)
class StudyOpened:
    definition: StudyDefinition
    legal: LegalSpace
    trials_wanted: int
    records: tuple[TrialRecord, ...]
    """Trials stored already, by an earlier run of this study or reused from earlier studies."""
    is_new: bool
    reused: Mapping[str, int] = field(default_factory=dict)
    """For a new study: the number of records reused from each earlier study, newest first."""
    default_time_budget_seconds: float | None = None
    """The time budget that applies because the request does not say when to end."""
    seconds_for_trials: float | None = None
    """The part of a time budget in which trials begin; the rest is for the confirmation."""
    confirm_share: float | None = None
    """The largest share of the search's time for measuring the finalists again after the trials;
    None where nothing is measured again."""
    seconds_of_trials: float = 0.0
    """For how long any trial of `records` ran; a time in which several did counts once."""
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The places of the search by name, such as cuda:1, each with the UUID by which NVML knows its
    GPU, and None without; empty where the search has only one place."""


@dataclass(frozen=True, kw_only=True)
class TrialBegan(Schema):
    number: int
    config: TrainingConfig
    name: str | None
    device: str = ""
    """The place where it runs, such as cuda:1; empty where the search has only one."""


@dataclass(frozen=True, kw_only=True)
class TrialEnded(Schema):
    record: TrialRecord


@dataclass(frozen=True, kw_only=True)
class Predicting:
    """The peak memory of a suggestion is being predicted."""

    config: TrainingConfig
    device: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparing:
    """The first steps of a configuration are being run, to compare them with others."""

    config: TrainingConfig
    device: str = ""


@dataclass(frozen=True, kw_only=True)
class TrialPhase(Schema):
    """Another phase of the running trial begins, or another step of its training has ended."""

    doing: str
    """In a word: starting, training, compiling or evaluating."""
    steps: tuple[int, int] | None = None
    """How many steps have ended, of how many; None where that is not known."""
    used_bytes: int | None = None
    """Memory in use on a GPU of another machine; None where it is not known."""
    device: str = ""


@dataclass(frozen=True, kw_only=True)
class PlaceIsFree:
    """A place has nothing to do at the moment."""

    device: str


@dataclass(frozen=True, kw_only=True)
class PlaceJoined:
    """A device has joined the search, such as that of a new node."""

    device: str


@dataclass(frozen=True, kw_only=True)
class PlaceLeft:
    """A place can no longer be used; the search goes on with the others."""

    device: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Confirming(Schema):
    """A measurement after the trials begins."""

    doing: str
    """What is measured and why."""
    device: str = ""


@dataclass(frozen=True, kw_only=True)
class ConfirmationTime:
    """The trials are done, and the confirmation has time for what is left of it."""

    seconds: float
    """For how long measurements may go on from now; infinite without a limit."""


@dataclass(frozen=True, kw_only=True)
class SameProgram:
    """A suggestion compiles to the program of an earlier trial, so it is not run."""

    config: TrainingConfig
    number: int


@dataclass(frozen=True, kw_only=True)
class SpaceExhausted:
    """Every legal configuration has a trial, repeats one's program, or will not fit or improve."""

    trials: int


@dataclass(frozen=True, kw_only=True)
class Converged:
    """No remaining configuration is expected to improve the front by much."""

    trials: int
    relative_improvement: float
    """Largest expected hypervolume improvement of a trial, relative to the hypervolume."""


@dataclass(frozen=True, kw_only=True)
class BudgetSpent:
    """The time budget ended before the study had the number of trials wanted."""

    trials: int
    trials_wanted: int


@dataclass(frozen=True, kw_only=True)
class AttemptLost:
    """An attempt failed because of the machine; the trial is retried now or by a later search."""

    number: int
    cause: str
    attempts_left: int


@dataclass(frozen=True, kw_only=True)
class PoisonTrial:
    """A poison trial: its attempts ended so many workers that the other trials run before it."""

    number: int
    deaths: int


@dataclass(frozen=True, kw_only=True)
class ResultRejected:
    """A result arrived after the lease of its attempt had expired; it is stored separately."""

    number: int


@dataclass(frozen=True, kw_only=True)
class WaitingForStorage:
    """The studies database is unreachable; the search waits for it."""

    message: str
    limit_seconds: float


@dataclass(frozen=True, kw_only=True)
class StorageBack:
    seconds: float
    """How long the database was unreachable."""


@dataclass(frozen=True, kw_only=True)
class WaitingForDevice:
    """Another search holds the device slot."""

    device: str
    holder: str = ""
    """Which process of which user holds it, if that is known."""
    place: str = ""
    """The place that waits; empty where the search has only one."""


@dataclass(frozen=True, kw_only=True)
class WaitingForOthers:
    """All remaining trials are running in other searches."""

    numbers: tuple[int, ...]


Event = (
    Preparing
    | Notice
    | StudyOpened
    | TrialBegan
    | TrialEnded
    | Predicting
    | Comparing
    | TrialPhase
    | PlaceIsFree
    | PlaceJoined
    | PlaceLeft
    | Confirming
    | ConfirmationTime
    | SameProgram
    | SpaceExhausted
    | Converged
    | BudgetSpent
    | AttemptLost
    | PoisonTrial
    | ResultRejected
    | WaitingForStorage
    | StorageBack
    | WaitingForDevice
    | WaitingForOthers
)
EVENTS_OF_A_PLACE = (Predicting, Comparing, TrialPhase, Confirming)
"""Events that name the place they are about, as `TrialBegan` does, where a search has several."""
Listener = Callable[[Event], None]
