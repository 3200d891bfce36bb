"""Runs the code of a stored study only where its user has named that code on this machine.

A study says which script, with which arguments, or which Python model it trains, and what a study
says may come from anybody: from an imported file, or from a database to which others write. A
search that names the code, as the one that begins a study does, leaves a note of it in the study's
work folder. Without that note, or where the study says something else by now, nothing of it is run.
`autotune studies trust` leaves the note, too.
"""

import hashlib
import json
import os
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput, StorageUnavailable
from autotune.spec.study import DEFAULT_STORAGE
from autotune.spec.user_code import is_function_reference
from autotune.spec.workload import Workload
from autotune.system.files import durable_file

TRUSTED = "trusted-code"
"""Name of the note in the work folder of a study."""
_DIGEST_BYTES = 64


def code_of(workload: Workload) -> str | None:
    """Returns the user's code that the workload trains, as text; None if it has none."""
    if workload.script is not None:
        return shlex.join([workload.script, *workload.script_arguments])
    if is_function_reference(workload.model):
        return workload.model
    return None


def names_code(specified: Mapping[str, Any], workload: Workload) -> bool:
    """Returns whether settings name all of the workload's code: a script with its arguments."""
    if workload.script is None:
        return specified.get("model") == workload.model
    arguments = tuple(specified.get("script_arguments") or ())
    return specified.get("script") == workload.script and arguments == workload.script_arguments


def trust(workload: Workload, *, folder: Path) -> None:
    """Leave a note in a study's work folder that its code may run.

    Raises StorageUnavailable where that cannot be written.
    """
    if code_of(workload) is None or is_trusted(workload, folder):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with durable_file(folder / TRUSTED) as unfinished:
            unfinished.write_text(_digest(workload))
    except OSError as error:
        raise StorageUnavailable(
            f"{folder / TRUSTED} cannot be written: {error.strerror or error}",
            hint="make room there, or correct its permissions",
        ) from None


def check_trusted(workload: Workload, *, study: str, storage: str, folder: Path | None) -> None:
    """Raise InvalidInput where the study's code was not named on this machine.

    `storage` is the URL of the study's database without its password, for the message. `folder` is
    the work folder of the study; None for one that has none here.
    """
    code = code_of(workload)
    if code is None or (folder is not None and is_trusted(workload, folder)):
        return
    command = ["autotune", "studies", "trust", study]
    if storage != DEFAULT_STORAGE:
        command += ["--storage", storage]
    raise InvalidInput(
        f"study {study!r} runs the code {code!r}, which nobody has named on this machine",
        hint="a study that was imported or is shared can name any code: look at it, then run "
        f"{shlex.join(command)}",
    )


def _digest(workload: Workload) -> str:
    """Returns a digest of the code's name, its arguments and the content of its file."""
    code = [
        workload.script,
        *workload.script_arguments,
        workload.model,
        workload.model_sha256,
    ]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()


def is_trusted(workload: Workload, folder: Path) -> bool:
    """Returns whether this user has left a note for the code as the study names it now."""
    try:
        descriptor = os.open(folder / TRUSTED, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    with os.fdopen(descriptor, "rb") as opened:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.getuid():
            return False  # somebody else's note, where several users share a folder
        return opened.read(_DIGEST_BYTES + 1) == _digest(workload).encode()
