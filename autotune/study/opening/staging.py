"""Staging directories: files of a study that is not created yet, and temporary ones of a server.

A directory belongs to the process that prepares it. Its lock is released when that process ends,
on whichever machine or in whichever container it runs.
"""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from autotune.errors import DiskFull, StorageUnavailable
from autotune.spec.full_disk import says_full_disk
from autotune.system.files import create_locked, is_free

_WAITING, _LOCK = ".waiting-", ".lock"
"""No study's name begins with a dot."""


class StagingFolder:
    """The path in `work` of a staging directory, which the caller makes; locked until `close`."""

    def __init__(self, work: Path) -> None:
        self.folder = work / f"{_WAITING}{uuid.uuid4().hex}"
        self._lock = self.folder.with_name(self.folder.name + _LOCK)
        self._descriptor = create_locked(self._lock)

    def close(self) -> None:
        """Remove the directory, if it is still there, and release the lock."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.unlink(missing_ok=True)
        os.close(self._descriptor)


@contextmanager
def staged(work: Path) -> Iterator[Path]:
    """Yields an empty folder, which is removed at the end, or by `sweep` where a kill is the end.

    Raises DiskFull, and StorageUnavailable where it cannot be made otherwise.
    """
    with ExitStack() as stack:
        try:
            work.mkdir(parents=True, exist_ok=True)
            staging = stack.enter_context(closing(StagingFolder(work)))
            staging.folder.mkdir()
        except OSError as error:
            if says_full_disk(error):
                raise DiskFull(
                    "the disk has no room for temporary files",
                    hint="whoever runs it has to make room",
                ) from None
            raise StorageUnavailable(
                f"no temporary file can be written to {work}: {error.strerror}",
                hint="whoever runs it has to make the folder writable",
            ) from None
        yield staging.folder.absolute()


def sweep(work: Path) -> None:
    """Remove the staging directories of killed processes, with what their trial servers left."""
    names = set()
    for file in work.glob(f"{_WAITING}*"):
        names.add(file.name.partition(".unfinished")[0].removesuffix(_LOCK))
    for name in names:
        lock = work / (name + _LOCK)
        if is_free(lock):
            for left in (work / name, *work.glob(f"{name}.unfinished*")):
                shutil.rmtree(left, ignore_errors=True)
            lock.unlink(missing_ok=True)
