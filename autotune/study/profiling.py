"""Runs a stored trial again under torch's profiler, and keeps the profile in the study's folder.

A profile is a run of its own: nothing of it becomes a number of the trial.
"""

import dataclasses
import json
import os
import shutil
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from autotune.analysis.pick import DEFAULT_PREFERENCES, Preferences, chosen_trial
from autotune.errors import (
    AutotuneError,
    InvalidInput,
    Stopped,
    StorageUnavailable,
)
from autotune.execution.cpu_shares import usable_cpus
from autotune.execution.local import LocalExecutor
from autotune.execution.tasks import ProfileTraining
from autotune.reporting.figures import memory_timeline
from autotune.reporting.profile_files import (
    MEMORY_FILE,
    PROFILE_FILE,
    Content,
    is_profile_of,
    profile_folder,
    what_is_profiled,
)
from autotune.spec.device_group import check_one_model
from autotune.spec.profile import MOST_STEPS, Profile
from autotune.spec.reading import parse
from autotune.spec.result import DeviceInfo, StudyResult, TrialRecord
from autotune.spec.setting import FilePath, Settings, TrialNumber, whole_number
from autotune.spec.study import DEFAULT_STORAGE, StudyDefinition
from autotune.storage.identity import work_folder_path
from autotune.storage.store import StudyStore
from autotune.study.opening.resume import check_same_device, check_same_model, prepare_again
from autotune.study.opening.trusted_code import check_trusted
from autotune.study.profilable import check_can_be_profiled
from autotune.study.records import result_of
from autotune.study.request import SearchRequest
from autotune.study.running.devices import parse_devices, sharing_of, threads_of
from autotune.units import different_sizes, format_size

NEEDED_BYTES = 256 * 1024**2
"""Free space that a profile begins with: a few steps take tens of megabytes."""


@dataclass(frozen=True, kw_only=True)
class StoredProfile:
    """A profile, the trial that it is of, and the folder with its files."""

    study: str
    record: TrialRecord
    profile: Profile
    folder: Path


ProfiledSteps = Annotated[int, whole_number(1, MOST_STEPS)]


