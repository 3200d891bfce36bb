"""The one function that creates folders outside a study's own, safe from the other users of the machine.

A folder of a predictable name in a shared temporary directory belongs to whoever creates it first.
Inductor unpickles and loads what it finds in its cache, so that a neighbour who made that folder
could run code as this user. So a folder is created in the user's own runtime or cache directory,
with mode 0700, and is used only where it is this user's, no link, and closed to everybody else, and
where nobody else can replace it. Otherwise the folder is a fresh one of `tempfile.mkdtemp`, and a
sentence says why.

Every place outside the study's folder that this package or a process of a trial writes to:

- inductor's and Triton's cache of a study whose path contains a space (`compile_cache.py`): this
  function. Otherwise the cache is in the study's folder. The trial server is started with a cache
  of its own, too: torch makes a cache when it is imported, and its default,
  `/tmp/torchinductor_<user>`, it uses whoever created it.
- lock files of device turns, where abstract sockets are not to be had (`device_slots.py`): this
  function, or the folder that `AUTOTUNE_LOCK_FOLDER` names, which its user answers for.
- `tempfile.TemporaryDirectory` in `api.predict` and in the commands doctor, explain, fit, plot and
  predict (logs and compiler cache of one call), and in `data/validation.py` (a dataset that is
  looked at): new, random name, mode 0700.
- what a command is told to write: `--out` of export, report, plot, compare and studies export;
  reports, figures and exports in `studies/` of the current folder; the database of `--storage` with
  its work folder beside it.
- a user's own training script, in the folder that the search was started in.
- caches of the libraries, below the user's home unless their variables say otherwise; a home is
  nobody else's: `datasets`, `huggingface_hub` and `transformers` (HF_HOME, `~/.cache/huggingface`;
  remote code is never loaded), CUDA (CUDA_CACHE_PATH, `~/.nv`), torch's extensions and hub
  (`~/.cache/torch_extensions`, `~/.cache/torch`).
- temporary files of gcc, SQLite, kaleido and `datasets`: random names that are created, never
  found. Alembic, Optuna, plotly and tokenizers write none.
- torch's debugging outputs (TORCH_COMPILE_DEBUG, TORCH_COMPILE_CPROFILE,
  TORCHINDUCTOR_WRITE_MISSING_OPS, minifier): only where the user's environment turns them on; some
  have predictable names in the temporary directory.
"""

import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import StorageUnavailable

_OURS = "autotune"
_FOR_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, kw_only=True)
class PrivateFolder:
    path: Path
    note: str = ""
    """One sentence for the user where `path` is a temporary folder, which nobody finds again; else
    empty."""

    @property
    def is_temporary(self) -> bool:
        return bool(self.note)


def cache_bases() -> list[Path]:
    """Where the user keeps what can be made again; it outlives a login and a restart."""
    bases = [_absolute("XDG_CACHE_HOME")]
    if bases == [None]:
        try:
            bases = [Path.home() / ".cache"]
        except RuntimeError:  # a user id without a home, as in a container
            bases = []
    return [base for base in bases if base is not None]


def runtime_bases() -> list[Path]:
    """Where the user keeps locks: gone with the last login, and on no network file system; else the cache."""
    runtime = _absolute("XDG_RUNTIME_DIR")
    return cache_bases() if runtime is None else [runtime, *cache_bases()]


def _absolute(variable: str) -> Path | None:
    """The folder a variable names. The XDG specification has relative ones ignored."""
    path = Path(os.environ.get(variable, ""))
    return path if path.is_absolute() else None


def private_folder(
    name: str,
    *,
    purpose: str,
    bases: Sequence[Path],
    is_usable: Callable[[Path], bool] = lambda path: True,
) -> PrivateFolder:
    """The folder `autotune/<name>` in the first of `bases` where it is safe, created where it is not there yet.

    Otherwise a temporary folder with a note that says why, and that it is for `purpose`. Raises
    StorageUnavailable where not even that can be created.
    """
    reasons = []
    for base in bases:
        folder = base / _OURS / name
        if not is_usable(folder):
            reasons.append(f"{folder} cannot be used for it")
            continue
        try:
            _create(base, (_OURS, name))
        except _Unsafe as error:
            reasons.append(str(error))
        except OSError as error:
            reasons.append(f"{folder} cannot be used: {error.strerror or error}")
        else:
            return PrivateFolder(path=folder)
    path = _temporary(purpose, is_usable)
    why = "; ".join(reasons) or "this user has no home"
    return PrivateFolder(
        path=path, note=f"{purpose} is in the temporary folder {path} this time: {why}"
    )


class _Unsafe(Exception):
    """Says which folder is not safe, and why."""


def _create(base: Path, names: Sequence[str]) -> None:
    """Creates each of `names` in the one before it, and checks it by its open descriptor.

    Raises _Unsafe, OSError.
    """
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    real = base.resolve()
    for parent in (real, *real.parents):
        _check_parent(parent)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(real, flags | os.O_NOFOLLOW)
    place = base
    try:
        for name in names:
            place = place / name
            try:
                os.mkdir(name, mode=0o700, dir_fd=descriptor)
            except FileExistsError:
                _check_no_link(name, descriptor, place)
            opened = os.open(name, flags | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = opened
            _check_folder(place, os.fstat(descriptor))
    finally:
        os.close(descriptor)


def _check_parent(folder: Path) -> None:
    """Whoever can write into a folder can replace what is in it, unless it is sticky, as /tmp is."""
    found = folder.stat()
    if found.st_uid not in (0, os.getuid()):
        raise _Unsafe(f"{folder} belongs to user {found.st_uid}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
        raise _Unsafe(f"others can write to {folder} (mode {stat.S_IMODE(found.st_mode):o})")


def _check_no_link(name: str, descriptor: int, place: Path) -> None:
    if stat.S_ISLNK(os.lstat(name, dir_fd=descriptor).st_mode):
        raise _Unsafe(f"{place} is a link")


def _check_folder(place: Path, found: os.stat_result) -> None:
    if found.st_uid != os.getuid():
        raise _Unsafe(f"{place} belongs to user {found.st_uid}")
    if found.st_mode & _FOR_OTHERS:
        raise _Unsafe(f"{place} is open to others (mode {stat.S_IMODE(found.st_mode):o})")


def _temporary(purpose: str, is_usable: Callable[[Path], bool]) -> Path:
    tried: list[str] = []
    try:
        places = [tempfile.gettempdir(), "/tmp", "/var/tmp"]
        for place in places:
            if not is_usable(Path(place)):
                tried.append(f"{place} cannot be used for it")
                continue
            try:
                return Path(tempfile.mkdtemp(prefix=f"{_OURS}-", dir=place))
            except OSError as error:
                tried.append(f"{place}: {error.strerror or error}")
    except OSError as error:  # there is no temporary directory at all
        tried.append(error.strerror or str(error))
    raise StorageUnavailable(
        f"there is no folder for {purpose}: {'; '.join(tried)}",
        hint="let XDG_CACHE_HOME or TMPDIR name a folder of your own, without a space in its path",
    )
