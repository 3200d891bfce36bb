"""The folder where a study's logs, prepared files and compiler caches go."""

import hashlib
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from autotune.errors import InvalidInput, StorageUnavailable
from autotune.execution.compile_cache import CACHE
from autotune.spec.study import RESULTS_FOLDER
from autotune.storage.database import sqlite_file


@contextmanager
def work_folder(storage: str) -> Iterator[Path]:
    """The folder, made.

    Where there was none, what is refused leaves none. Raises StorageUnavailable.

    Logs and the trial server's own compiler cache go, and folders that are then empty.
    """
    folder = place_of_work(storage)
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    _make(folder)
    try:
        yield folder
    except InvalidInput:
        if made:
            for left in ("logs", CACHE):
                shutil.rmtree(folder / left, ignore_errors=True)
        for one in made:
            with suppress(OSError):  # another search uses it
                one.rmdir()
        raise


def place_of_work(storage: str) -> Path:
    """Where the folder is: beside a SQLite database, else in `studies/`."""
    file = sqlite_file(storage)
    # One folder a database: studies of one name in two databases are two studies.
    own = (
        hashlib.sha256(storage.encode()).hexdigest()[:12]
        if file is None
        else file.name.removesuffix(".db")
    )
    return (RESULTS_FOLDER if file is None else file.parent) / "work" / own


def _make(folder: Path) -> None:
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
