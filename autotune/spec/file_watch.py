"""Finds out which files of the user's a script or the function of a model reads in this process.

Python's audit events show them: `exec` with the code object of each imported or executed file, also
where its source was compiled before, `import` for compiled extensions, and `open` for what the code
reads itself, such as a configuration that it passes to `exec`, json, text or weights. safetensors,
which opens files without Python, is asked by name. Neither what other processes read nor what other
compiled code opens can be seen.

Files of the user's are those next to the code, in the folders below it or in the current folder,
and others that are no part of Python, installed packages, caches or the system. A package that was
installed from a folder or from git is the user's, too: it may change without another version.
"""

import functools
import importlib.metadata
import os
import site
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from autotune.spec.script_files import MOST_IN_A_FOLDER, WRITTEN, digest_of, folder_of_code, is_code
from autotune.spec.user_code import script_file
from autotune.spec.workload import Workload

MOST_FILES_OF_DATA = 1000
"""Further ones are not counted: hashing them would take longer than the training."""

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
    """Collects the files that the code of `workload` reads, with their hashes."""

    def __init__(self, workload: Workload) -> None:
        self._known = {*(workload.script_files or ()), *workload.script_files_after_apply}
        self._folder = str(folder_of_code(workload))
        self._own_folders = tuple(map(_with_separator, (self._folder, str(Path.cwd()))))
        self._local_packages: dict[str, tuple[str, ...]] = {}
        """Packages of the user's by the folder that they are installed in."""
        self._libraries = _libraries()
        self._elsewhere = _elsewhere()
        self._main = ""
        if workload.script is not None:
            self._main = os.path.abspath(script_file(workload.script))
        self._counts_opened = workload.script is not None
        self._files: dict[str, str] = {}
        """{absolute path: SHA-256}; that of a folder ends with a separator."""
        self._not_counted: set[str] = set()
        self._written: set[str] = set()
        self._by_folder: Counter[str] = Counter()
        self._until_apply: dict[str, str] | None = None

    @contextmanager
    def opened_files(self) -> Iterator[None]:
        """Also counts files that are opened meanwhile, which for a script are counted always.

        Apart from code of the user's, autotune reads its own files in this process.
        """
        before = self._counts_opened
        self._counts_opened = True
        try:
            yield
        finally:
            self._counts_opened = before

    def leave_out(self, main: str) -> None:
        """Leaves out the file of the code itself, which the study knows by another hash."""
        self._main = os.path.abspath(main)

    def found(self) -> dict[str, str]:
        """Returns {path relative to the code's folder: SHA-256} of what was read until now.

        The file of the code itself is not among them.
        """
        files = {}
        for path, sha256 in self._files.copy().items():
            is_whole = self._by_folder[os.path.dirname(path)] > MOST_IN_A_FOLDER
            if path != self._main and (path.endswith((".py", os.sep)) or not is_whole):
                files[self._relative(path)] = sha256
        return files

    def found_until_apply(self) -> dict[str, str]:
        """Returns `found` at the first call: at that of `autotune.apply`, or with a model built."""
        if self._until_apply is None:
            self._until_apply = self.found()
        return self._until_apply

    @property
    def has_applied(self) -> bool:
        """Whether `found_until_apply` was called."""
        return self._until_apply is not None

    def found_after_apply(self) -> dict[str, str]:
        """Returns what was first read, or written, after `autotune.apply`, and unknown data.

        Returns {} before that call.
        """
        if self._until_apply is None:
            return {}
        files = self.found()
        for path in map(self._relative, self._written.copy()):
            if path in self._known:
                files[path] = WRITTEN
        return {
            path: sha256
            for path, sha256 in files.items()
            if self._until_apply.get(path) != sha256 or not (path in self._known or is_code(path))
        }

    # -- events ------------------------------------------------------------------------------------

    def note_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Notes the file of an audit event that is one of `_EVENTS`."""
        try:
            if event == "open":
                if self._counts_opened:
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
        if path.endswith(".pyc"):
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
        for read in (path, _with_separator(os.path.dirname(path))):
            if read in self._files:
                self._files[read] = WRITTEN

    def _note_read(self, path: str) -> None:
        if path in self._files or path in self._not_counted:
            return
        if not self.is_users(path):
            self._not_counted.add(path)
            return
        if path in self._written:
            self._files[path] = WRITTEN  # the next trial may find it made already
            return
        if not os.path.isfile(path):
            return
        self._not_counted.add(path)  # hashing opens it
        if not path.endswith(".py"):
            folder = os.path.dirname(path)
            self._by_folder[folder] += 1
            if self._by_folder[folder] > MOST_IN_A_FOLDER:
                self._note_folder(folder)
                return
            if self._by_folder.total() > MOST_FILES_OF_DATA:
                return
        # At once, because the file may be edited while the script runs.
        self._files[path] = digest_of(Path(path))

    def _note_folder(self, folder: str) -> None:
        name = _with_separator(folder)
        if name not in self._files:
            is_written = any(os.path.dirname(path) == folder for path in self._written)
            self._files[name] = WRITTEN if is_written else digest_of(Path(folder))

    def user_code(self) -> list[str]:
        """Returns the Python files of the user's that ran until now, the main one first."""
        others = (path for path in self._files.copy() if path.endswith(".py"))
        return [path for path in dict.fromkeys((self._main, *others)) if path]

    def is_users(self, path: str) -> bool:
        """Returns whether the file at this absolute path is the user's."""
        installed, separator, _ = path.rpartition("-packages/")
        if separator:
            return path.startswith(self._local_packages_in(installed + separator))
        if path.startswith(self._libraries):
            return False
        for folder in self._own_folders:
            if path.startswith(folder):
                folders = path[len(folder) :].split(os.sep)[:-1]
                return not any(name.startswith(".") for name in folders)
        is_elsewhere = path.startswith(self._elsewhere)
        return not is_elsewhere or (path.endswith(".py") and _is_on_path(path))

    def _local_packages_in(self, folder: str) -> tuple[str, ...]:
        if folder not in self._local_packages:
            self._local_packages[folder] = ()  # looking opens files
            self._local_packages[folder] = tuple(_local_packages(folder))
        return self._local_packages[folder]

    def _relative(self, path: str) -> str:
        end = "/" if path.endswith(os.sep) else ""
        return Path(os.path.relpath(path, self._folder)).as_posix() + end


