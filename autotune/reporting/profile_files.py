"""Lists the files of a study's profiles: what each is, and what opens it.

A profile is a folder of the study's work folder, `profiles/trial-7`, which `autotune profile`
writes. One of a study that had this name before, or of another configuration, is none of the study.
"""

import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from autotune.spec.result import StudyResult, TrialRecord
from autotune.spec.workload import Workload

PROFILES = "profiles"
"""Folder of a study's profiles in its work folder."""
PROFILE_FILE = "profile.json"
MEMORY_FILE = "memory.html"
TRACE_FILE = "trace.json.gz"
SNAPSHOT_FILE = "snapshot.pickle"

Content: TypeAlias = Mapping[str, Any]
"""The content of a JSON file."""

FILE_USES: Mapping[str, tuple[str, str]] = {
    TRACE_FILE: ("every operator over time", "ui.perfetto.dev"),
    SNAPSHOT_FILE: ("every allocation of a step", "pytorch.org/memory_viz"),
    MEMORY_FILE: ("memory over a step by kind, without a viewer", ""),
    PROFILE_FILE: ("all numbers of the profile, and more operators", ""),
}
"""Of a file what it shows, and the page that opens it; empty where a browser does."""
CODE_USE = "the code that inductor generated"
_RANK = "rank-"


@dataclass(frozen=True, kw_only=True)
class ProfileFile:
    """A file of a profile."""

    name: str
    """Relative to the folder of the profile, with slashes."""
    size_bytes: int
    use: str
    """What it shows."""
    opened_by: str
    """The page that opens it; empty where a browser does."""
    is_code: bool = False
    """Whether inductor has generated it, mostly one of many."""


@dataclass(frozen=True, kw_only=True)
class TrialProfile:
    """A profile of a trial, as files."""

    trial: int
    folder: Path
    steps: int
    taken_at: float
    """Seconds since 1970."""
    files: tuple[ProfileFile, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def main_files(self) -> tuple[ProfileFile, ...]:
        """All but generated code."""
        return tuple(file for file in self.files if not file.is_code)

    def file(self, name: str) -> Path | None:
        """Returns the path of the file of that name; None for a name that is not listed."""
        if all(file.name != name for file in self.files):
            return None
        return self.folder / name


def profile_folder(study_folder: Path, trial: int) -> Path:
    """Returns where the profile of a trial is, in the work folder of its study."""
    return study_folder / PROFILES / f"trial-{trial}"


def what_is_profiled(record: TrialRecord, *, workload: Workload, device_name: str) -> Content:
    """Returns what a profile says of its trial, as JSON: another trial differs in it."""
    return {
        "trial": record.number,
        "config": record.config.to_dict(),
        "device_name": device_name,
        "workload": workload.to_dict(),
    }


def is_profile_of(stored: Content, profiled: Content) -> bool:
    """Returns whether a stored profile is of the trial that `what_is_profiled` describes."""
    of_stored = {name: stored.get(name) for name in profiled}
    return json.dumps(of_stored, sort_keys=True) == json.dumps(profiled, sort_keys=True)


def profiles_of(result: StudyResult) -> tuple[TrialProfile, ...]:
    """Returns the profiles of a study's trials that are on this machine, by their numbers."""
    if result.folder is None:
        return ()
    try:
        names = set(os.listdir(result.folder / PROFILES))
    except OSError:
        return ()
    found = [
        _profile_of(result, result.folder, record)
        for record in result.trials
        if f"trial-{record.number}" in names
    ]
    return tuple(profile for profile in found if profile is not None)


def profile_of(result: StudyResult, trial: int) -> TrialProfile | None:
    """Returns the profile of a trial; None where there is none on this machine.

    Raises InvalidInput if the study has no such trial.
    """
    record = result.trial(trial)
    return None if result.folder is None else _profile_of(result, result.folder, record)


def _profile_of(result: StudyResult, folder: Path, record: TrialRecord) -> TrialProfile | None:
    profiled = what_is_profiled(record, workload=result.workload, device_name=result.device.name)
    return _read(profile_folder(folder, record.number), profiled)


def _read(folder: Path, profiled: Content) -> TrialProfile | None:
    try:
        if folder.is_symlink() or folder.parent.is_symlink():
            return None
        file = folder / PROFILE_FILE
        stored = json.loads(file.read_text())
        if not isinstance(stored, dict) or not is_profile_of(stored, profiled):
            return None
        steps = stored.get("steps")
        if type(steps) is not int:
            return None
        return TrialProfile(
            trial=profiled["trial"],
            folder=folder,
            steps=steps,
            taken_at=file.stat().st_mtime,
            files=tuple(sorted(_files(folder), key=_order)),
        )
    except (OSError, ValueError, RecursionError):
        return None


def _files(folder: Path) -> Iterator[ProfileFile]:
    """Yield the files of a profile; links, which a profile has none of, are left out."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                continue
            relative = path.relative_to(folder)
            is_code = path.suffix == ".py" and path.parent.name == "code"
            use, opened_by = FILE_USES.get(name, (CODE_USE if is_code else "", ""))
            rank = relative.parts[0]
            if rank.startswith(_RANK):
                use = f"{use}, of rank {rank.removeprefix(_RANK)}"
            yield ProfileFile(
                name=relative.as_posix(),
                size_bytes=status.st_size,
                use=use,
                opened_by=opened_by,
                is_code=is_code,
            )


def _order(file: ProfileFile) -> tuple[int, int, str]:
    """Sort by what most people open first, generated code last."""
    name = file.name.rpartition("/")[2]
    order = [MEMORY_FILE, TRACE_FILE, SNAPSHOT_FILE, PROFILE_FILE]
    place = order.index(name) if name in order else len(order)
    return place, len(file.name), file.name
