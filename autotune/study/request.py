"""What a search was asked for, and the study that follows from it: a new one, or the continuation of an old one."""

import dataclasses
import hashlib
import importlib.util
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.analysis.pick import Preferences
from autotune.data.sources import check_there
from autotune.data.validation import check_data
from autotune.errors import InvalidInput
from autotune.execution.local import LocalExecutor
from autotune.execution.server.limits import DEFAULT_TRIAL_SECONDS, time_limits
from autotune.execution.server_tasks import PREPARED
from autotune.spec.config import FIELD_ORDER
from autotune.spec.result import DeviceInfo
from autotune.spec.search_space import SearchSpace, bind_space
from autotune.spec.space_file import load_space
from autotune.spec.study import (
    DEFAULT_SAMPLER,
    DEFAULT_STORAGE,
    SAMPLERS,
    Sampler,
    StudyDefinition,
    check_study_name,
)
from autotune.spec.workload import Workload, make_workload
from autotune.study.events import Listener, Preparing
from autotune.study.predictions import on_some_device
from autotune.study.staging import StagingFolder, sweep
from autotune.study.workers.outbox import OUTBOX_FOLDER
from autotune.study.workers.retry import DEFAULT_DATABASE_WAIT_SECONDS
from autotune.units import LARGEST_SIZE_BYTES

