"""Brings a node what a trial needs: each content once, by its SHA-256.

A content goes to the cluster's object store once, and from there to the nodes.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from autotune.errors import InvalidInput, TrialLost
from autotune.execution.cluster.remote_worker import RemoteWorker
from autotune.units import different_sizes, format_size

_CHUNK_BYTES = 64 * 1024**2
_SECONDS_TO_ANSWER = 60.0
_SECONDS_FOR_A_CHUNK = 120.0
_SPARE_BYTES = 512 * 1024**2
"""Left free on a node's disk for logs and compiled code."""

MOST_FILES = 20_000
MOST_BYTES = 8 * 1024**3
"""Of a user's folder that is sent to nodes which do not see it."""
_NOT_SENT = frozenset({"__pycache__", "node_modules", "wandb", "mlruns"})


class Shipment:
    """The contents of a search that were put into the cluster's object store."""

    def __init__(self) -> None:
        self._chunks: dict[str, list[Any]] = {}
        self._digests: dict[tuple[Path, int, int], str] = {}
        self._lock = threading.Lock()
        self._nodes: dict[str, threading.Lock] = {}

    def bring(
        self,
        worker: RemoteWorker,
        folder: str,
        contents: Mapping[str, Path],
        *,
        may_change: bool,
        should_stop: Callable[[], bool],
    ) -> None:
        """Makes `folder` on the worker's node, with `contents`, {path in it: file here}.

        Of the workers of one node, one sends at a time. Raises TrialLost, also where the disk has
        no room, and Stopped.
        """
        with self._lock:
            node_lock = self._nodes.setdefault(worker.node, threading.Lock())
        with node_lock:
            manifest = {path: self._digest(file) for path, file in contents.items()}
            files = {manifest[path]: file for path, file in contents.items()}
            lacking = worker.ask(
                "lacking",
                seconds=_SECONDS_TO_ANSWER,
                should_stop=should_stop,
                digests=sorted(files),
            )
            self._check_room(worker, [files[digest] for digest in lacking], should_stop)
            for digest in lacking:
                references = self._references(digest, files[digest])
                seconds = _SECONDS_FOR_A_CHUNK * (1 + len(references))
                worker.ask(
                    "receive",
                    seconds=seconds,
                    should_stop=should_stop,
                    digest=digest,
                    chunks=references,
                )
            worker.ask(
                "assemble",
                seconds=_SECONDS_FOR_A_CHUNK,
                should_stop=should_stop,
                folder=folder,
                manifest=manifest,
                may_change=may_change,
            )

    def _check_room(
        self, worker: RemoteWorker, files: Collection[Path], should_stop: Callable[[], bool]
    ) -> None:
        if not files:
            return
        found = worker.ask("describe", seconds=_SECONDS_TO_ANSWER, should_stop=should_stop)
        needed = sum(file.stat().st_size for file in files) + _SPARE_BYTES
        if found["free_bytes"] < needed:
            size, free = different_sizes(needed, found["free_bytes"])
            raise TrialLost(
                f"{worker.place} has no room: the search needs {size} in {found['folder']}, of "
                f"which {free} are free",
                hint="free space there, or let XDG_CACHE_HOME of Ray's processes name another disk",
            )

    def _digest(self, file: Path) -> str:
        try:
            status = file.stat()
            key = (file, status.st_size, status.st_mtime_ns)
            with self._lock:
                if key not in self._digests:
                    with file.open("rb") as opened:
                        self._digests[key] = hashlib.file_digest(opened, "sha256").hexdigest()
                return self._digests[key]
        except OSError as error:
            raise InvalidInput(
                f"{file} cannot be sent to the nodes: {error.strerror or error}",
                hint="let it be readable, or run from a folder with only what the training needs",
            ) from None

    def _references(self, digest: str, file: Path) -> list[Any]:
        with self._lock:
            if digest not in self._chunks:
                references: list[Any] = []
                with file.open("rb") as opened:
                    while chunk := opened.read(_CHUNK_BYTES):
                        references.append(ray.put(chunk))
                self._chunks[digest] = references
            return self._chunks[digest]


def prepared_files(folder: Path) -> dict[str, Path]:
    """Returns the files of a folder of prepared files, which may be links."""
    return {file.name: file.resolve() for file in folder.iterdir()}


def user_files(folder: Path, *, excluded: Collection[Path]) -> dict[str, Path]:
    """Returns the files of the folder in which a user's script or model runs.

    Without hidden ones, virtual environments, caches, and those in `excluded`. Raises InvalidInput
    where they are too many or too large to be sent.
    """
    found: dict[str, Path] = {}
    size = 0
    for file in _files_in(folder, excluded):
        with suppress(OSError):  # it is gone; what reads it next says so
            size += file.stat().st_size
        found[str(file.relative_to(folder))] = file
        if size > MOST_BYTES or len(found) > MOST_FILES:
            raise InvalidInput(
                f"the files in {folder} are more than the {format_size(MOST_BYTES)} or "
                f"{MOST_FILES:,} files that are sent to nodes",
                hint="run from a folder with only what the training needs, or from one on a file "
                "system that all nodes have",
            )
    return found


def _files_in(folder: Path, excluded: Collection[Path]) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        here = Path(parent)
        if "pyvenv.cfg" in names:
            folders.clear()
            continue
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in _NOT_SENT and here / name not in excluded
        )
        for name in sorted(names):
            file = here / name
            if not name.startswith(".") and file not in excluded and file.is_file():
                yield file
