"""Prepared files that wait for their study: nobody else's as long as the process that prepares them lives.

The folder's lock goes with the process, on whichever machine or in whichever container that runs.
"""

import os
import shutil
import uuid
from pathlib import Path

from autotune.study.workers.liveness import is_free, new_lock

_WAITING, _LOCK = ".waiting-", ".lock"
"""No study's name begins with a dot."""


class StagingFolder:
    """A place in `work` for the folder of the prepared files, which is yet to be made; held until `close`."""

    def __init__(self, work: Path) -> None:
        self.folder = work / f"{_WAITING}{uuid.uuid4().hex}"
        self._lock = self.folder.with_name(self.folder.name + _LOCK)
        self._descriptor = new_lock(self._lock)

    def close(self) -> None:
        """Removes what still waits."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.unlink(missing_ok=True)
        os.close(self._descriptor)


def sweep(work: Path) -> None:
    """Removes prepared files that a killed search left waiting, and what its trial server still made of them then."""
    for name in {
        file.name.partition(".unfinished")[0].removesuffix(_LOCK)
        for file in work.glob(f"{_WAITING}*")
    }:
        lock = work / (name + _LOCK)
        if is_free(lock):
            for left in (work / name, *work.glob(f"{name}.unfinished*")):
                shutil.rmtree(left, ignore_errors=True)
            lock.unlink(missing_ok=True)
