"""The folder of one search on a node: what its trials need, by hash, and what they write.

It is in the user's cache folder, shared by the search's workers on the node, and removed by the
last of them. What killed workers have left is removed by the next one that starts on the node.
"""

import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from autotune.errors import TrialLost
from autotune.execution.private_folder import cache_bases, private_folder
from autotune.system import files

_CONTENTS = "contents"
_LOCK = ".lock"


class NodeFolder:
    """The folder of a search; its lock is shared by the workers, and held until `close`."""

    def __init__(self, search: str) -> None:
        base = private_folder(
            "nodes",
            purpose="the folder of trials",
            bases=cache_bases(),
            is_usable=lambda path: " " not in str(path),
        ).path
        self.path = base / search
        self._lock = _lock_shared(base / f"{search}{_LOCK}")
        for lock in base.glob(f"*{_LOCK}"):
            if lock.name != f"{search}{_LOCK}":
                _remove_if_unused(lock)
        (self.path / _CONTENTS).mkdir(parents=True, exist_ok=True)

    def lacking(self, digests: Iterable[str]) -> list[str]:
        """Returns which of the contents, given by SHA-256, are not here."""
        return [digest for digest in digests if not self._content(digest).exists()]

    def receive(self, digest: str, chunks: Iterable[bytes]) -> None:
        """Writes a content. Raises TrialLost where the disk is full or the content is another."""
        unfinished = self._content(f"{digest}.{uuid.uuid4().hex}")
        found = hashlib.sha256()
        try:
            with unfinished.open("wb") as opened:
                for chunk in chunks:
                    found.update(chunk)
                    opened.write(chunk)
            if found.hexdigest() != digest:
                raise TrialLost(f"a file has arrived at {self.path} with another content")
            unfinished.rename(self._content(digest))
        except OSError as error:
            raise TrialLost(f"{self.path}: {error.strerror or error}") from None
        finally:
            unfinished.unlink(missing_ok=True)

    def assemble(self, folder: str, manifest: Mapping[str, str], *, may_change: bool) -> None:
        """Makes a folder with a file for each {path: SHA-256}, unless it exists.

        With `may_change` they are copies: a script may write into the files that it reads.
        """
        make: Callable[[Path, Path], object] = shutil.copyfile if may_change else os.link
        target = self.path / folder
        if target.exists():
            return
        unfinished = target.with_name(f"{target.name}.{uuid.uuid4().hex}")
        try:
            unfinished.mkdir(parents=True)
            for path, digest in manifest.items():
                file = unfinished / path
                file.parent.mkdir(parents=True, exist_ok=True)
                make(self._content(digest), file)
            unfinished.rename(target)
        except OSError as error:
            if not target.exists():  # else another worker of the search was faster
                raise TrialLost(f"{target}: {error.strerror or error}") from None
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _content(self, digest: str) -> Path:
        return self.path / _CONTENTS / digest

    def close(self) -> None:
        """Removes the folder if no other worker of the search uses it."""
        os.close(self._lock)
        _remove_if_unused(self.path.with_name(f"{self.path.name}{_LOCK}"))


def _lock_shared(file: Path) -> int:
    """Returns the descriptor of the lock file, which no other process has removed meanwhile."""
    while True:
        descriptor = files.open_lock_file(file, mode=0o600)
        files.acquire(descriptor, shared=True)
        try:
            if os.path.samestat(os.fstat(descriptor), file.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)


def _remove_if_unused(lock: Path) -> None:
    try:
        descriptor = files.open_lock_file(lock, mode=0o600)
    except OSError:
        return
    try:
        if files.try_acquire(descriptor):
            shutil.rmtree(lock.with_name(lock.name.removesuffix(_LOCK)), ignore_errors=True)
            lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
