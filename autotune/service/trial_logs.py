"""Reads the end of a trial's log, and nothing outside of the folder of its study's logs."""

import os
import stat
from pathlib import Path

from autotune.printable import printable
from autotune.service.problems import Problem


def end_of_log(work_folder: Path, study: str, number: int, *, most_bytes: int) -> str:
    """Returns the end of the log of a trial's last attempt. Raises Problem where there is none.

    `work_folder` is that of the database, and `study` must be the name of a stored study. Links
    among its files are not followed: only somebody with access to the machine can have put them
    there.
    """
    folder = work_folder.resolve() / study / "logs"
    candidates = [folder / f"trial-{number}.log", *folder.glob(f"trial-{number}-attempt-*.log")]
    files = [(state.st_mtime_ns, file) for file in candidates if (state := _state(file))]
    if not files or folder.resolve() != folder:
        raise Problem(
            404,
            f"there is no log of trial {number} of study {study!r} on this machine",
            hint="it is where the trial ran, unless the trial was reused or only predicted",
        )
    _, newest = max(files)
    text = end_of_file(newest, most_bytes=most_bytes)
    if text is None:
        raise Problem(404, f"the log {newest.name} cannot be read")
    return text


def end_of_file(file: Path, *, most_bytes: int) -> str | None:
    """Returns the end of a text file; None for a link, and for what is missing or unreadable.

    Scripts write into logs what they like: control characters are shown as escapes.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as opened:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            return None
        opened.seek(max(0, state.st_size - most_bytes))
        text = opened.read(most_bytes).decode("utf-8", errors="replace")
    # What a progress bar has written over itself becomes lines.
    return printable(text.replace("\r\n", "\n").replace("\r", "\n"), keep_lines=True)


def _state(file: Path) -> os.stat_result | None:
    """Returns the state of a regular file, and None for anything else and for a link."""
    try:
        state = file.lstat()
    except OSError:
        return None
    return state if stat.S_ISREG(state.st_mode) else None
