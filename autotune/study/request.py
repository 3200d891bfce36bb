"""The request for a search: its validation, and the definition of a new study made from it."""

import dataclasses
import hashlib
import importlib.util
import json
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
    check_device,
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
        time_limits(
            self.trial_time_limit_seconds,
            compile_seconds=self.compile_time_limit_seconds,
            step_seconds=self.step_time_limit_seconds,
        )
        check_device(self.device)
        check_snapshot(self.memory_snapshot, self.device)
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise InvalidInput(
                f"invalid seed: {self.seed}", hint="use a whole number from 0 to 4294967295"
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


def space_of(request: SearchRequest) -> SearchSpace:
    """Return the request's search space, after all checks that need no device.

    Raises InvalidInput for any invalid part of the request.
    """
    space = load_space(DEFAULT_SPACE if request.space is None else request.space)
    space = space.at_scale(request.scale)
    workload = _workload_on_some_device(request, space)
    check_there(workload)
    check_data(workload)
    return space


def _workload_on_some_device(request: SearchRequest, space: SearchSpace) -> Workload:
    """Return the workload on the first kind of device where it is valid.

    Its dataset is the same on all of them.
    """
    specified = request.specified_workload()

    def make(device_type: str) -> Workload:
        workload = make_workload(device_type, space.workload, specified)
        bind_space(space, workload.circumstances, unavailable={})
        return workload

    return on_some_device(request.device, make)


@dataclass(frozen=True, kw_only=True)
class NewStudy:
    """A study that could begin: its definition, and its prepared files in a staging directory."""

    definition: StudyDefinition
    staging: StagingFolder

    def settle(self, study_folder: Path) -> None:
        """Move the prepared files to the study's folder, and remove an earlier study's files there.

        The outbox stays: it holds results that are not in the database yet.
        """
        study_folder.mkdir(parents=True, exist_ok=True)
        for left in study_folder.iterdir():
            if left.name != OUTBOX_FOLDER:
                shutil.rmtree(left, ignore_errors=True)
        self.staging.folder.rename(study_folder / PREPARED)

    def discard(self) -> None:
        """Remove the prepared files if they are still in the staging directory."""
        self.staging.close()


def new_definition(
    request: SearchRequest,
    *,
    space: SearchSpace,
    executor: LocalExecutor,
    work: Path,
    listener: Listener,
) -> NewStudy:
    """Probe the device, prepare the workload's files and return the new study's definition.

    Raises InvalidInput for any part of the request that is invalid on this device.
    """
    sweep(work)
    listener(Preparing(what="finding out what this device can do"))
    device, _ = executor.probe(request.device, {})
    check_snapshot(request.memory_snapshot, device.device)
    check_trials_per_device(request.trials_per_device, device)
    workload = make_workload(device.type, space.workload, request.specified_workload())
    lacking = executor.examine(workload, space.choices(), device=device.device)
    # This probe compiles programs, so it runs only after the cheap checks.
    _, not_on_device = executor.probe(device.device, space.choices())
    unavailable = {}
    for technique in FIELD_ORDER:
        if technique in lacking or technique in not_on_device:
            unavailable[technique] = lacking.get(technique, {}) | not_on_device.get(technique, {})
    definition = StudyDefinition(
        name=request.name or "",
        workload=workload,
        space=space,
        device=device,
        unavailable=unavailable,
        cap_bytes=device.total_memory_bytes if request.cap_bytes is None else request.cap_bytes,
        seed=workload.seed,
        sampler=request.sampler or DEFAULT_SAMPLER,
    )
    # Rejects a space in which nothing works, before anything is prepared.
    definition.legal_space()
    if workload.script is None:
        listener(Preparing(what=f"reading {workload.dataset} and drawing the initial weights"))
    staging = StagingFolder(work)
    try:
        prepared = executor.prepare(workload, staging.folder)
    except BaseException:
        staging.close()
        raise
    workload = dataclasses.replace(
        workload, text_sha256=prepared["text_sha256"], model_sha256=prepared["model_sha256"]
    )
    definition = dataclasses.replace(definition, workload=workload)
    definition = dataclasses.replace(definition, name=request.name or default_name(definition))
    return NewStudy(definition=definition, staging=staging)


def default_name(definition: StudyDefinition) -> str:
    """Return a name such as `quick-gpt-48MiB-1f3c5a`, which depends on the definition alone."""
    identity = json.dumps(definition.identity(), sort_keys=True).encode()
    digest = hashlib.sha256(identity).hexdigest()[:6]
    size, unit = definition.cap_bytes, "B"
    for larger_unit in ("KiB", "MiB", "GiB"):
        if size % 1024 == 0 and size:
            size, unit = size // 1024, larger_unit
    cap = f"{size}{unit}"
    if definition.cap_bytes == definition.device.total_memory_bytes:
        cap = definition.device.type
    return f"{definition.space.name}-{definition.workload.model_name}-{cap}-{digest}"
