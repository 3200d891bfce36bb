"""Keeps the disk of a server from filling up: removes old logs, never a result.

What may go are logs of trials and searches and recorded allocation histories, the oldest first.
Studies, exports and the database stay until somebody deletes them.
"""

import logging
import stat
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_LOG = logging.getLogger("autotune.service")
_REMOVABLE = ("*.log", "*.snapshot.pickle")
_YOUNG_SECONDS = 3600.0
"""Younger files may be of a search that runs, and stay."""
_DAY_SECONDS = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What a server keeps of its work folder."""

    folder: Path
    keep_days: int | None = None
    """Logs that nothing was written to for longer are removed; None: they stay."""
    quota_bytes: int | None = None
    """The oldest logs are removed until all are together within it; None: without a limit."""

    def apply(self, active: Collection[str] = ()) -> list[Path]:
        """Remove what is too old or too much, except of `active` studies, and return it."""
        if self.keep_days is None and self.quota_bytes is None:
            return []
        now = time.time()
        files = []
        for pattern in _REMOVABLE:
            for file in self.folder.rglob(pattern):
                if file.relative_to(self.folder).parts[0] in active:
                    continue
                try:
                    status = file.lstat()
                except OSError:
                    continue  # somebody else has removed it
                if stat.S_ISREG(status.st_mode):
                    files.append((status.st_mtime, status.st_size, file))
        files.sort()
        total_bytes = sum(size for _, size, _ in files)
        removed = []
        for changed_at, size, file in files:
            age = now - changed_at
            is_old = self.keep_days is not None and age > self.keep_days * _DAY_SECONDS
            is_too_much = self.quota_bytes is not None and total_bytes > self.quota_bytes
            if age < _YOUNG_SECONDS or not (is_old or is_too_much):
                continue
            file.unlink(missing_ok=True)
            total_bytes -= size
            removed.append(file)
        if removed:
            _LOG.info("%d old logs were removed", len(removed))
        return removed
