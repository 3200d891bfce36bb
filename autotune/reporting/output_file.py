"""Files that a user names for a figure or a report."""

import os
import stat
from pathlib import Path

from autotune.errors import StorageUnavailable


def check_writable(file: Path, *, option: str = "--out") -> None:
    """Raise StorageUnavailable if `file` clearly cannot be written, before any work is done."""
    reason = ""
    try:
        mode = os.stat(file).st_mode
        if stat.S_ISDIR(mode):
            reason = "Is a directory"
        elif stat.S_ISFIFO(mode):
            reason = "Is a pipe"  # writing would wait for a reader
    except (FileNotFoundError, NotADirectoryError):
        nearest = next(folder for folder in file.parents if folder.exists())
        if not nearest.is_dir():
            reason = f"{nearest} is not a directory"
    except OSError as error:  # a link to itself, a name that is too long
        reason = error.strerror or str(error)
    if reason:
        raise StorageUnavailable(
            f"{file} cannot be written: {reason}", hint=f"name another file with {option}"
        )


def write_file(file: Path, content: str | bytes, *, option: str = "--out") -> None:
    """Write `content`, and create missing folders. Raises StorageUnavailable."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # The text may contain a path that is not valid UTF-8.
        file.write_bytes(content.encode(errors="replace") if isinstance(content, str) else content)
    except OSError as error:
        raise StorageUnavailable(
            f"{file} cannot be written: {error.strerror or error}",
            hint=f"name another file with {option}",
        ) from None
