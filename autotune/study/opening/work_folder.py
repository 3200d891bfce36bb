"""The work folder of a database: logs, prepared files and compiler caches of its studies."""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from autotune.errors import InvalidInput, StorageUnavailable
from autotune.execution.compile_cache import CACHE
from autotune.storage.identity import find_work_folder
from autotune.storage.retry import RetryPolicy


@contextmanager
def work_folder(storage: str, retry: RetryPolicy | None = None) -> Iterator[Path]:
    """Make the work folder and yield it. Raises StorageUnavailable if it cannot be written to.

    With `retry`, first waits for a database that cannot be reached at the moment.

    If the folder is new and the request turns out to be invalid (InvalidInput), its logs and
    compiler cache are removed, and then the new folders that are empty.
    """
    if retry is None:
        folder = find_work_folder(storage)
    else:
        folder = retry.repeat(lambda: find_work_folder(storage))
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
