"""The request for a search: every setting with its option, and the checks that need no device."""

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.analysis.pick import DEFAULT_PREFERENCES, Preferences, check_preferences
from autotune.errors import InvalidInput, suggestion
from autotune.execution.cluster.address import check_address
from autotune.execution.trial_options import TrialOptions
from autotune.spec.option import (
    COUNT,
    DURATION,
    DURATION_OR_NONE,
    EVERYDAY,
    LIMITS,
    NUMBER,
    RESULTS,
    SIZE,
    SWITCH,
    THE_DEVICE,
    THE_SEARCH,
    Option,
    options_of,
    setting,
)
from autotune.spec.result import DeviceInfo
from autotune.spec.study import (
    DEFAULT_SAMPLER,
    DEFAULT_STORAGE,
    MOST_TRIALS_IN_TIME,
    SAMPLERS,
    Sampler,
    check_device,
    check_study_name,
)
from autotune.spec.workload_options import SEED
from autotune.study.devices import MOST_DEVICES, parse_devices
from autotune.units import LARGEST_SIZE_BYTES, format_size

DEFAULT_TRIALS = 30
PROFILED = ("pick", "front")
"""What a search may profile at its end."""
MOST_TRIALS_UNTIL_CONVERGED = 200
DEFAULT_TIME_BUDGET_SECONDS: Mapping[str, float] = {"cpu": 600.0, "cuda": 1800.0}
"""Time budget by type of device, for a new search that is given no end.

About what the trials of the default workload take on two cores, and on a GPU of 8 GiB.
"""
LEAST_CAP_BYTES = 65536
"""A smaller cap is rejected: most likely its unit was forgotten."""
LARGEST_NUMBER_OF_TRIALS = 1_000_000
"""More trials than any study has, and a number that fits every database's integers."""
LARGEST_NUMBER_OF_SEEDS = 100
LARGEST_CONFIRM_SHARE = 0.5
"""More than half of the time would be no search any more."""
VARIANTS_SHARE = 0.15
"""Of the time of a search, the largest part for measuring the pick without each technique."""


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """All settings of a search, each declared with its option.

    None: not specified, so the value of the stored study, the space or the device applies. Raises
    InvalidInput for a value that is invalid on any device.
    """

    cap_bytes: int | None = setting(
        Option(
            flag="--max-mem",
            group=EVERYDAY,
            kind=SIZE,
            metavar="SIZE",
            help="Memory cap: 8GiB, 8GB, 8192MiB. [default: all memory of the device]",
            is_repeated=False,
        )
    )
    space: str | None = setting(
        Option(
            flag="--space",
            group=EVERYDAY,
            metavar="NAME|FILE",
            help="Search space: default, quick, peak_memory, peak_memory_search or a .toml file.",
            is_repeated=False,
        )
    )
    scale: str | None = setting(
        Option(
            flag="--scale",
            group=THE_SEARCH,
            metavar="NAME",
            help="Which of the search space's workload sizes to use.",
            is_repeated=False,
        )
    )
    name: str | None = setting(
        Option(
            flag="--name",
            group=EVERYDAY,
            metavar="STUDY",
            help="Name of the study. An existing study is continued.",
        )
    )
    storage: str = setting(
        Option(
            flag="--storage",
            group=RESULTS,
            metavar="URL",
            default=DEFAULT_STORAGE,
            help="URL of the studies database.",
        )
    )
    device: str | None = setting(
        Option(
            flag="--device",
            group=EVERYDAY,
            metavar="DEVICE",
            choices=("cpu", "cuda"),
            help="Device: cpu, cuda or cuda:1. [default: a GPU if there is one]",
            is_repeated=False,
        )
    )
    trials: int | None = setting(
        Option(
            flag="--trials",
            group=EVERYDAY,
            kind=COUNT,
            help="Number of different configurations to try; as many as the time allows on a GPU "
            f"or with a time budget alone. [default: {DEFAULT_TRIALS}]",
        )
    )
    time_budget_seconds: float | None = setting(
        Option(
            flag="--time-budget",
            group=EVERYDAY,
            kind=DURATION_OR_NONE,
            metavar="TIME",
            help="Time from the command to its end, with set-up and measuring the finalists again: "
            "30m, 2h, or none for no limit. [default: 10m on a CPU and 30m on a GPU, without "
            "--trials and --until-converged]",
            is_repeated=False,
        )
    )
    """Infinite for no limit."""
    until_converged: bool = setting(
        Option(
            flag="--until-converged",
            group=THE_SEARCH,
            kind=SWITCH,
            default=False,
            help="Stop when no remaining trial is expected to improve the front by much.",
        )
    )
    """`ehvi_sampler.py` estimates the improvement."""
    trial_time_limit_seconds: float = setting(
        Option(
            flag="--trial-time-limit",
            group=LIMITS,
            kind=DURATION,
            metavar="TIME",
            default="10m",
            help="Stop a trial after this time.",
        )
    )
    compile_time_limit_seconds: float | None = setting(
        Option(
            flag="--compile-time-limit",
            group=LIMITS,
            kind=DURATION,
            metavar="TIME",
            help="Stop a trial if one compiling step takes longer than this. "
            "[default: half of --trial-time-limit]",
        )
    )
    step_time_limit_seconds: float | None = setting(
        Option(
            flag="--step-time-limit",
            group=LIMITS,
            kind=DURATION,
            metavar="TIME",
            help="Stop a trial if one step takes longer than this. "
            "[default: a fifth of --trial-time-limit]",
        )
    )
    """Limit from one finished step to the next."""
    sampler: Sampler | None = setting(
        Option(
            flag="--sampler",
            group=THE_SEARCH,
            choices=SAMPLERS,
            help=f"How the next configuration is chosen. [default: {DEFAULT_SAMPLER}]",
            is_repeated=False,
        )
    )
    seed: int | None = setting(SEED)
    predict: bool = setting(
        Option(
            flag="--no-predict",
            group=THE_SEARCH,
            keyword="predict",
            kind=SWITCH,
            default=True,
            help="Train configurations even if their predicted memory is over the cap.",
        )
    )
    """Whether peak memory is predicted before each trial; a configuration that is then surely over
    the cap is not trained."""
    full_trainings: bool = setting(
        Option(
            flag="--full-trainings",
            group=THE_SEARCH,
            kind=SWITCH,
            default=False,
            help="Train every trial to the end. By default, trials with the same numerics share "
            "one full training.",
        )
    )
    perplexity_seeds: int | None = setting(
        Option(
            flag="--seeds",
            group=THE_SEARCH,
            keyword="perplexity_seeds",
            kind=COUNT,
            metavar="N",
            help="Number of trainings per measured perplexity, each with another seed. It is added "
            "to the seeds that a --script sets. A study that is continued keeps its number. "
            "[default: 1]",
        )
    )
    confirm: bool = setting(
        Option(
            flag="--no-confirm",
            group=THE_SEARCH,
            keyword="confirm",
            kind=SWITCH,
            default=True,
            help="Do not measure the finalists again after the trials. Speeds are then those of "
            "one measurement each, of which the fastest is often the luckiest.",
        )
    )
    confirm_share: float = setting(
        Option(
            flag="--confirm-share",
            group=LIMITS,
            kind=NUMBER,
            metavar="SHARE",
            default=0.2,
            help="Largest share of the search's time for measuring the finalists again.",
        )
    )
    """Up to VARIANTS_SHARE more goes to the pick without each of its techniques."""
    fresh: bool = setting(
        Option(
            flag="--fresh",
            group=THE_SEARCH,
            kind=SWITCH,
            default=False,
            help="Measure everything again instead of reusing results of earlier studies.",
            is_repeated=False,
        )
    )
    devices: str | None = setting(
        Option(
            flag="--devices",
            group=THE_DEVICE,
            metavar="all|N|LIST",
            choices=("all",),
            help="Run a trial on each of several devices at once: all GPUs, a number of them, or "
            "names such as cuda:0,cuda:1. On a CPU a number of slots, each with its share of the "
            "cores. With --devices-per-trial, a trial on each group of them. [default: one trial]",
        )
    )
    workers: int | None = setting(
        Option(
            flag="--workers",
            group=THE_DEVICE,
            kind=COUNT,
            metavar="N",
            help="Another name of --devices N.",
            is_repeated=False,  # the number is in `devices`
        )
    )
    ray: str | None = setting(
        Option(
            flag="--ray",
            group=THE_DEVICE,
            metavar="auto|local|ADDRESS",
            choices=("auto", "local"),
            help="Run the trials on a Ray cluster: the one of this machine, a new one on this "
            "machine, or one at an address such as ray://host:10001.",
        )
    )
    trials_per_device: int = setting(
        Option(
            flag="--trials-per-device",
            group=THE_DEVICE,
            kind=COUNT,
            metavar="N",
            default=1,
            help="Number of trials that run at once on each device. More than one makes their "
            "speeds less reliable; finalists are measured again one run at a time.",
        )
    )
    database_wait_seconds: float = setting(
        Option(
            flag="--database-wait",
            group=LIMITS,
            kind=DURATION,
            metavar="TIME",
            default="5m",
            help="How long to wait for an unreachable database before giving up. "
            "No result is lost while waiting.",
        )
    )
    memory_snapshot: bool = setting(
        Option(
            flag="--memory-snapshot",
            group=THE_DEVICE,
            kind=SWITCH,
            default=False,
            help="Record torch's allocation history in each trial (CUDA only).",
        )
    )
    profile: str | None = setting(
        Option(
            flag="--profile",
            group=RESULTS,
            choices=PROFILED,
            help="Profile the pick, or every trial of the front, at the end: see autotune profile.",
            is_repeated=False,
        )
    )
    workload: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Workload`; a value of None is not specified. Their options are in
    `spec/workload_options.py`."""
    preferences: Preferences = DEFAULT_PREFERENCES
    """On the command line three options that other commands have, too (`cli/options.py`)."""

    def __post_init__(self) -> None:
        check_preferences(self.preferences)
        if self.name is not None:
            check_study_name(self.name)
        if self.sampler is not None and self.sampler not in SAMPLERS:
            raise InvalidInput(
                f"there is no sampler {self.sampler!r}",
                hint=suggestion(
                    self.sampler, SAMPLERS, otherwise=f"use one of {', '.join(SAMPLERS)}"
                ),
            )
        check_sampler(self.sampler or DEFAULT_SAMPLER, until_converged=self.until_converged)
        if self.cap_bytes is not None:
            check_cap(self.cap_bytes)
        if self.trials is not None:
            _check_count("number of trials", self.trials, most=LARGEST_NUMBER_OF_TRIALS)
        if self.perplexity_seeds is not None:
            _check_count("number of seeds", self.perplexity_seeds, most=LARGEST_NUMBER_OF_SEEDS)
        if not 0 <= self.confirm_share <= LARGEST_CONFIRM_SHARE:
            raise InvalidInput(
                f"invalid share of the time for confirmation: {self.confirm_share}",
                hint=f"use a number from 0 to {LARGEST_CONFIRM_SHARE}; a search with --no-confirm "
                "measures nothing again",
            )
        _check_count("--trials-per-device", self.trials_per_device, most=MOST_DEVICES)
        self._read_devices()
        if self.workers is not None:
            _check_count("--workers", self.workers, most=MOST_DEVICES)
            if self.devices not in (None, str(self.workers)):
                raise InvalidInput(
                    "--workers is another name of --devices, and both are given",
                    hint="give only --devices",
                )
            object.__setattr__(self, "devices", str(self.workers))
        self._check_devices()
        self._check_ray()
        self._check_profile()
        self.trial_options.time_limits()
        check_device(self.device)
        check_snapshot(self.memory_snapshot, self.device)
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 2**32):
            raise InvalidInput(
                f"invalid seed: {self.seed!r}", hint="use a whole number from 0 to 4294967295"
            )

    def _read_devices(self) -> None:
        """Take what Python gives, a number or a list of names, as the text of the option."""
        if self.devices is None:
            return
        given: object = self.devices
        if isinstance(given, (list, tuple)):
            given = ",".join(map(str, given))
        elif type(given) is int:
            given = str(given)
        if not isinstance(given, str):
            raise InvalidInput(
                f"invalid devices: {given!r}",
                hint="use all, a number, or names such as cuda:0,cuda:1",
            )
        object.__setattr__(self, "devices", given)

    def _check_ray(self) -> None:
        if self.ray is None:
            return
        check_address(self.ray)
        for option, given in (("--device", self.device or ""), ("--devices", self.devices or "")):
            if ":" in given:
                raise InvalidInput(
                    f"{option} {given} names devices of one machine, and --ray uses those of a "
                    "cluster",
                    hint="use --device cpu or cuda, and --devices all or a number",
                )

    def _check_profile(self) -> None:
        if self.profile is None:
            return
        if self.profile not in PROFILED:
            raise InvalidInput(
                f"there is no {self.profile!r} to profile at the end of a search",
                hint=f"use --profile {' or --profile '.join(PROFILED)}",
            )
        for option, given in (("--ray", self.ray), ("--script", self.workload.get("script"))):
            if given is not None:
                raise InvalidInput(
                    f"--profile cannot be given with {option}",
                    hint="leave --profile out: a profile runs on a device of this machine, and "
                    "not the steps of a script",
                )

    def _check_devices(self) -> None:
        if self.devices is None:
            return
        wanted = parse_devices(self.devices)
        if self.device is not None and (isinstance(wanted, tuple) or ":" in self.device):
            raise InvalidInput(
                f"--device {self.device} and --devices {self.devices} both name devices",
                hint="give only --devices",
            )

    @property
    def trial_options(self) -> TrialOptions:
        """The settings that concern the trials."""
        return TrialOptions(
            trial_time_limit_seconds=self.trial_time_limit_seconds,
            compile_time_limit_seconds=self.compile_time_limit_seconds,
            step_time_limit_seconds=self.step_time_limit_seconds,
            full_trainings=self.full_trainings,
            perplexity_seeds=self.perplexity_seeds or 1,
            memory_snapshot=self.memory_snapshot,
        )

    @property
    def seconds_for_trials(self) -> float | None:
        """The part of the time budget in which trials begin; None without a budget."""
        if self.time_budget_seconds is None or not self.confirm:
            return self.time_budget_seconds
        return self.time_budget_seconds * (1.0 - self.confirm_share - VARIANTS_SHARE)

    def new_trials(self, device_type: str) -> int:
        """Return the number of trials of a new study, without those of earlier studies.

        A GPU may try the usual number in a part of its time.
        """
        if self.trials:
            return self.trials
        if self.until_converged:
            return MOST_TRIALS_UNTIL_CONVERGED
        if self.ends_by_time or (self.time_budget_seconds is None and device_type == "cuda"):
            return MOST_TRIALS_IN_TIME
        return DEFAULT_TRIALS

    @property
    def ends_by_time(self) -> bool:
        """Whether a time budget is given, and nothing else that ends the search."""
        is_limited = self.time_budget_seconds is not None and math.isfinite(
            self.time_budget_seconds
        )
        return is_limited and not self.trials and not self.until_converged

    def default_time_budget_seconds(self, device_type: str) -> float | None:
        """Return the time budget of a new study; None if the request says when to end."""
        is_specified = self.time_budget_seconds is not None
        if self.trials or is_specified or self.until_converged:
            return None
        return DEFAULT_TIME_BUDGET_SECONDS[device_type]

    def specified_workload(self) -> dict[str, Any]:
        """Return the fields of `Workload` that are specified, with the seed."""
        specified = {name: value for name, value in self.workload.items() if value is not None}
        if self.seed is not None:
            specified["seed"] = self.seed
        return specified


SEARCH_OPTIONS: Mapping[str, Option] = options_of(SearchRequest)
"""The options of a search by the field of `SearchRequest` that each sets."""


def request_of(
    settings: Mapping[str, Any],
    *,
    workload: Mapping[str, Any],
    preferences: Preferences = DEFAULT_PREFERENCES,
) -> SearchRequest:
    """Return the request of the settings that a user gives, by their names in Python.

    Sizes and durations are text or numbers. Names that are no setting of a search are ignored.
    Raises InvalidInput.
    """
    fields = {
        name: option.read(settings[option.keyword])
        for name, option in SEARCH_OPTIONS.items()
        if option.keyword in settings
    }
    return SearchRequest(**fields, workload=workload, preferences=preferences)


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
        hint = "give a larger one with its unit, such as 8GiB"
        if cap_bytes < 1024:  # a number without a unit
            hint = f"give a unit: did you mean {cap_bytes}GiB?"
        raise InvalidInput(
            f"a memory cap of {format_size(cap_bytes)} is too small for any training", hint=hint
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
