"""Chooses the folders of the compilers' disk caches: each study has its own."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from autotune.execution.private_folder import PrivateFolder, cache_bases, private_folder

CACHE = "inductor"
"""Name of the cache folder, in a study's folder or in that of all studies of a database."""


class CompilerCaches:
    """inductor's and Triton's disk caches, one for each folder.

    Studies do not share a cache, so that the compilation time of a trial never depends on another
    study. `note` is called with one sentence where the caches had to go to a temporary folder,
    which `close` removes.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._outside: PrivateFolder | None = None

    def environment(self, folder: Path) -> dict[str, str]:
        """Returns environment variables for a process whose cache belongs to `folder`.

        Raises StorageUnavailable.
        """
        cache = (folder / CACHE).absolute()
        if not _compilers_accept(cache):
            digest = hashlib.sha256(str(cache).encode()).hexdigest()
            cache = self._folder_outside() / digest[:16]
        # Without TRITON_CACHE_DIR, a value from the user's environment would be shared by all.
        return {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}

    def _folder_outside(self) -> Path:
        if self._outside is None:
            self._outside = private_folder(
                CACHE,
                purpose="the cache of compiled code",
                bases=cache_bases(),
                is_usable=_compilers_accept,
            )
            if self._outside.is_temporary:
                self._note(f"{self._outside.note}; the next search compiles again")
        return self._outside.path

    def close(self) -> None:
        if self._outside is not None and self._outside.is_temporary:
            shutil.rmtree(self._outside.path, ignore_errors=True)
        self._outside = None


def _compilers_accept(path: Path) -> bool:
    """False for a path with spaces, because inductor passes it to the C++ compiler unquoted."""
    return not any(character.isspace() for character in str(path))