@dataclass(frozen=True, kw_only=True)
class ProfileRequest(Settings):
    """What to profile. Raises InvalidInput for values that make no sense."""

    study: str
    trial: TrialNumber | None = None
    """None: the study's pick."""
    steps: ProfiledSteps = 3
    out: FilePath | None = None
    """The folder to write to; None: that of the trial in the study's work folder."""
    fresh: bool = False
    """Whether to profile again where there is a profile of as many steps already."""
    storage: str = DEFAULT_STORAGE
    preferences: Preferences = DEFAULT_PREFERENCES
    devices: tuple[str, ...] = ()
    """Names of the devices to use the first of, or as many as a trial has; empty: the study's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out is not None and self.out.exists() and any(self.out.iterdir()):
            raise InvalidInput(
                f"the folder {self.out} is not empty", hint="name another one with --out"
            )


def profile_trial(
    request: ProfileRequest,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    note: Callable[[str], None] = lambda sentence: None,
) -> StoredProfile:
    """Profile a trial of a study that exists, and return its profile.

    Raises UnknownStudy, InvalidInput for a trial that was never trained, StudyMismatch on another
    device than the study's, StorageUnavailable where there is no room, PreparationFailed where the
    training fails, and Stopped.
    """
    with closing(StudyStore(request.storage)) as store:
        definition, _ = store.definition(request.study)
        record = chosen_trial(result_of(store, request.study, request.preferences), request.trial)
        work = work_folder_path(store.database)
        shown_url = store.url
    study_folder = work / definition.name
    check_trusted(
        definition.workload, study=definition.name, storage=shown_url, folder=study_folder
    )
    check_can_be_profiled(record, study=definition.name, workload=definition.workload)
    folder = request.out or profile_folder(study_folder, record.number)
    profiled = what_is_profiled(
        record, workload=definition.workload, device_name=definition.device.name
    )
    stored = None if request.fresh else read_profile(folder, profiled)
    if stored is not None and stored.steps == request.steps:
        note(f"This profile was taken before, and is in {folder}; --fresh takes another")
        return StoredProfile(study=definition.name, record=record, profile=stored, folder=folder)
    _check_room(folder)
    note(f"Profiling trial {record.number} of {definition.name}")
    with LocalExecutor(work, should_stop=should_stop, note=note) as executor:
        device = use_devices(executor, definition, request.devices)
        check_same_model(definition, executor=executor)
        prepare_again(definition, executor=executor, folder=study_folder)
        unfinished = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
        unfinished.mkdir(parents=True)
        try:
            with executor.slot_on(device):
                training = executor.training(
                    dataclasses.replace(definition, device=device),
                    record.config,
                    study_folder=study_folder,
                    enforce_cap=record.is_within_cap,
                )
                task = ProfileTraining(
                    training=training, steps=request.steps, folder=unfinished.absolute()
                )
                profile = executor.run(
                    task,
                    log_name=f"profile-{record.config.fingerprint}",
                    limits=SearchRequest().trial_options.time_limits(),
                )
            files = (*profile.files, MEMORY_FILE, PROFILE_FILE)
            profile = dataclasses.replace(profile, files=files)
            _write(unfinished, profile, definition, record)
            if folder.exists():
                shutil.rmtree(folder)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return StoredProfile(study=definition.name, record=record, profile=profile, folder=folder)


def profile_at_end(
    result: StudyResult,
    request: SearchRequest,
    *,
    should_stop: Callable[[], bool],
    note: Callable[[str], None],
) -> None:
    """Profile what a search is to profile at its end, unless there are profiles of it already.

    A trial that cannot be profiled is noted: the search itself has succeeded. Raises Stopped.
    """
    if request.profile is None or result.pick is None:
        return
    numbers = result.front if request.profile == "front" else (result.pick.number,)
    for number in numbers:
        wanted = ProfileRequest(
            study=result.study,
            trial=number,
            storage=request.storage,
            devices=named_devices(request.devices),
        )
        try:
            profile_trial(wanted, should_stop=should_stop, note=note)
        except Stopped:
            raise
        except AutotuneError as error:
            note(f"trial {number} was not profiled: {error.message}")
    note(f"autotune profile {result.study} TRIAL shows the profiles")


def named_devices(devices: str | None) -> tuple[str, ...]:
    """Returns the names of devices in the text of --devices; none for a number and for all."""
    wanted = None if devices is None else parse_devices(devices)
    return wanted if isinstance(wanted, tuple) else ()


def use_devices(
    executor: LocalExecutor, definition: StudyDefinition, names: tuple[str, ...]
) -> DeviceInfo:
    """Have the executor use the devices of a profile, and return the first of them.

    Raises StudyMismatch for another model of device than the study's, and InvalidInput where a
    trial has more devices than are named.
    """
    if definition.device.type == "cpu":
        _use_cpus_of(executor, definition.device)
    count = definition.workload.devices_per_trial
    first = names[0] if names else definition.device.device
    device, _ = executor.probe(first, {})
    check_same_device(definition, device)
    if names and device.type != "cpu":
        if len(names) < count:
            raise InvalidInput(
                f"a trial of study {definition.name!r} uses {count} devices, and the profile may "
                f"use {', '.join(names)}",
                hint="profile it where it has as many devices",
            )
        others = tuple(executor.identify(name) for name in names[1:count])
        check_one_model((device, *others))
        executor.other_devices = others
    executor.use_devices_from(device, count=count, nodes=definition.workload.nodes_per_trial)
    return device


def _use_cpus_of(executor: LocalExecutor, stored: DeviceInfo) -> None:
    """Have the executor use as many CPUs as a trial of the study had, where each had a share."""
    executor.sharing = sharing_of(stored)
    threads = threads_of(stored)
    if threads is None or not hasattr(os, "sched_getaffinity"):
        return
    if threads_of(executor.identify("cpu")) != threads:
        executor.cpus = usable_cpus()[:threads]


def _check_room(folder: Path) -> None:
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    try:
        free_bytes = shutil.disk_usage(there).free
    except OSError:
        return
    if free_bytes < NEEDED_BYTES:
        needed, free = different_sizes(NEEDED_BYTES, free_bytes)
        raise StorageUnavailable(
            f"a profile needs {needed} of disk space, and {there} has {free} left",
            hint="make room there, or name another folder with --out",
        )


def _write(
    folder: Path, profile: Profile, definition: StudyDefinition, record: TrialRecord
) -> None:
    """Write the profile as JSON, and the picture of its memory. Raises StorageUnavailable."""
    profiled = what_is_profiled(
        record, workload=definition.workload, device_name=definition.device.name
    )
    content = {
        "study": definition.name,
        **profiled,
        **profile.to_dict(),
    }
    figure = memory_timeline.compute_of_step(
        profile.timeline,
        peak_memory_bytes=profile.peak_memory_bytes,
        workspace_bytes=profile.bytes_by_category.get("workspace", 0),
        holders=profile.holders,
        title=f"#{record.number} of {definition.name}: memory over a step",
        about=f"{definition.workload.describe()}; {record.config.describe()}",
        answer=f"The peak of the profiled step is {format_size(profile.peak_memory_bytes)}.",
    )
    try:
        (folder / PROFILE_FILE).write_text(json.dumps(content, indent=1) + "\n")
        (folder / MEMORY_FILE).write_text(memory_timeline.page(figure))
    except OSError as error:
        raise StorageUnavailable(
            f"the profile cannot be written to {folder.parent}: {error.strerror or error}",
            hint="make room there, or name another folder with --out",
        ) from None


def read_profile(folder: Path, profiled: Content) -> Profile | None:
    """Returns the profile in a folder; None where there is none, or one of another release.

    One of another trial than `what_is_profiled` describes does not count either.
    """
    try:
        stored = json.loads((folder / PROFILE_FILE).read_text())
        if not is_profile_of(stored, profiled):
            return None
        return parse(Profile, stored, ignore_unknown=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
