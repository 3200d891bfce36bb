"""The profiles of a study as links of its report, which lead to their files on this machine."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from autotune.reporting.profile_files import ProfileFile, TrialProfile, profiles_of
from autotune.reporting.study_view import StudyView
from autotune.units import format_size


@dataclass(frozen=True, kw_only=True)
class FileLink:
    """A link to a file of a profile."""

    name: str
    address: str
    size: str
    use: str
    opened_by: str
    """The page that opens it; empty where a browser does."""


@dataclass(frozen=True, kw_only=True)
class ProfileLinks:
    """The files of the profile of one trial."""

    trial: int
    words: str
    """The configuration of the trial."""
    about: str
    """How many steps were profiled, when, and the size of all files."""
    files: tuple[FileLink, ...]
    code: tuple[FileLink, ...]
    """Generated code, a file for each graph."""
    code_size: str


def profile_links(view: StudyView, *, page: Path | None) -> tuple[ProfileLinks, ...]:
    """Return the profiles of a study for a report that is written to `page`.

    Without a page there are none: a report that a server sends is read on another machine.
    """
    if page is None:
        return ()
    folder = page.absolute().parent
    return tuple(_links(view, profile, folder) for profile in profiles_of(view.result))


def _links(view: StudyView, profile: TrialProfile, folder: Path) -> ProfileLinks:
    taken = datetime.fromtimestamp(profile.taken_at, tz=UTC)
    steps = "1 step" if profile.steps == 1 else f"{profile.steps} steps"
    return ProfileLinks(
        trial=profile.trial,
        words=view.result.trial(profile.trial).config.describe(),
        about=f"{steps}, {taken:%Y-%m-%d %H:%M} UTC, {format_size(profile.size_bytes)}",
        files=_file_links(profile, profile.main_files, folder),
        code=_file_links(profile, profile.code_files, folder),
        code_size=format_size(sum(file.size_bytes for file in profile.code_files)),
    )


def _file_links(
    profile: TrialProfile, files: Sequence[ProfileFile], folder: Path
) -> tuple[FileLink, ...]:
    return tuple(
        FileLink(
            name=file.name,
            address=_address(profile.folder / file.name, folder),
            size=format_size(file.size_bytes),
            use=file.use,
            opened_by=file.opened_by,
        )
        for file in files
    )


def _address(file: Path, folder: Path) -> str:
    """Return the address of a file for a page in `folder`: relative, so that both can be moved."""
    file = file.absolute()
    try:
        relative = os.path.relpath(file.resolve(), folder.resolve())
    except ValueError:  # another drive
        return file.as_uri()
    return quote(Path(relative).as_posix())
