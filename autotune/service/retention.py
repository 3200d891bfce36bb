"""Keeps the disk of a server from filling up: removes old logs and profiles, never a result.

What may go are logs of trials and searches, recorded allocation histories and profiles, the oldest
first. Studies, exports and the database stay until somebody deletes them.
"""

import logging
import shutil
import stat
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

_LOG = logging.getLogger("autotune.service")
_FILES = ("**/*.log", "*/snapshots/*.pickle", "*/profiles/*.html")
"""Logs, allocation histories, and pages that compare two profiles."""
_FOLDERS = ("*/profiles/trial-*", "*/profiles/.trial-*")
"""Profiles, and those that were not finished because their process was killed."""
_YOUNG_SECONDS = 3600.0
"""Younger files may be of a search that runs, and stay."""
_DAY_SECONDS = 86_400.0


@dataclass(frozen=True, kw_only=True)
class _Removable:
    """A file, or a folder that is removed as a whole."""

    path: Path
    size_bytes: int
    changed_at: float

    def remove(self) -> None:
        if self.path.is_dir():
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            self.path.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What a server keeps of its work folder."""

    folder: Path
    keep_days: int | None = None
    """What nothing was written to for longer is removed; None: it stays."""
    quota_bytes: int | None = None
    """The oldest are removed until all are together within it; None: without a limit."""

    def apply(self, active: Collection[str] = ()) -> list[Path]:
        """Remove what is too old or too much, except of `active` studies, and return it."""
        if self.keep_days is None and self.quota_bytes is None:
            return []
        now = time.time()
        found = sorted(self._removable(active), key=lambda one: one.changed_at)
        total_bytes = sum(one.size_bytes for one in found)
        removed = []
        for one in found:
            age = now - one.changed_at
            is_old = self.keep_days is not None and age > self.keep_days * _DAY_SECONDS
            is_too_much = self.quota_bytes is not None and total_bytes > self.quota_bytes
            if age < _YOUNG_SECONDS or not (is_old or is_too_much):
                continue
            one.remove()
            total_bytes -= one.size_bytes
            removed.append(one.path)
        if removed:
            _LOG.info("%d old logs and profiles were removed", len(removed))
        return removed

    def _removable(self, active: Collection[str]) -> Iterator[_Removable]:
        """Yield what may be removed. Links are not followed."""
        for pattern in (*_FILES, *_FOLDERS):
            for path in self.folder.glob(pattern):
                if path.relative_to(self.folder).parts[0] in active or path.parent.is_symlink():
                    continue
                try:
                    one = _file(path) if pattern in _FILES else _folder(path)
                except OSError:
                    continue  # somebody else has removed it
                if one is not None:
                    yield one


def _file(path: Path) -> _Removable | None:
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        return None
    return _Removable(path=path, size_bytes=status.st_size, changed_at=status.st_mtime)


def _folder(path: Path) -> _Removable | None:
    """Returns a folder as old as the youngest file in it."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return None
    inside = [file.lstat() for file in path.rglob("*")]
    return _Removable(
        path=path,
        size_bytes=sum(one.st_size for one in inside if stat.S_ISREG(one.st_mode)),
        changed_at=max((one.st_mtime for one in inside), default=status.st_mtime),
    )
