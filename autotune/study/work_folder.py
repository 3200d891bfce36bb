"""The work folder of a database: logs, prepared files and compiler caches of its studies."""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from autotune.errors import InvalidInput, StorageUnavailable
from autotune.execution.compile_cache import CACHE
from autotune.storage.database import work_folder_path


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
