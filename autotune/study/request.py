"""The request for a search, and the checks that need no device."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.analysis.pick import Preferences
from autotune.errors import InvalidInput
from autotune.execution.server.limits import DEFAULT_TRIAL_SECONDS
from autotune.execution.trial_options import TrialOptions
from autotune.spec.result import DeviceInfo
from autotune.spec.study import (
    DEFAULT_SAMPLER,
    DEFAULT_STORAGE,
    SAMPLERS,
    Sampler,
    check_device,
    check_study_name,
)
from autotune.study.workers.retry import DEFAULT_DATABASE_WAIT_SECONDS
from autotune.units import LARGEST_SIZE_BYTES

DEFAULT_TRIALS = 30
MOST_TRIALS_UNTIL_CONVERGED = 200
LEAST_CAP_BYTES = 65536
"""A smaller cap is rejected: most likely its unit was forgotten."""
DEFAULT_TIME_LIMIT_SECONDS = DEFAULT_TRIAL_SECONDS
LARGEST_NUMBER_OF_TRIALS = 1_000_000
"""More trials than any study has, and a number that fits every database's integers."""
LARGEST_NUMBER_OF_SEEDS = 100
LARGEST_NUMBER_OF_WORKERS = 256


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """All options of a search.

    None: not specified, so the value of the stored study, the space or the device applies. Raises
    InvalidInput for a value that is invalid on any device.
    """

    name: str | None = None
    storage: str = DEFAULT_STORAGE
    space: str | None = None
    scale: str | None = None
    """Name of one of the space's scales."""
    device: str | None = None
    cap_bytes: int | None = None
    sampler: Sampler | None = None
    seed: int | None = None
    trials: int | None = None
    time_budget_seconds: float | None = None
    until_converged: bool = False
    """Whether the study ends once no trial is expected to improve the front by much
    (`ehvi_sampler.py`)."""
    trial_time_limit_seconds: float = DEFAULT_TIME_LIMIT_SECONDS
    compile_time_limit_seconds: float | None = None
    """Limit for a step in which code is compiled; None is half of the trial's limit."""
    step_time_limit_seconds: float | None = None
    """Limit from one finished step to the next; None is a fifth of the trial's limit."""
    predict: bool = True
    """Whether peak memory is predicted before each trial; a configuration that is then surely over
    the cap is not trained."""
    full_trainings: bool = False
    """Whether every trial is trained to the end, even if another of its numerics class has been."""
    perplexity_seeds: int = 1
    """Number of seeds over which the perplexity of a numerics class is averaged."""
    fresh: bool = False
    """Whether no results of earlier studies are reused."""
    workers: int = 1
    """Number of processes that share the study's trials."""
    trials_per_device: int = 1
    """Number of trials that may run on one device at the same time; they slow each other down."""
    database_wait_seconds: float = DEFAULT_DATABASE_WAIT_SECONDS
    """How long the search waits for an unreachable database."""
    memory_snapshot: bool = False
    """Whether torch's allocation history of the measured steps is stored for each trial; CUDA only.
    """
    workload: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Workload`; a value of None is not specified."""
    preferences: Preferences = field(default_factory=Preferences)

    def __post_init__(self) -> None:
        if self.name is not None:
            check_study_name(self.name)
        if self.sampler is not None and self.sampler not in SAMPLERS:
            raise InvalidInput(
                f"there is no sampler {self.sampler!r}", hint=f"use one of {', '.join(SAMPLERS)}"
            )
        check_sampler(self.sampler or DEFAULT_SAMPLER, until_converged=self.until_converged)
        if self.cap_bytes is not None:
            check_cap(self.cap_bytes)
        if self.trials is not None:
            _check_count("number of trials", self.trials, most=LARGEST_NUMBER_OF_TRIALS)
        _check_count("number of seeds", self.perplexity_seeds, most=LARGEST_NUMBER_OF_SEEDS)
        if self.perplexity_seeds > 1 and self.workload.get("script") is not None:
            raise InvalidInput(
                f"{self.perplexity_seeds} seeds cannot be used with a script, which draws its "
                "initial weights itself",
                hint="leave --seeds out, or repeat the study with another --seed",
            )
        _check_count("--workers", self.workers, most=LARGEST_NUMBER_OF_WORKERS)
        _check_count("--trials-per-device", self.trials_per_device, most=LARGEST_NUMBER_OF_WORKERS)
        self.trial_options.time_limits()
        check_device(self.device)
        check_snapshot(self.memory_snapshot, self.device)
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise InvalidInput(
                f"invalid seed: {self.seed}", hint="use a whole number from 0 to 4294967295"
            )

    @property
    def trial_options(self) -> TrialOptions:
        """The settings that concern the trials."""
        return TrialOptions(
            trial_time_limit_seconds=self.trial_time_limit_seconds,
            compile_time_limit_seconds=self.compile_time_limit_seconds,
            step_time_limit_seconds=self.step_time_limit_seconds,
            full_trainings=self.full_trainings,
            perplexity_seeds=self.perplexity_seeds,
            memory_snapshot=self.memory_snapshot,
        )

    @property
    def new_trials(self) -> int:
        """Number of trials of a new study, without those reused from earlier studies."""
        if self.trials:
            return self.trials
        return MOST_TRIALS_UNTIL_CONVERGED if self.until_converged else DEFAULT_TRIALS

    def specified_workload(self) -> dict[str, Any]:
        """Return the fields of `Workload` that are specified, with the seed."""
        specified = {name: value for name, value in self.workload.items() if value is not None}
        if self.seed is not None:
            specified["seed"] = self.seed
        return specified


def _check_count(what: str, count: object, *, most: int) -> None:
    if type(count) is not int or not 1 <= count <= most:
        raise InvalidInput(
            f"invalid {what}: {count!r}", hint=f"use a whole number from 1 to {most}"
        )


def check_cap(cap_bytes: object) -> None:
    """Raise InvalidInput unless `cap_bytes` can be the memory of a device."""
    if not _is_size(cap_bytes):
        raise InvalidInput(f"invalid memory cap: {cap_bytes!r} bytes", hint="give for example 8GiB")
    assert isinstance(cap_bytes, int)
    if cap_bytes < LEAST_CAP_BYTES:
        raise InvalidInput(
            f"a memory cap of {cap_bytes} bytes is too small for any training",
            hint=f"give a unit: did you mean {cap_bytes}GiB?",
        )


def _is_size(size_bytes: object) -> bool:
    return (
        isinstance(size_bytes, int)
        and not isinstance(size_bytes, bool)
        and 1 <= size_bytes < LARGEST_SIZE_BYTES
    )


def check_sampler(sampler: Sampler, *, until_converged: bool) -> None:
    """Raise InvalidInput for a sampler that cannot run here or cannot end by convergence."""
    if sampler == "gp" and importlib.util.find_spec("scipy") is None:
        raise InvalidInput(
            "sampler gp needs scipy", hint="pip install 'autotune[gp]', or choose another sampler"
        )
    if until_converged and sampler != "ehvi":
        raise InvalidInput(
            f"sampler {sampler} does not estimate the improvement by a trial, so it cannot end "
            "with --until-converged",
            hint="leave --until-converged out, or begin a study with --sampler ehvi",
        )


def check_snapshot(is_wanted: bool, device: str | None) -> None:
    """Raise InvalidInput for a memory snapshot on a CPU; `device` None is not known yet."""
    if is_wanted and device == "cpu":
        raise InvalidInput(
            "--memory-snapshot records the history of CUDA's allocator, and the device is cpu",
            hint="leave it out; autotune predict shows what holds the memory on any device",
        )


def check_trials_per_device(trials: int, device: DeviceInfo) -> None:
    """Raise InvalidInput if trials cannot share `device`, or its context's size is not known."""
    if trials == 1 or device.type != "cuda":
        return
    if device.compute_mode == "exclusive-process":
        raise InvalidInput(
            f"--trials-per-device {trials} is not possible: {device.device} is in "
            "exclusive-process mode",
            hint="leave it out, or end the mode with nvidia-smi -c DEFAULT",
        )
    if device.context_bytes is None:
        raise InvalidInput(
            f"--trials-per-device {trials} is not possible: the size of a CUDA context on "
            f"{device.device} could not be measured, and trials that share a device cannot "
            "measure it",
            hint="leave it out, or see autotune doctor for the reason",
        )
