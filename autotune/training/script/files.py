"""Finds out which files of the user's a training script reads, while it runs in this process.

Python's audit events show them: `exec` with the code object of each imported or executed file, also
where its source was compiled before, `import` for compiled extensions, and `open` for what the
script reads itself, such as a configuration that it passes to `exec`, json or yaml. Neither what
other processes read nor what compiled code opens without Python can be seen.

Files of the user's are those next to the script, in the folders below it or in the current folder,
and others that are no part of Python, installed packages, caches or the system.
"""

import os
import site
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.spec.script_files import WRITTEN
from autotune.spec.user_code import script_file, script_folder, sha256_of
from autotune.spec.workload import Workload

SUFFIXES = (".py", ".json", ".yaml", ".yml", ".toml", ".ini", ".cfg")
"""Suffixes of Python files and of configuration files. Other files count if they are executed."""

LARGEST_BYTES = 2**26
MOST_IN_A_FOLDER = 100
"""A larger file, or more configuration files in one folder, are data, which is not counted."""

_CACHES = (
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCH_HOME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_DATASETS_CACHE",
    "XDG_CACHE_HOME",
)
"""Variables that name folders of caches outside the hidden folders of the user's home."""

_EVENTS = frozenset(("open", "exec", "import", "os.rename"))


class FileWatch:
    """Collects the files that the script of `workload` reads from `start` on, with their hashes."""

    def __init__(self, workload: Workload) -> None:
        assert workload.script is not None
        self._known = {*(workload.script_files or ()), *workload.script_files_after_apply}
        self._script = os.path.abspath(script_file(workload.script))
        self._folder = str(script_folder(workload.script))
        self._own_folders = tuple(map(_with_separator, (self._folder, str(Path.cwd()))))
        self._libraries = _libraries()
        self._elsewhere = _elsewhere()
        self._files: dict[str, str] = {}
        """{absolute path: SHA-256}"""
        self._not_counted: set[str] = set()
        self._written: set[str] = set()
        self._by_folder: Counter[str] = Counter()
        self._until_apply: dict[str, str] | None = None

    def start(self) -> None:
        """Starts watching. Python cannot remove an audit hook, so this lasts until the end."""

        # A plain function, whose attributes Python finds faster than those of a method: nearly all
        # events are none of these, such as each call of id(), some 50 in a step of training.
        def on_event(event: str, arguments: tuple[Any, ...]) -> None:
            if event in _EVENTS:
                self._note_event(event, arguments)

        sys.addaudithook(on_event)

    def found(self) -> dict[str, str]:
        """Returns {path relative to the script's folder: SHA-256} of what was read until now.

        The script itself is not among them.
        """
        files = {}
        for path, sha256 in self._files.copy().items():
            is_data = self._by_folder[os.path.dirname(path)] > MOST_IN_A_FOLDER
            if not is_data or path.endswith(".py"):
                files[self._relative(path)] = sha256
        return files

    def found_until_apply(self) -> dict[str, str]:
        """Returns `found` at the first call, which must be that of `autotune.apply`."""
        if self._until_apply is None:
            self._until_apply = self.found()
        return self._until_apply

    @property
    def has_applied(self) -> bool:
        """Whether `found_until_apply` was called."""
        return self._until_apply is not None

    def found_after_apply(self) -> dict[str, str]:
        """Returns what was first read, or written, after `autotune.apply`; {} without that call."""
        if self._until_apply is None:
            return {}
        files = self.found()
        for path in map(self._relative, self._written.copy()):
            if path in self._known:
                files[path] = WRITTEN
        return {
            path: sha256 for path, sha256 in files.items() if self._until_apply.get(path) != sha256
        }

    # -- events ------------------------------------------------------------------------------------

    def _note_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        try:
            if event == "open":
                self._note_open(*arguments)
            elif event == "os.rename":
                self._note_write(os.path.abspath(os.fsdecode(arguments[1])))
            else:
                name = arguments[0].co_filename if event == "exec" else arguments[1]
                if name and not name.startswith("<"):
                    self._note_read(os.path.abspath(name))
        except Exception:  # it would be raised in the script's call of open()
            pass

    def _note_open(self, name: Any, mode: str | None, flags: int) -> None:
        if isinstance(name, int):
            return
        path = os.fsdecode(name)
        if not path.endswith(SUFFIXES):
            return
        is_write = flags & (os.O_WRONLY | os.O_RDWR)
        if mode is not None:
            is_write = any(letter in "wax+" for letter in mode)
        if is_write:
            self._note_write(os.path.abspath(path))
        else:
            self._note_read(os.path.abspath(path))

    def _note_write(self, path: str) -> None:
        self._written.add(path)
        if path in self._files:
            self._files[path] = WRITTEN

    def _note_read(self, path: str) -> None:
        if path in self._files or path in self._not_counted:
            return
        if path == self._script or not self._is_users(path):
            self._not_counted.add(path)
            return
        if path in self._written:
            self._files[path] = WRITTEN  # the next trial may find it made already
            return
        folder = os.path.dirname(path)
        if not path.endswith(".py") and self._by_folder[folder] > MOST_IN_A_FOLDER:
            return
        if not os.path.isfile(path):
            return
        self._not_counted.add(path)  # hashing opens it
        if os.path.getsize(path) > LARGEST_BYTES:
            return
        # At once, because the file may be edited while the script runs.
        self._files[path] = sha256_of(Path(path))
        if not path.endswith(".py"):
            self._by_folder[folder] += 1

    def _is_users(self, path: str) -> bool:
        if path.startswith(self._libraries) or "-packages/" in path:
            return False
        for folder in self._own_folders:
            if path.startswith(folder):
                folders = path[len(folder) :].split(os.sep)[:-1]
                return not any(name.startswith(".") for name in folders)
        return not path.startswith(self._elsewhere)

    def _relative(self, path: str) -> str:
        return Path(os.path.relpath(path, self._folder)).as_posix()


