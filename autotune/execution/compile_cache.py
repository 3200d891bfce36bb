"""Where what a trial compiles is kept: with its study."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from autotune.execution.private_folder import PrivateFolder, cache_bases, private_folder

CACHE = "inductor"
"""Folder of a study, or of all studies of a database, that has what was compiled for it."""


class CompilerCaches:
    """inductor's and Triton's disk caches, one a folder, so that no compilation time comes from another study's.

    `note` takes one sentence where caches had to go to a temporary folder, which `close` removes.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._outside: PrivateFolder | None = None

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables for a process whose cache belongs to `folder`. Raises StorageUnavailable."""
        cache = (folder / CACHE).absolute()
        if not _is_taken_by_compilers(cache):
            cache = self._folder_outside() / hashlib.sha256(str(cache).encode()).hexdigest()[:16]
        # inductor keeps Triton's kernels in its own folder unless the user's environment names
        # another one for all.
        return {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}

    def _folder_outside(self) -> Path:
        if self._outside is None:
            self._outside = private_folder(
                CACHE,
                purpose="the cache of compiled code",
                bases=cache_bases(),
                is_usable=_is_taken_by_compilers,
            )
            if self._outside.is_temporary:
                self._note(f"{self._outside.note}; the next search compiles again")
        return self._outside.path

    def close(self) -> None:
        if self._outside is not None and self._outside.is_temporary:
            shutil.rmtree(self._outside.path, ignore_errors=True)
        self._outside = None


def _is_taken_by_compilers(path: Path) -> bool:
    """inductor hands the path to the C++ compiler unquoted."""
    return not any(character.isspace() for character in str(path))
