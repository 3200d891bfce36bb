"""The work folder of a database: logs, prepared files and compiler caches of its studies."""

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
    """Make the work folder and yield it. Raises StorageUnavailable if it cannot be written to.

    If the folder is new and the request turns out to be invalid (InvalidInput), its logs and
    compiler cache are removed, and then the new folders that are empty.
    """
    folder = work_folder_path(storage)
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    _make(folder)
    try:
        yield folder
    except InvalidInput:
        if created:
            for name in ("logs", CACHE):
                shutil.rmtree(folder / name, ignore_errors=True)
        for path in created:
            with suppress(OSError):  # not empty: another search uses it
                path.rmdir()
        raise


def work_folder_path(storage: str) -> Path:
    """Return the path of the work folder: next to a SQLite database, else in `studies/`.

    Each database has a folder of its own, because studies of the same name in two databases are
    different studies.
    """
    file = sqlite_file(storage)
    if file is None:
        return RESULTS_FOLDER / "work" / hashlib.sha256(storage.encode()).hexdigest()[:12]
    return file.parent / "work" / file.name.removesuffix(".db")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{uuid.uuid4().hex}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StorageUnavailable(
            f"results cannot be written to {folder}: {error.strerror or error}",
            hint="run from a folder that can be written to, or name a database elsewhere with "
            "--storage",
        ) from None