def _with_separator(folder: str) -> str:
    return folder.rstrip(os.sep) + os.sep


def _both_names(folders: Iterator[str | None]) -> tuple[str, ...]:
    """Returns the folders, and where a link leads to, each with a separator at its end."""
    names = set()
    for folder in folders:
        if folder:
            names.add(_with_separator(os.path.abspath(folder)))
            names.add(_with_separator(os.path.realpath(folder)))
    return tuple(sorted(names))


def _libraries() -> tuple[str, ...]:
    """Returns folders that have no files of the user's, even within the script's folder."""

    def folders() -> Iterator[str | None]:
        yield str(Path(__file__).parents[2])  # autotune
        for name in ("stdlib", "platstdlib", "purelib", "platlib"):
            yield sysconfig.get_path(name)
        yield from site.getsitepackages()
        yield site.getusersitepackages()
        if sys.prefix != sys.base_prefix:
            yield sys.prefix
        yield from map(os.environ.get, _CACHES)

    return _both_names(folders())


def _elsewhere() -> tuple[str, ...]:
    """Returns where no files of the user's are, unless the script or the search is there.

    These are folders, and the beginning of each hidden folder in the user's home.
    """

    def folders() -> Iterator[str | None]:
        yield tempfile.gettempdir()
        yield os.path.join(sys.base_prefix, "lib")
        yield os.path.join(sys.base_prefix, "share")
        yield from ("/etc", "/proc", "/sys", "/dev", "/usr/lib", "/usr/share")

    hidden = os.path.join(os.path.expanduser("~"), ".")
    return (*_both_names(folders()), hidden)


_watches: list[FileWatch] = []
"""The watch of the script that runs in this process; empty if there is none."""


def watch_files(workload: Workload) -> FileWatch:
    """Returns the watch of this process, which must be started."""
    _watches[:] = [FileWatch(workload)]
    return _watches[0]


def files_until_apply() -> dict[str, str]:
    """Returns the files that this process's script has read when it calls `autotune.apply`."""
    return _watches[0].found_until_apply() if _watches else {}


def files_after_apply() -> dict[str, str]:
    """Returns the files that this process's script has first read later."""
    return _watches[0].found_after_apply() if _watches else {}
