"""The request for a search: every setting with its option, and the checks that need no device."""

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from autotune.analysis.pick import DEFAULT_PREFERENCES, Preferences, check_preferences
from autotune.errors import InvalidInput
from autotune.execution.cluster.address import check_address
from autotune.execution.trial_options import TrialOptions
from autotune.spec.limits import Range
from autotune.spec.result import DeviceInfo
from autotune.spec.setting import (
    EVERYDAY,
    LIMITS,
    RESULTS,
    SIZE,
    THE_DEVICE,
    THE_SEARCH,
    Duration,
    DurationOrNone,
    FilePaths,
    Format,
    Seed,
    Settings,
    number,
    part,
    setting,
    whole_number,
)
from autotune.spec.study import (
    DEFAULT_SAMPLER,
    DEFAULT_STORAGE,
    MOST_TRIALS_IN_TIME,
    Sampler,
    StudyName,
    check_device,
)
from autotune.spec.workload import Workload
from autotune.study.running.devices import MOST_DEVICES, parse_devices
from autotune.units import LARGEST_SIZE_BYTES, format_size, parse_size

DEFAULT_TRIALS = 30
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


def _read_devices(given: Any) -> Any:
    """Take what Python gives, a number or a list of names, as the text of the option."""
    if isinstance(given, list | tuple):
        return ",".join(map(str, given))
    return str(given) if type(given) is int else given


@dataclass(frozen=True, kw_only=True)
class _FormatOfCaps(Format):
    def hint(self, value: object) -> str:
        """Returns what to give instead: the unit that was most likely forgotten."""
        size = parse_size(value) if isinstance(value, str) else value
        if type(size) is int and 1 <= size < 1024:
            return f"give a unit: did you mean {size}GiB?"
        return super().hint(value)


Cap = Annotated[
    int,
    _FormatOfCaps(
        wanted=f"a size from {format_size(LEAST_CAP_BYTES)} up with its unit, such as 8GiB",
        metavar="SIZE",
        read=SIZE.read,
        write=SIZE.write,
        range=Range(LEAST_CAP_BYTES, LARGEST_SIZE_BYTES - 1),
        other_type="string",
    ),
]
"""The memory that a trial may need, in bytes."""
ConfirmShare = Annotated[
    float,
    number(
        f"a number from 0 to {LARGEST_CONFIRM_SHARE}; a search with --no-confirm measures nothing "
        "again",
        least=0.0,
        most=LARGEST_CONFIRM_SHARE,
    ),
]
NumberOfDevices = Annotated[int, whole_number(1, MOST_DEVICES)]
DeviceList = Annotated[
    str,
    Format(
        wanted="all, a number, or names such as cuda:0,cuda:1",
        read=_read_devices,
        other_type="integer",
    ),
]


