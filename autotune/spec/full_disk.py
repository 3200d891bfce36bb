"""Tell that a disk is full, which databases, torch and the system each say in their own way."""

import errno
import os
from pathlib import Path

from autotune.errors import DiskFull, causes_of
from autotune.spec.model_size import free_disk_bytes
from autotune.units import format_size

LEAST_FREE_BYTES = 16 * 2**20
"""A server takes no search, and says that its disk is full, where fewer are left."""
_NUMBERS = (errno.ENOSPC, errno.EDQUOT)
_TEXTS = (*map(os.strerror, _NUMBERS), "database or disk is full")


def says_full_disk(error: BaseException) -> bool:
    """Whether an error itself is of a full disk or of a used-up share."""
    has_number = getattr(error, "errno", None) in _NUMBERS
    return has_number or any(text in str(error) for text in _TEXTS)


def is_of_full_disk(error: BaseException) -> bool:
    """Whether an error, or one that it came from, is of a full disk or of a used-up share."""
    return any(map(says_full_disk, causes_of(error)))


def disk_full(folder: Path) -> DiskFull:
    """Returns the error for the full disk of a folder."""
    return DiskFull(
        f"the disk of {folder.absolute()} has too little room: "
        f"{format_size(free_disk_bytes(folder))} are left",
        hint="make room on it, and run the same command again",
    )
