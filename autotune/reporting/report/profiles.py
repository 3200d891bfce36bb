"""The profiles of a study as links of its report, which lead to their files on this machine."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
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

    @property
    def viewer_address(self) -> str:
        return f"https://{self.opened_by}"


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
    return tuple(
        links_of(
            profile,
            words=view.result.trial(profile.trial).config.describe(),
            address_of=partial(_address, profile, folder),
        )
        for profile in profiles_of(view.result)
    )


def links_of(
    profile: TrialProfile, *, words: str, address_of: Callable[[ProfileFile], str]
) -> ProfileLinks:
    """Return the links to the files of a profile, each to what `address_of` returns."""
    taken = datetime.fromtimestamp(profile.taken_at, tz=UTC)
    steps = "1 step" if profile.steps == 1 else f"{profile.steps} steps"
    return ProfileLinks(
        trial=profile.trial,
        words=words,
        about=f"{steps}, {taken:%Y-%m-%d %H:%M} UTC, {format_size(profile.size_bytes)}",
        files=tuple(_link(file, address_of) for file in profile.main_files),
        code=tuple(_link(file, address_of) for file in profile.code_files),
        code_size=format_size(sum(file.size_bytes for file in profile.code_files)),
    )


def _link(file: ProfileFile, address_of: Callable[[ProfileFile], str]) -> FileLink:
    return FileLink(
        name=file.name,
        address=address_of(file),
        size=format_size(file.size_bytes),
        use=file.use,
        opened_by=file.opened_by,
    )


def _address(profile: TrialProfile, folder: Path, of_profile: ProfileFile) -> str:
    """Return the address of a file for a page in `folder`: relative, so that both can be moved."""
    file = (profile.folder / of_profile.name).absolute()
    try:
        relative = os.path.relpath(file.resolve(), folder.resolve())
    except ValueError:  # another drive
        return file.as_uri()
    return quote(Path(relative).as_posix())