@dataclass(frozen=True, kw_only=True)
class SearchRequest(Settings):
    """All settings of a search. None: the value of the stored study, the space or the device.

    Raises InvalidInput for a value that is invalid on any device.
    """

    max_mem: Cap | None = setting(
        None,
        "Memory cap: 8GiB, 8GB, 8192MiB. [default: all memory of the device]",
        group=EVERYDAY,
        is_repeated=False,
        over_http=True,
    )
    """In bytes."""
    space: str | None = setting(
        None,
        "Search space: default, quick, peak_memory, peak_memory_search or a .toml file.",
        group=EVERYDAY,
        metavar="NAME|FILE",
        is_repeated=False,
        over_http=True,
    )
    scale: str | None = setting(
        None,
        "Which of the search space's workload sizes to use.",
        group=THE_SEARCH,
        metavar="NAME",
        is_repeated=False,
        over_http=True,
    )
    name: StudyName | None = setting(
        None,
        "Name of the study. An existing study is continued.",
        group=EVERYDAY,
        metavar="STUDY",
        over_http=True,
    )
    storage: str = setting(
        DEFAULT_STORAGE,
        "URL of the studies database.",
        group=RESULTS,
        metavar="URL",
        over_http="the server has its own database",
    )
    device: str | None = setting(
        None,
        "Device: cpu, cuda or cuda:1. [default: a GPU if there is one]",
        group=EVERYDAY,
        metavar="DEVICE",
        choices=("cpu", "cuda"),
        is_repeated=False,
        over_http="the server decides where trials run",
    )
    trials: Annotated[int, whole_number(1, LARGEST_NUMBER_OF_TRIALS)] | None = setting(
        None,
        "Number of different configurations to try; as many as the time allows on a GPU "
        f"or with a time budget alone. [default: {DEFAULT_TRIALS}]",
        group=EVERYDAY,
        over_http=True,
    )
    time_budget: DurationOrNone | None = setting(
        None,
        "Time from the command to its end, with set-up and measuring the finalists again: "
        "30m, 2h, or none for no limit. [default: 10m on a CPU and 30m on a GPU, without "
        "--trials and --until-converged]",
        group=EVERYDAY,
        is_repeated=False,
        over_http=True,
    )
    """In seconds, infinite for no limit."""
    from_file: FilePaths | None = setting(
        None,
        "A trainer's file whose training is the baseline: of axolotl, TRL, LLaMA-Factory, "
        "torchtitan, Lightning or transformers; given again: accelerate's own file beside it. "
        "Other options override what they say.",
        group=EVERYDAY,
        flag="--from",
        metavar="FILE",
        is_repeated=False,
        over_http="a client sends the settings that the file stands for",
    )
    until_converged: bool = setting(
        False,
        "Stop when no remaining trial is expected to improve the front by much.",
        group=THE_SEARCH,
        over_http=True,
    )
    """`ehvi_sampler.py` estimates the improvement."""
    trial_time_limit: Duration = setting(
        600.0, "Stop a trial after this time.", group=LIMITS, over_http=True
    )
    """In seconds, like the next two."""
    compile_time_limit: Duration | None = setting(
        None,
        "Stop a trial if one compiling step takes longer than this. "
        "[default: half of --trial-time-limit]",
        group=LIMITS,
        over_http=True,
    )
    step_time_limit: Duration | None = setting(
        None,
        "Stop a trial if one step takes longer than this. [default: a fifth of --trial-time-limit]",
        group=LIMITS,
        over_http=True,
    )
    """Limit from one finished step to the next."""
    sampler: Sampler | None = setting(
        None,
        f"How the next configuration is chosen. [default: {DEFAULT_SAMPLER}]",
        group=THE_SEARCH,
        is_repeated=False,
        over_http=True,
    )
    seed: Seed | None = setting(
        None,
        "Random seed for weights, data order and sampler. [default: 0]",
        group=THE_SEARCH,
        is_repeated=False,
        over_http=True,
    )
    predict: bool = setting(
        True,
        "Train configurations even if their predicted memory is over the cap.",
        group=THE_SEARCH,
        over_http=True,
    )
    """Whether peak memory is predicted before each trial; a configuration that is then surely over
    the cap is not trained."""
    full_trainings: bool = setting(
        False,
        "Train every trial to the end. By default, trials with the same numerics share "
        "one full training.",
        group=THE_SEARCH,
        over_http=True,
    )
    perplexity_seeds: Annotated[int, whole_number(1, LARGEST_NUMBER_OF_SEEDS)] | None = setting(
        None,
        "Number of trainings per measured perplexity, each with another seed. It is added "
        "to the seeds that a --script sets. A study that is continued keeps its number. "
        "[default: 1]",
        group=THE_SEARCH,
        flag="--seeds",
        metavar="N",
        over_http=True,
    )
    confirm: bool = setting(
        True,
        "Do not measure the finalists again after the trials. Speeds are then those of "
        "one measurement each, of which the fastest is often the luckiest.",
        group=THE_SEARCH,
        over_http=True,
    )
    confirm_share: ConfirmShare = setting(
        0.2,
        "Largest share of the search's time for measuring the finalists again.",
        group=LIMITS,
        metavar="SHARE",
        over_http=True,
    )
    """Up to VARIANTS_SHARE more goes to the pick without each of its techniques."""
    fresh: bool = setting(
        False,
        "Measure everything again instead of reusing results of earlier studies.",
        group=THE_SEARCH,
        is_repeated=False,
        over_http=True,
    )
    devices: DeviceList | None = setting(
        None,
        "Run a trial on each of several devices at once: all GPUs, a number of them, or "
        "names such as cuda:0,cuda:1. On a CPU a number of slots, each with its share of the "
        "cores. With --devices-per-trial, a trial on each group of them. [default: one trial]",
        group=THE_DEVICE,
        metavar="all|N|LIST",
        choices=("all",),
        over_http=True,
    )
    workers: NumberOfDevices | None = setting(
        None,
        "Another name of --devices N.",
        group=THE_DEVICE,
        metavar="N",
        is_repeated=False,  # the number is in `devices`
        over_http="give devices, a number",
    )
    ray: str | None = setting(
        None,
        "Run the trials on a Ray cluster: the one of this machine, a new one on this "
        "machine, or one at an address such as ray://host:10001.",
        group=THE_DEVICE,
        metavar="auto|local|ADDRESS",
        choices=("auto", "local"),
        over_http="the server decides where trials run",
    )
    trials_per_device: NumberOfDevices = setting(
        1,
        "Number of trials that run at once on each device. More than one makes their "
        "speeds less reliable; finalists are measured again one run at a time.",
        group=THE_DEVICE,
        metavar="N",
        over_http=True,
    )
    database_wait: Duration = setting(
        300.0,
        "How long to wait for an unreachable database before giving up. "
        "No result is lost while waiting.",
        group=LIMITS,
        over_http="the server decides how long it waits",
    )
    """In seconds."""
    memory_snapshot: bool = setting(
        False,
        "Record torch's allocation history in each trial (CUDA only).",
        group=THE_DEVICE,
        over_http="a submission cannot have files written on the server; run the search there",
    )
    profile: Literal["pick", "front"] | None = setting(
        None,
        "Profile the pick, or every trial of the front, at the end: see autotune profile.",
        group=RESULTS,
        is_repeated=False,
        over_http=True,
    )
    workload: Mapping[str, Any] = part(Workload, default_factory=dict)
    """Fields of `Workload` that are specified."""
    preferences: Preferences = part(Preferences, default=DEFAULT_PREFERENCES)

    def __post_init__(self) -> None:
        if not isinstance(self.preferences, Mapping):
            check_preferences(self.preferences)
        super().__post_init__()
        check_sampler(self.sampler or DEFAULT_SAMPLER, until_converged=self.until_converged)
        if self.workers is not None:
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
            trial_time_limit_seconds=self.trial_time_limit,
            compile_time_limit_seconds=self.compile_time_limit,
            step_time_limit_seconds=self.step_time_limit,
            full_trainings=self.full_trainings,
            perplexity_seeds=self.perplexity_seeds or 1,
            memory_snapshot=self.memory_snapshot,
        )

    @property
    def seconds_for_trials(self) -> float | None:
        """The part of the time budget in which trials begin; None without a budget."""
        if self.time_budget is None or not self.confirm:
            return self.time_budget
        return self.time_budget * (1.0 - self.confirm_share - VARIANTS_SHARE)

    def new_trials(self, device_type: str) -> int:
        """Returns the number of trials of a new study, without those of earlier studies.

        A GPU may try the usual number in a part of its time.
        """
        if self.trials:
            return self.trials
        if self.until_converged:
            return MOST_TRIALS_UNTIL_CONVERGED
        if self.ends_by_time or (self.time_budget is None and device_type == "cuda"):
            return MOST_TRIALS_IN_TIME
        return DEFAULT_TRIALS

    @property
    def ends_by_time(self) -> bool:
        """Whether a time budget is given, and nothing else that ends the search."""
        is_limited = self.time_budget is not None and math.isfinite(self.time_budget)
        return is_limited and not self.trials and not self.until_converged

    def default_time_budget_seconds(self, device_type: str) -> float | None:
        """Returns the time budget of a new study; None if the request says when to end."""
        is_specified = self.time_budget is not None
        if self.trials or is_specified or self.until_converged:
            return None
        return DEFAULT_TIME_BUDGET_SECONDS[device_type]

    def specified_workload(self) -> dict[str, Any]:
        """Returns the fields of `Workload` that are specified, with the seed."""
        return {**self.workload, **({} if self.seed is None else {"seed": self.seed})}


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
