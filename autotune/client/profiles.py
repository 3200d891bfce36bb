"""Downloads the files of a profile from a server, which is not trusted: names, sizes, content."""

import json
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from autotune.client.connection import Connection, reading_answer
from autotune.errors import InvalidInput, StorageUnavailable
from autotune.reporting.profile_files import PROFILE_FILE
from autotune.spec.profile import Profile
from autotune.spec.reading import parse
from autotune.units import format_size

_MOST_FILES = 10_000
_LARGEST_PROFILE_BYTES = 2**28
"""Of the numbers as JSON; the trace may be larger."""


def download_profile(connection: Connection, path: str, folder: Path, *, replaces: bool) -> Profile:
    """Write the files of the profile at `path` of a server to a folder, and return the profile.

    With `replaces`, an earlier profile in the folder is replaced. Raises InvalidInput for a folder
    with anything else, and for an answer that is no profile, StorageUnavailable, and
    ServerUnreachable; the folder is then as before.
    """
    _check_folder(folder, replaces=replaces)
    files = _files_of(connection.json("GET", path))
    unfinished = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    try:
        unfinished.mkdir(parents=True)
        _check_room(unfinished, sum(files.values()))
        for name, size_bytes in files.items():
            file = unfinished / name
            file.parent.mkdir(parents=True, exist_ok=True)
            connection.download(f"{path}/{name}", file, size_bytes=size_bytes)
        profile = _profile_in(unfinished)
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)
    except OSError as error:
        raise StorageUnavailable(
            f"the profile cannot be written to {folder}: {error.strerror or error}",
            hint="make room there, or name another folder with --out",
        ) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return profile


def _check_folder(folder: Path, *, replaces: bool) -> None:
    is_profile = replaces and (folder / PROFILE_FILE).is_file()
    if folder.is_dir() and (is_profile or not any(folder.iterdir())):
        return
    if folder.exists():
        raise InvalidInput(
            f"{folder} exists, and is no folder that is empty", hint="name another one with --out"
        )


def _files_of(answer: Any) -> dict[str, int]:
    """Return the sizes of the files of a profile by their names. Raises InvalidInput."""
    with reading_answer():
        files = {_checked_name(one["name"]): one["bytes"] for one in answer["files"]}
        if PROFILE_FILE not in files or len(files) > _MOST_FILES:
            raise ValueError(f"a profile of {len(files)} files")
        for size_bytes in files.values():
            if type(size_bytes) is not int or size_bytes < 0:
                raise ValueError(f"a file of {size_bytes!r} bytes")
        if files[PROFILE_FILE] > _LARGEST_PROFILE_BYTES:
            raise ValueError(f"{PROFILE_FILE} has {format_size(files[PROFILE_FILE])}")
    return files


def _checked_name(name: str) -> str:
    """Return the name of a file. Raises InvalidInput for one that leads out of the folder."""
    parts = name.split("/") if isinstance(name, str) else [""]
    if any(
        part in ("", ".", "..") or not part.isprintable() or any(sign in part for sign in "\\:?#%")
        for part in parts
    ):
        raise InvalidInput(
            f"the server has sent a file named {name!r:.200}, which would lie outside the folder",
            hint="nothing was written; make sure that this is the server that you mean",
        )
    return str(PurePosixPath(*parts))


def _check_room(folder: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise StorageUnavailable(
            f"the profile has {format_size(needed_bytes)}, and {folder.parent} has "
            f"{format_size(free_bytes)} left",
            hint="make room there, or name another folder with --out",
        )


def _profile_in(folder: Path) -> Profile:
    """Return the profile in a folder that was downloaded. Raises InvalidInput."""
    with reading_answer():
        stored: Mapping[str, Any] = json.loads((folder / PROFILE_FILE).read_bytes())
        profile = parse(Profile, stored, ignore_unknown=True)
        if "activations" not in profile.bytes_by_category:
            raise ValueError("a profile without activations")
    return profile