DEFAULT_SPACE = "default"
DEFAULT_TRIALS = 30
MOST_TRIALS_UNTIL_CONVERGED = 200
LEAST_CAP_BYTES = 65536
"""A cap below this is a unit that was forgotten."""
DEFAULT_TIME_LIMIT_SECONDS = DEFAULT_TRIAL_SECONDS
LARGEST_NUMBER_OF_TRIALS = 1_000_000
"""More than any study has, and a number that every database can hold."""
LARGEST_NUMBER_OF_SEEDS = 100
LARGEST_NUMBER_OF_WORKERS = 256


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """What a search was asked for.

    None: not said, so the study's own value, the space's or the device's default.
    """

    name: str | None = None
    storage: str = DEFAULT_STORAGE
    space: str | None = None
    scale: str | None = None
    """One of the space's scales."""
    device: str | None = None
    cap_bytes: int | None = None
    sampler: Sampler | None = None
    seed: int | None = None
    trials: int | None = None
    time_budget_seconds: float | None = None
    until_converged: bool = False
    """Whether the study ends once no trial is expected to make the front better by much
    (`ehvi_sampler.py`)."""
    trial_time_limit_seconds: float = DEFAULT_TIME_LIMIT_SECONDS
    compile_time_limit_seconds: float | None = None
    """For a step in which code is compiled; None is half of the whole trial's."""
    step_time_limit_seconds: float | None = None
    """From one finished step to the next; None is a fifth of the whole trial's."""
    predict: bool = True
    """Whether peak memory is predicted before each trial; what is then surely over the cap is not
    trained."""
    full_trainings: bool = False
    """Whether every trial is trained to the end, also where another of its numerics class was."""
    perplexity_seeds: int = 1
    """Trainings whose mean perplexity a numerics class gets, each of another seed."""
    fresh: bool = False
    """Whether nothing is taken over from earlier studies."""
    workers: int = 1
    """Processes that share the study's trials."""
    trials_per_device: int = 1
    """Trials that may run on one device at the same time, and disturb each other."""
    database_wait_seconds: float = DEFAULT_DATABASE_WAIT_SECONDS
    """How long the search waits for a database that is away."""
    memory_snapshot: bool = False
    """Whether torch's allocation history of the measured steps is kept for every trial; CUDA only.
    """
    workload: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Workload`; None values say nothing."""
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
        if self.trials is not None and not (
            type(self.trials) is int and 1 <= self.trials <= LARGEST_NUMBER_OF_TRIALS
        ):
            raise InvalidInput(
                f"{self.trials!r} trials make no study",
                hint=f"use a whole number from 1 to {LARGEST_NUMBER_OF_TRIALS}",
            )
        if (
            type(self.perplexity_seeds) is not int
            or not 1 <= self.perplexity_seeds <= LARGEST_NUMBER_OF_SEEDS
        ):
            raise InvalidInput(
                f"{self.perplexity_seeds!r} seeds are not possible",
                hint=f"use a whole number from 1 to {LARGEST_NUMBER_OF_SEEDS}",
            )
        if self.perplexity_seeds > 1 and self.workload.get("script") is not None:
            raise InvalidInput(
                f"{self.perplexity_seeds} seeds are not possible with a script, which draws its own weights",
                hint="leave --seeds out, or repeat the study with another --seed",
            )
        for option, count in (
            ("--workers", self.workers),
            ("--trials-per-device", self.trials_per_device),
        ):
            if type(count) is not int or not 1 <= count <= LARGEST_NUMBER_OF_WORKERS:
                raise InvalidInput(
                    f"{option} {count!r} is not possible",
                    hint=f"use a whole number from 1 to {LARGEST_NUMBER_OF_WORKERS}",
                )
        time_limits(
            self.trial_time_limit_seconds,
            compile_seconds=self.compile_time_limit_seconds,
            step_seconds=self.step_time_limit_seconds,
        )
        check_device(self.device)
        check_snapshot(self.memory_snapshot, self.device)
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise InvalidInput(
                f"seed {self.seed} is not possible", hint="use a whole number from 0 to 4294967295"
            )

    @property
    def new_trials(self) -> int:
        """How many trials a new study is to have, those taken over from earlier studies not counted."""
        return self.trials or (
            MOST_TRIALS_UNTIL_CONVERGED if self.until_converged else DEFAULT_TRIALS
        )

    def said_about_workload(self) -> dict[str, Any]:
        said = {name: value for name, value in self.workload.items() if value is not None}
        return said if self.seed is None else {**said, "seed": self.seed}


def check_cap(cap_bytes: object) -> None:
    """Raises InvalidInput unless `cap_bytes` can be the memory of a device."""
    if not _is_size(cap_bytes):
        raise InvalidInput(
            f"a cap of {cap_bytes!r} bytes is not possible", hint="give for example 8GiB"
        )
    assert isinstance(cap_bytes, int)
    if cap_bytes < LEAST_CAP_BYTES:
        raise InvalidInput(
            f"a cap of {cap_bytes} bytes leaves room for no training",
            hint=f"give a unit: did you mean {cap_bytes}GiB?",
        )


def _is_size(size_bytes: object) -> bool:
    return (
        isinstance(size_bytes, int)
        and not isinstance(size_bytes, bool)
        and 1 <= size_bytes < LARGEST_SIZE_BYTES
    )


def check_sampler(sampler: Sampler, *, until_converged: bool) -> None:
    """Raises InvalidInput for one that cannot run here, or cannot say when it has converged."""
    if sampler == "gp" and importlib.util.find_spec("scipy") is None:
        raise InvalidInput(
            "sampler gp needs scipy", hint="pip install 'autotune[gp]', or choose another sampler"
        )
    if until_converged and sampler != "ehvi":
        raise InvalidInput(
            f"sampler {sampler} does not say what it expects of a trial, so it cannot end with --until-converged",
            hint="leave --until-converged out, or begin a study with --sampler ehvi",
        )


def check_device(name: str | None) -> None:
    """Raises InvalidInput unless `name` has the form of a device; whether there is one, a probe finds."""
    if name is not None and not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", name):
        raise InvalidInput(f"{name!r} is not a device", hint="use cpu, cuda or for example cuda:1")


def check_snapshot(is_wanted: bool, device: str | None) -> None:
    """Raises InvalidInput where an allocation history was asked for that `device` does not have; None: not known."""
    if is_wanted and device == "cpu":
        raise InvalidInput(
            f"--memory-snapshot keeps the history of CUDA's allocator, the device is {device}",
            hint="leave it out; autotune predict says who holds the memory on any device",
        )


def check_trials_per_device(trials: int, device: DeviceInfo) -> None:
    """Raises InvalidInput where several trials cannot share `device`, or nothing would be known of their contexts."""
    if trials == 1 or device.type != "cuda":
        return
    if device.compute_mode == "exclusive-process":
        raise InvalidInput(
            f"--trials-per-device {trials} is not possible: {device.device} is in exclusive-process mode",
            hint="leave it out, or end the mode with nvidia-smi -c DEFAULT",
        )
    if device.context_bytes is None:
        raise InvalidInput(
            f"--trials-per-device {trials} is not possible: the size of a CUDA context on {device.device} could not be "
            "measured, and where trials share a device it cannot be measured in them",
            hint="leave it out, or see autotune doctor for the reason",
        )


def space_of(request: SearchRequest) -> SearchSpace:
    """The space asked for, after all that can be checked without a device.

    Raises InvalidInput of every kind.
    """
    space = load_space(DEFAULT_SPACE if request.space is None else request.space).at_scale(
        request.scale
    )
    workload = _workload_somewhere(request, space)
    check_there(workload)
    check_data(workload)
    return space


def _workload_somewhere(request: SearchRequest, space: SearchSpace) -> Workload:
    """The workload on the first kind of device that it is possible on; its dataset is the same on all of them."""
    said = request.said_about_workload()

    def made(device_type: str) -> Workload:
        workload = make_workload(device_type, space.workload, said)
        bind_space(space, workload.circumstances, unavailable={})
        return workload

    return on_some_device(request.device, made)


@dataclass(frozen=True, kw_only=True)
class NewStudy:
    """A study that could begin: its definition, and its prepared files in a folder that waits to be taken."""

    definition: StudyDefinition
    waiting: StagingFolder

    def settle(self, study_folder: Path) -> None:
        """Moves the prepared files to the study's folder; what an earlier study of that name left there goes."""
        for left in study_folder.iterdir() if study_folder.exists() else ():
            if left.name != OUTBOX_FOLDER:  # results that no database took yet
                shutil.rmtree(left, ignore_errors=True)
        study_folder.mkdir(parents=True, exist_ok=True)
        self.waiting.folder.rename(study_folder / PREPARED)

    def discard(self) -> None:
        """Removes the waiting files, if they still wait."""
        self.waiting.close()


def new_definition(
    request: SearchRequest,
    *,
    space: SearchSpace,
    executor: LocalExecutor,
    work: Path,
    listener: Listener,
) -> NewStudy:
    """Probes the device, prepares the workload's files and settles what the study is.

    Raises InvalidInput of every kind.
    """
    sweep(work)
    listener(Preparing(what="finding out what this device can do"))
    device, _ = executor.probe(request.device, {})
    check_snapshot(request.memory_snapshot, device.device)
    check_trials_per_device(request.trials_per_device, device)
    workload = make_workload(device.type, space.workload, request.said_about_workload())
    lacking = executor.examine(workload, space.choices(), device=device.device)
    _, unavailable = executor.probe(
        device.device, space.choices()
    )  # compiles: only where nothing is amiss
    definition = StudyDefinition(
        name=request.name or "",
        workload=workload,
        space=space,
        device=device,
        unavailable={
            technique: lacking.get(technique, {}) | unavailable.get(technique, {})
            for technique in FIELD_ORDER
            if technique in lacking or technique in unavailable
        },
        cap_bytes=device.total_memory_bytes if request.cap_bytes is None else request.cap_bytes,
        seed=workload.seed,
        sampler=request.sampler or DEFAULT_SAMPLER,
    )
    definition.legal_space()  # refuses a space in which nothing works before anything is prepared
    if workload.script is None:
        listener(Preparing(what=f"reading {workload.dataset} and drawing the initial weights"))
    waiting = StagingFolder(work)
    try:
        prepared = executor.prepare(workload, waiting.folder)
    except BaseException:
        waiting.close()
        raise
    workload = dataclasses.replace(
        workload, text_sha256=prepared["text_sha256"], model_sha256=prepared["model_sha256"]
    )
    definition = dataclasses.replace(definition, workload=workload)
    definition = dataclasses.replace(definition, name=request.name or default_name(definition))
    return NewStudy(definition=definition, waiting=waiting)


def default_name(definition: StudyDefinition) -> str:
    """`quick-gpt-48MiB-1f3c5a`: the same search has the same name, another one another."""
    identity = hashlib.sha256(
        json.dumps(definition.identity(), sort_keys=True).encode()
    ).hexdigest()[:6]
    size, unit = definition.cap_bytes, "B"
    for bigger in ("KiB", "MiB", "GiB"):
        if size % 1024 == 0 and size:
            size, unit = size // 1024, bigger
    if definition.cap_bytes == definition.device.total_memory_bytes:
        return f"{definition.space.name}-{definition.workload.model_name}-{definition.device.type}-{identity}"
    return f"{definition.space.name}-{definition.workload.model_name}-{size}{unit}-{identity}"
