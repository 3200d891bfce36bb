"""What a search was asked for, and the study that follows from it: a new one, or the continuation of an old one."""

import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.config import FIELD_ORDER
from autotune.data.sources import check_name, check_there
from autotune.definition import (
    DEFAULT_SAMPLER,
    DEFAULT_STORAGE,
    RESULTS_FOLDER,
    SAMPLERS,
    Sampler,
    StudyDefinition,
    check_study_name,
)
from autotune.errors import InvalidInput, StorageUnavailable
from autotune.executors.local import PREPARED, LocalExecutor
from autotune.quantities import LARGEST_SIZE_BYTES
from autotune.recommendation.pick import Preferences
from autotune.result import DeviceInfo
from autotune.search_space import SearchSpace
from autotune.space_file import load_space
from autotune.storage.database import sqlite_file
from autotune.study.events import Listener, Preparing
from autotune.workload import DEFAULTS_BY_DEVICE, Workload, make_workload

DEFAULT_SPACE = "default"
DEFAULT_TRIALS = 30
MOST_TRIALS_UNTIL_CONVERGED = 200
LEAST_CAP_BYTES = 65536
"""A cap below this is a unit that was forgotten."""
DEFAULT_TIME_LIMIT_SECONDS = 600.0
LARGEST_NUMBER_OF_SEEDS = 100


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """What a search was asked for. None: not said, so the study's own value, the space's or the device's default."""

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
    """Whether the study ends once no trial is expected to make the front better by much (`ranking.py`)."""
    trial_time_limit_seconds: float = DEFAULT_TIME_LIMIT_SECONDS
    predict: bool = True
    """Whether peak memory is predicted before each trial; what is then surely over the cap is not trained."""
    full_trainings: bool = False
    """Whether every trial is trained to the end, also where another of its numerics class was."""
    perplexity_seeds: int = 1
    """Trainings whose mean perplexity a numerics class gets, each of another seed."""
    fresh: bool = False
    """Whether nothing is taken over from earlier studies."""
    memory_snapshot: bool = False
    """Whether torch's allocation history of the measured steps is kept for every trial; CUDA only."""
    workload: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Workload`; None values say nothing."""
    preferences: Preferences = field(default_factory=Preferences)

    def __post_init__(self) -> None:
        if self.name is not None:
            check_study_name(self.name)
        if self.sampler is not None and self.sampler not in SAMPLERS:
            raise InvalidInput(f"there is no sampler {self.sampler!r}", hint=f"use one of {', '.join(SAMPLERS)}")
        check_sampler(self.sampler or DEFAULT_SAMPLER, until_converged=self.until_converged)
        if self.cap_bytes is not None:
            check_cap(self.cap_bytes)
        if self.trials is not None and (type(self.trials) is not int or self.trials < 1):
            raise InvalidInput(f"{self.trials!r} trials make no study", hint="use a whole number from 1 up")
        if type(self.perplexity_seeds) is not int or not 1 <= self.perplexity_seeds <= LARGEST_NUMBER_OF_SEEDS:
            raise InvalidInput(
                f"{self.perplexity_seeds!r} seeds are not possible",
                hint=f"use a whole number from 1 to {LARGEST_NUMBER_OF_SEEDS}",
            )
        if self.perplexity_seeds > 1 and self.workload.get("script") is not None:
            raise InvalidInput(
                f"{self.perplexity_seeds} seeds are not possible with a script, which draws its own weights",
                hint="leave --seeds out, or repeat the study with another --seed",
            )
        check_device(self.device)
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise InvalidInput(f"seed {self.seed} is not possible", hint="use a whole number from 0 to 4294967295")

    @property
    def new_trials(self) -> int:
        """How many trials a new study is to have, those taken over from earlier studies not counted."""
        return self.trials or (MOST_TRIALS_UNTIL_CONVERGED if self.until_converged else DEFAULT_TRIALS)

    def said_about_workload(self) -> dict[str, Any]:
        said = {name: value for name, value in self.workload.items() if value is not None}
        return said if self.seed is None else {**said, "seed": self.seed}


def check_cap(cap_bytes: object) -> None:
    """Raises InvalidInput unless `cap_bytes` can be the memory of a device."""
    if not _is_size(cap_bytes):
        raise InvalidInput(f"a cap of {cap_bytes!r} bytes is not possible", hint="give for example 8GiB")
    assert isinstance(cap_bytes, int)
    if cap_bytes < LEAST_CAP_BYTES:
        raise InvalidInput(
            f"a cap of {cap_bytes} bytes leaves room for no training",
            hint=f"give a unit: did you mean {cap_bytes}GiB?",
        )


def _is_size(size_bytes: object) -> bool:
    return isinstance(size_bytes, int) and not isinstance(size_bytes, bool) and 1 <= size_bytes < LARGEST_SIZE_BYTES


def check_sampler(sampler: Sampler, *, until_converged: bool) -> None:
    """Raises InvalidInput for one that cannot run here, or cannot say when it has converged."""
    if sampler == "gp" and importlib.util.find_spec("scipy") is None:
        raise InvalidInput("sampler gp needs scipy", hint="pip install 'autotune[gp]', or choose another sampler")
    if until_converged and sampler != "ehvi":
        raise InvalidInput(
            f"sampler {sampler} does not say what it expects of a trial, so it cannot end with --until-converged",
            hint="leave --until-converged out, or begin a study with --sampler ehvi",
        )


def check_device(name: str | None) -> None:
    """Raises InvalidInput unless `name` has the form of a device; whether there is one, a probe finds."""
    if name is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise InvalidInput(f"{name!r} is not a device", hint="use cpu, cuda or for example cuda:1")


def check_snapshot(request: SearchRequest, device: DeviceInfo) -> None:
    """Raises InvalidInput where an allocation history was asked for that `device` does not have."""
    if request.memory_snapshot and device.type != "cuda":
        raise InvalidInput(
            f"--memory-snapshot keeps the history of CUDA's allocator, the device is {device.device}",
            hint="leave it out; autotune predict says who holds the memory on any device",
        )


def work_folder(storage: str) -> Path:
    """Where logs, prepared files and compiler caches go: beside a SQLite database, else in `studies/`."""
    file = sqlite_file(storage)
    # One folder a database: studies of one name in two databases are two studies.
    own = hashlib.sha256(storage.encode()).hexdigest()[:12] if file is None else file.stem
    folder = (RESULTS_FOLDER if file is None else file.parent) / "work" / own
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{uuid.uuid4().hex}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StorageUnavailable(
            f"results cannot be written to {folder}: {error.strerror or error}",
            hint="run from a folder that can be written to, or name a database elsewhere with --storage",
        ) from None
    return folder


def space_of(request: SearchRequest) -> SearchSpace:
    """The space asked for, after all that can be checked without a device. Raises InvalidInput of every kind."""
    space = load_space(request.space or DEFAULT_SPACE).at_scale(request.scale)
    check_name(_workload_somewhere(request, space).dataset)
    return space


def _workload_somewhere(request: SearchRequest, space: SearchSpace) -> Workload:
    """The workload on the first kind of device that it can be made for: which there is, is not known yet.

    Raises InvalidInput where there is none. Its dataset is the same on all of them.
    """
    refusals = []
    for device_type in [request.device.partition(":")[0]] if request.device else DEFAULTS_BY_DEVICE:
        try:
            return make_workload(device_type, space.workload, request.said_about_workload())
        except InvalidInput as error:
            refusals.append(error)
    raise refusals[0]


@dataclass(frozen=True, kw_only=True)
class NewStudy:
    """A study that could begin: its definition, and its prepared files in a folder that waits to be taken."""

    definition: StudyDefinition
    waiting: Path

    def settle(self, study_folder: Path) -> None:
        """Moves the prepared files to the study's folder; what an earlier study of that name left there goes."""
        shutil.rmtree(study_folder, ignore_errors=True)
        study_folder.mkdir(parents=True)
        self.waiting.rename(study_folder / PREPARED)

    def discard(self) -> None:
        """Removes the waiting files, if they still wait."""
        shutil.rmtree(self.waiting, ignore_errors=True)


def new_definition(
    request: SearchRequest, *, space: SearchSpace, executor: LocalExecutor, work: Path, listener: Listener
) -> NewStudy:
    """Probes the device, prepares the workload's files and settles what the study is.

    Raises InvalidInput of every kind.
    """
    _sweep(work)
    check_there(_workload_somewhere(request, space))
    listener(Preparing(what="finding out what this device can do"))
    device, unavailable = executor.probe(request.device, space.choices())
    check_snapshot(request, device)
    workload = make_workload(device.type, space.workload, request.said_about_workload())
    lacking = executor.examine(workload, space.choices(), device=device.device)
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
    waiting = work / f"{WAITING}{os.getpid()}-{uuid.uuid4().hex}"
    prepared = executor.prepare(workload, waiting)
    workload = dataclasses.replace(workload, text_sha256=prepared["text_sha256"], model_sha256=prepared["model_sha256"])
    definition = dataclasses.replace(definition, workload=workload)
    definition = dataclasses.replace(definition, name=request.name or default_name(definition))
    return NewStudy(definition=definition, waiting=waiting)


WAITING = "waiting-"


def _sweep(work: Path) -> None:
    """Removes prepared files that a killed search left waiting."""
    for folder in work.glob(f"{WAITING}*"):
        owner = folder.name.removeprefix(WAITING).partition("-")[0]
        if not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def default_name(definition: StudyDefinition) -> str:
    """`quick-gpt-48MiB-1f3c5a`: the same search has the same name, another one another."""
    identity = hashlib.sha256(json.dumps(definition.identity(), sort_keys=True).encode()).hexdigest()[:6]
    size, unit = definition.cap_bytes, "B"
    for bigger in ("KiB", "MiB", "GiB"):
        if size % 1024 == 0 and size:
            size, unit = size // 1024, bigger
    if definition.cap_bytes == definition.device.total_memory_bytes:
        return f"{definition.space.name}-{definition.workload.model_name}-{definition.device.type}-{identity}"
    return f"{definition.space.name}-{definition.workload.model_name}-{size}{unit}-{identity}"
