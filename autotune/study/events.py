"""What a running search reports, for a display to show.

Plain values; a listener is any callable of one event.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autotune.spec.config import TrainingConfig
from autotune.spec.result import TrialRecord
from autotune.spec.search_space import LegalSpace
from autotune.spec.study import StudyDefinition


@dataclass(frozen=True, kw_only=True)
class Preparing:
    """Something before the first trial takes a while."""

    what: str


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Something of this machine or of the user's script is not as it should be; the search goes on without it."""

    message: str


@dataclass(frozen=True, kw_only=True)
class StudyOpened:
    definition: StudyDefinition
    legal: LegalSpace
    trials_wanted: int
    records: tuple[TrialRecord, ...]
    """What is known already, from an earlier run of this study or from earlier studies."""
    is_new: bool
    reused: Mapping[str, int] = field(default_factory=dict)
    """For a new study: how many of the records each earlier one gave, newest first."""


@dataclass(frozen=True, kw_only=True)
class TrialBegan:
    number: int
    config: TrainingConfig
    name: str | None


@dataclass(frozen=True, kw_only=True)
class TrialEnded:
    record: TrialRecord


@dataclass(frozen=True, kw_only=True)
class Predicting:
    """A suggestion's peak memory is being worked out."""

    config: TrainingConfig


@dataclass(frozen=True, kw_only=True)
class Comparing:
    """The first steps of a configuration are taken, to be compared with others."""

    config: TrainingConfig


@dataclass(frozen=True, kw_only=True)
class SameProgram:
    """A suggestion compiles to the program that a trial has run: it is answered from there."""

    config: TrainingConfig
    number: int


@dataclass(frozen=True, kw_only=True)
class SpaceExhausted:
    """Every legal configuration was tried, runs the program of one that was, will not fit, or is surely beaten."""

    trials: int


@dataclass(frozen=True, kw_only=True)
class Converged:
    """Nothing that is left is expected to make the front better by much."""

    trials: int
    relative_gain: float
    """Of the most promising trial: expected growth of the hypervolume, relative to it."""


@dataclass(frozen=True, kw_only=True)
class BudgetSpent:
    """The time budget is over before the study has all the trials wanted of it."""

    trials: int
    trials_wanted: int


@dataclass(frozen=True, kw_only=True)
class AttemptLost:
    """An attempt failed by the machine's fault; the trial is tried again, or left for a later search."""

    number: int
    cause: str
    attempts_left: int


@dataclass(frozen=True, kw_only=True)
class ComesLast:
    """So many workers died at a trial that the others are tried before it."""

    number: int
    deaths: int


@dataclass(frozen=True, kw_only=True)
class ResultRefused:
    """A result came after its attempt had been given up: it is kept aside."""

    number: int


@dataclass(frozen=True, kw_only=True)
class WaitingForStorage:
    """The studies database is away; the search waits for it."""

    message: str
    limit_seconds: float


@dataclass(frozen=True, kw_only=True)
class StorageBack:
    seconds: float
    """How long it was away."""


@dataclass(frozen=True, kw_only=True)
class WaitingForDevice:
    """Another search, or another worker of this one, has its turn on the device."""

    device: str
    holder: str = ""
    """Which process of which user, where that is known."""


@dataclass(frozen=True, kw_only=True)
class WaitingForOthers:
    """All that is left runs in other workers."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class WorkerEnded:
    """Another process of this search has failed; the study goes on without it."""

    number: int
    exit_code: int
    log_file: str


Event = (
    Preparing
    | Notice
    | StudyOpened
    | TrialBegan
    | TrialEnded
    | Predicting
    | Comparing
    | SameProgram
    | SpaceExhausted
    | Converged
    | BudgetSpent
    | AttemptLost
    | ComesLast
    | ResultRefused
    | WaitingForStorage
    | StorageBack
    | WaitingForDevice
    | WaitingForOthers
    | WorkerEnded
)
Listener = Callable[[Event], None]
