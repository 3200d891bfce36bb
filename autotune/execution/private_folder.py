"""Creates folders outside a study's folder that other users of the machine cannot tamper with.

A folder with a predictable name in a shared temporary directory belongs to the user who creates it
first. inductor unpickles and loads what it finds in its cache, so that another user who created
that folder could run code as this user. Therefore a folder is created in the user's cache
directory with mode 0700. It is used only where it belongs to this user, is not a link, is
closed to others, and cannot be replaced by others. Otherwise a new folder of `tempfile.mkdtemp` is
used, and a note says why.

These are all locations outside the study's folder that this package or a trial's process writes to:

- inductor's and Triton's cache of a study whose path contains a space (`compile_cache.py`): created
  here. Otherwise the cache is in the study's folder. The trial server also gets its own cache:
  torch creates one when it is imported, and uses its default, `/tmp/torchinductor_<user>`,
  regardless of who created it.
- what a probe has seen to work on a device (`probe_cache.py`), and predictions
  (`kept_predictions.py`): created here.
- lock files of device slots, where abstract sockets are not available (`device_slots.py`): created
  here, or in the folder that `AUTOTUNE_LOCK_FOLDER` names, for which the user is responsible.
- the socket of trainings that are timed in turn (`in_turn.py`): `tempfile.mkdtemp`, new, random
  name, mode 0700.
- `tempfile.TemporaryDirectory` in `api.predict` and in the commands doctor, explain, fit, plot and
  predict (logs and compiler cache of one call), and in `data/validation.py` (a dataset that is
  checked): new, random name, mode 0700.
- `tempfile.TemporaryDirectory` in `storage/transfer.py` (a file of studies, written or read): new,
  random name, mode 0700.
- outputs of commands: `--out` of export, report, plot, compare and studies export; reports, figures
  and exports in `studies/` of the current folder; the database of `--storage` with its work folder
  next to it.
- outputs of a user's training script, in the folder that the search was started in.
- caches of the libraries, in the user's home unless their variables say otherwise; other users
  cannot write there: `datasets`, `huggingface_hub` and `transformers` (HF_HOME,
  `~/.cache/huggingface`; remote code is never loaded), CUDA (CUDA_CACHE_PATH, `~/.nv`), torch's
  extensions and hub (`~/.cache/torch_extensions`, `~/.cache/torch`).
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

_PARENT_NAME = "autotune"
_GROUP_AND_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, kw_only=True)
class PrivateFolder:
    path: Path
    note: str = ""
    """One sentence for the user where `path` is a temporary folder, which is not reused; else
    empty."""

    @property
    def is_temporary(self) -> bool:
        return bool(self.note)


def cache_bases() -> list[Path]:
    """Returns the user's cache folder, which survives a restart; empty without a home."""
    cache = _folder_of_variable("XDG_CACHE_HOME")
    if cache is not None:
        return [cache]
    try:
        return [Path.home() / ".cache"]
    except RuntimeError:  # a user id without a home, as in a container
        return []


def _folder_of_variable(variable: str) -> Path | None:
    """Returns the folder a variable names; a relative one is ignored, as XDG specifies."""
    path = Path(os.environ.get(variable, ""))
    return path if path.is_absolute() else None


def private_folder(
    name: str,
    *,
    purpose: str,
    bases: Sequence[Path],
    is_usable: Callable[[Path], bool] = lambda path: True,
) -> PrivateFolder:
    """Returns the folder `autotune/<name>` in the first of `bases` where it is safe.

    It is created where it does not exist. Otherwise returns a temporary folder with a note that
    says what it is for (`purpose`) and why it is needed. Raises StorageUnavailable where that
    cannot be created either.
    """
    reasons = []
    for base in bases:
        folder = base / _PARENT_NAME / name
        if not is_usable(folder):
            reasons.append(f"{folder} cannot be used for it")
            continue
        try:
            _create(base, (_PARENT_NAME, name))
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


def safe_cache_folder(name: str) -> Path:
    """Returns the folder `autotune/<name>` in the user's cache folder, created where it is missing.

    For files that can be done without: raises OSError where that folder is not safe.
    """
    for base in cache_bases():
        try:
            _create(base, (_PARENT_NAME, name))
        except _Unsafe as error:
            raise PermissionError(str(error)) from None
        return base / _PARENT_NAME / name
    raise FileNotFoundError("this user has no home")


class _Unsafe(Exception):
    """A folder is not safe; the text says which one and why."""


def _create(base: Path, names: Sequence[str]) -> None:
    """Creates the nested folders `names` in `base`, and checks each by its open descriptor.

    Raises _Unsafe and OSError.
    """
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    real = base.resolve()
    for parent in (real, *real.parents):
        _check_parent(parent)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(real, flags | os.O_NOFOLLOW)
    path = base
    try:
        for name in names:
            path = path / name
            try:
                os.mkdir(name, mode=0o700, dir_fd=descriptor)
            except FileExistsError:
                _check_no_link(name, descriptor, path)
            opened = os.open(name, flags | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = opened
            _check_folder(path, os.fstat(descriptor))
    finally:
        os.close(descriptor)


def _check_parent(folder: Path) -> None:
    """Raises _Unsafe where others can replace what is in a folder.

    They can where they can write into it, unless it is sticky, as /tmp is.
    """
    status = folder.stat()
    if status.st_uid not in (0, os.getuid()):
        raise _Unsafe(f"{folder} belongs to user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX:
        raise _Unsafe(f"others can write to {folder} (mode {stat.S_IMODE(status.st_mode):o})")


def _check_no_link(name: str, descriptor: int, path: Path) -> None:
    if stat.S_ISLNK(os.lstat(name, dir_fd=descriptor).st_mode):
        raise _Unsafe(f"{path} is a link")


def _check_folder(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.getuid():
        raise _Unsafe(f"{path} belongs to user {status.st_uid}")
    if status.st_mode & _GROUP_AND_OTHERS:
        raise _Unsafe(f"{path} is open to others (mode {stat.S_IMODE(status.st_mode):o})")


def _temporary(purpose: str, is_usable: Callable[[Path], bool]) -> Path:
    failures: list[str] = []
    try:
        for folder in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
            if not is_usable(Path(folder)):
                failures.append(f"{folder} cannot be used for it")
                continue
            try:
                return Path(tempfile.mkdtemp(prefix=f"{_PARENT_NAME}-", dir=folder))
            except OSError as error:
                failures.append(f"{folder}: {error.strerror or error}")
    except OSError as error:  # there is no temporary directory at all
        failures.append(error.strerror or str(error))
    raise StorageUnavailable(
        f"there is no folder for {purpose}: {'; '.join(failures)}",
        hint="set XDG_CACHE_HOME or TMPDIR to a folder of yours, without a space in its path",
    )
