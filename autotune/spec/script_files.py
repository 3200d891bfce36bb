"""The files of the user's that a training script, or the function of a model, imports or reads.

They belong to the study as the script does, and are found by running it. Code (Python, and what is
read as configuration) that was read when the script calls `autotune.apply`, or when the model is
built, decides what is trained: it is found when the study is created, and every trial must read the
same. Data, and what is first read later, is added as trials find it. What a study reads itself, its
text and the files of a tokenizer or of pretrained weights, belongs to it, too. A file that the code
itself writes may change from trial to trial.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from autotune.errors import StudyMismatch
from autotune.spec.model_file import weight_files
from autotune.spec.user_code import (
    changed_since,
    is_function_reference,
    read_reference,
    script_folder,
    sha256_of,
)
from autotune.spec.user_files import open_file
from autotune.spec.user_paths import expanded, is_plain_file, path_exists
from autotune.spec.workload import STANDARD_LIBRARY_TEXT, Workload

WRITTEN = ""
"""Stands in place of the SHA-256 of a file that the code writes."""

CODE_SUFFIXES = (".py", ".json", ".yaml", ".yml", ".toml", ".ini", ".cfg")
"""Suffixes of Python files and of configuration files. Other files are data."""

LARGEST_WHOLE_BYTES = 2**26
"""Of a larger file the size and some pieces are hashed, which takes milliseconds for any size."""
_PIECES = 64
_PIECE_BYTES = 2**16
MOST_IN_A_FOLDER = 100
"""More files of data in one folder count together, by their names and sizes."""


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def is_code(path: str) -> bool:
    """Returns whether the file is Python or configuration."""
    return path.endswith(CODE_SUFFIXES)


def folder_of_code(workload: Workload) -> Path:
    """Returns the absolute folder of the workload's code, to which paths of files are relative.

    It is the current folder for a module, and for a workload without code of the user's.
    """
    if workload.script is not None:
        return script_folder(workload.script)
    if is_function_reference(workload.model):
        return script_folder(read_reference(workload.model).place)
    return Path.cwd()


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a file's content. Raises OSError.

    Of a file above `LARGEST_WHOLE_BYTES` it is that of its size and of pieces at equal distances;
    of a folder that of the names and sizes of its files with the most frequent suffix.
    """
    if path.is_dir():
        with os.scandir(path) as entries:
            sizes = sorted((one.name, one.stat().st_size) for one in entries if one.is_file())
        suffixes = Counter(Path(name).suffix for name, _ in sizes)
        most_frequent = max(suffixes, key=suffixes.__getitem__, default="")
        data = [(name, size) for name, size in sizes if Path(name).suffix == most_frequent]
        return hashlib.sha256(repr(data).encode()).hexdigest()
    size_bytes = path.stat().st_size
    if size_bytes <= LARGEST_WHOLE_BYTES:
        return sha256_of(path)
    digest = hashlib.sha256(str(size_bytes).encode())
    with open_file(path) as opened:
        for piece in range(_PIECES):
            opened.seek((size_bytes - _PIECE_BYTES) * piece // (_PIECES - 1))
            digest.update(opened.read(_PIECE_BYTES))
    return digest.hexdigest()


def check_files_of_trial(
    workload: Workload, found: Mapping[str, str], *, has_read_all: bool = True
) -> None:
    """Raise StudyMismatch if a trial has read other code than its study, or changed data.

    `found` is {path: SHA-256} of what was read until `autotune.apply`, or to build the model.
    Without `has_read_all`, as for a script that failed on the way, a file that it has not read is
    not missed. Data may be read from a cache in its place, and is not missed either. A study of an
    earlier release does not know its files.
    """
    known, later = workload.script_files, workload.script_files_after_apply
    if known is None:
        return
    who = "the model" if workload.script is None else "the script"
    for path in sorted({*known, *found}):
        expected = known.get(path, later.get(path))
        if WRITTEN in (expected, later.get(path), found.get(path)):
            continue
        if path not in found:
            if has_read_all:
                raise StudyMismatch(
                    f"{who} no longer reads {path}, which the study was created with",
                    hint=_another_study("let it read the file"),
                )
        elif expected is None:
            if is_code(path):
                raise StudyMismatch(
                    f"{who} now also reads {path}, which the study was not created with",
                    hint=_another_study(
                        "remove what makes it read the file, or let it read the file in every trial"
                    ),
                )
        elif expected != found[path]:
            raise changed_since(path)


def with_files_of_trial(
    known: Mapping[str, str] | None, later: Mapping[str, str], found: Mapping[str, str]
) -> dict[str, str]:
    """Returns the files that are not `known` from the start, with those that a trial found.

    Raises StudyMismatch if one of them has changed since another trial has read it.
    """
    merged = dict(later)
    for path, sha256 in sorted(found.items()):
        expected = merged.get(path, (known or {}).get(path))
        if sha256 == WRITTEN:
            merged[path] = WRITTEN
        elif expected is None:
            merged[path] = sha256
        elif expected not in (WRITTEN, sha256):
            raise changed_since(path)
    return merged


def input_files(workload: Workload) -> dict[str, str]:
    """Returns {path: SHA-256} of the local files that a study of the workload is prepared from.

    These are its text, its tokenizer and its pretrained weights. A path is as the workload names
    it, or relative to the folder of the code.
    """
    if workload.script is not None:
        return {}
    files = [*_dataset_files(workload), *_tokenizer_files(workload.tokenizer)]
    if workload.pretrained and workload.model_source is not None:
        files += weight_files(Path(workload.model_source))
    folder = folder_of_code(workload)
    found = {}
    for file in files:
        name = file.as_posix() if file.is_absolute() else os.path.relpath(file, folder)
        with suppress(OSError):  # it is gone by now
            found[name + "/" if file.is_dir() else name] = digest_of(file)
    return found


def _dataset_files(workload: Workload) -> list[Path]:
    """Returns the files of a local dataset, or where there are many, their folders."""
    path = expanded(workload.dataset)
    if workload.dataset == STANDARD_LIBRARY_TEXT or not path_exists(workload.dataset):
        return []
    if not path.is_dir():
        return [path] if is_plain_file(path) else []
    files = []
    for file in sorted(path.rglob("*")):
        is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        is_card = file.suffix == ".md" and workload.dataset_config is None
        if is_plain_file(file) and not is_hidden and not is_card:
            files.append(file)
    if len(files) > MOST_IN_A_FOLDER:
        return sorted({file.parent for file in files})
    return files


def _tokenizer_files(name: str) -> list[Path]:
    path = expanded(name)
    if name in ("bytes", "bpe") or not path_exists(name):
        return []
    folder = path if path.is_dir() else path.parent
    files = {path, *(folder / file for file in _TOKENIZER_FILES)}
    return [file for file in sorted(files) if is_plain_file(file)]


def check_files_unchanged(workload: Workload) -> None:
    """Raise StudyMismatch if a file of the study's is missing or has changed."""
    folder = folder_of_code(workload)
    for path, sha256 in sorted(files_of(workload).items()):
        if sha256 == WRITTEN:
            continue
        try:
            found = digest_of(folder / path)
        except OSError as error:
            raise StudyMismatch(
                f"{path}, which the study was created with, cannot be read: {error.strerror}",
                hint=_another_study("restore it"),
            ) from None
        if found != sha256:
            raise changed_since(path)


def files_of(workload: Workload) -> dict[str, str]:
    """Returns {path: SHA-256} of all files that are known to belong to the workload."""
    return {**(workload.script_files or {}), **workload.script_files_after_apply}


def have_same_files(earlier: Workload, new: Workload) -> bool:
    """Returns whether the code of both workloads, whose identities are equal, has read the same.

    What the trials of `earlier` have read late, and `new` has not yet, must be there unchanged.
    """
    known = files_of(earlier)
    if WRITTEN in known.values():
        return False  # nobody knows what it was
    for path, sha256 in new.script_files_after_apply.items():
        if known.get(path) != sha256:
            return False
    try:
        check_files_unchanged(earlier)
    except StudyMismatch:
        return False
    return True


def _another_study(instead: str) -> str:
    return f"{instead}, or begin another study with another --name"