def _with_separator(folder: str) -> str:
    return folder.rstrip(os.sep) + os.sep


def _both_names(folders: Iterable[str | None]) -> tuple[str, ...]:
    """Returns the folders, and where a link leads to, each with a separator at its end."""
    names = set()
    for folder in folders:
        if folder:
            names.add(_with_separator(os.path.abspath(folder)))
            names.add(_with_separator(os.path.realpath(folder)))
    return tuple(sorted(names))


def _libraries() -> tuple[str, ...]:
    """Returns folders that have no files of the user's, even within the script's folder."""
    folders = [
        str(Path(__file__).parents[2]),  # autotune
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
        *map(os.environ.get, _CACHES),
    ]
    if sys.prefix != sys.base_prefix:
        folders.append(sys.prefix)
    return _both_names(folders)


def _elsewhere() -> tuple[str, ...]:
    """Returns where no files of the user's are, unless the script or the search is there.

    These are folders, and the beginning of each hidden folder in the user's home.
    """
    folders = [
        tempfile.gettempdir(),
        os.path.join(sys.base_prefix, "lib"),
        os.path.join(sys.base_prefix, "share"),
        *("/etc", "/proc", "/sys", "/dev", "/usr"),
    ]
    hidden = os.path.join(os.path.expanduser("~"), ".")
    return (*_both_names(folders), hidden)


def _local_packages(folder: str) -> Iterator[str]:
    """Yields where packages are that were installed into `folder` from another folder or from git.

    pip records where it got a package from (PEP 610).
    """
    for installed in importlib.metadata.distributions(path=[folder]):
        origin = installed.read_text("direct_url.json") or ""
        if '"dir_info"' in origin or '"vcs_info"' in origin:
            for top in {file.parts[0] for file in installed.files or ()}:
                if top != os.pardir:  # commands that are installed beside Python
                    path = os.path.abspath(str(installed.locate_file(top)))
                    yield path if path.endswith(".py") else _with_separator(path)


def _is_on_path(path: str) -> bool:
    """Whether Python imports from a folder that the file is in."""
    return any(path.startswith(_with_separator(os.path.abspath(folder))) for folder in sys.path)


def imported_packages() -> dict[str, str]:
    """Returns {name: version} of the installed packages that compute and were imported until now.

    These are those with a module that refers to torch; torch itself is known of the device.
    """
    torch = sys.modules.get("torch")
    names = set()
    for name, module in list(sys.modules.items()):
        if torch is not None and getattr(module, "__dict__", {}).get("torch") is torch:
            names.add(name.partition(".")[0])
    names -= {"torch", "functorch", "torchgen", "autotune", "__main__", "__mp_main__"}
    if not names:
        return {}
    by_module = importlib.metadata.packages_distributions()
    packages = sorted({package for name in names for package in by_module.get(name, ())})
    return {package: importlib.metadata.version(package) for package in packages}


# -- the watch of this process ---------------------------------------------------------------------


class _Watching:
    """The watches of this process by their code, and the one whose code runs."""

    by_code: ClassVar[dict[tuple[Any, ...], FileWatch]] = {}
    current: ClassVar[FileWatch | None] = None


def watch_files(workload: Workload) -> FileWatch:
    """Returns the watch of the workload's code in this process, which the first call begins."""
    if not _Watching.by_code:
        _watch_process()
    code = (workload.script, workload.script_arguments, workload.model, Path.cwd())
    if code not in _Watching.by_code:
        _Watching.by_code[code] = FileWatch(workload)
    _Watching.current = _Watching.by_code[code]
    return _Watching.current


def _watch_process() -> None:
    """Begins to note events. Python cannot remove an audit hook, so this lasts until the end."""

    # A plain function, whose attributes Python finds faster than those of a method: nearly all
    # events are none of these, such as each call of id(), some 50 in a step of training.
    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS and _Watching.current is not None:
            _Watching.current.note_event(event, arguments)

    sys.addaudithook(on_event)
    if find_spec("safetensors") is None:
        return
    import safetensors  # noqa: PLC0415  # an optional package

    original = safetensors.safe_open

    @functools.wraps(original, updated=())
    def safe_open(filename: Any, *args: Any, **kwargs: Any) -> Any:
        on_event("open", (filename, "rb", 0))
        return original(filename, *args, **kwargs)

    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("safe_open") is original:
            module.safe_open = safe_open  # type: ignore[attr-defined]


def files_until_apply() -> dict[str, str]:
    """Returns the files read when the script calls `autotune.apply`, or when the model is built."""
    watch = _Watching.current
    return {} if watch is None else watch.found_until_apply()


def files_after_apply() -> dict[str, str]:
    """Returns the files of this process's code that the study does not know yet."""
    watch = _Watching.current
    return {} if watch is None else watch.found_after_apply()
