"""The files of the user's that a training script imports, executes or reads as configuration.

They belong to the study as the script does. Which files they are is known only by running the
script. Those that it has read when it calls `autotune.apply` decide what is trained: they are found
when the study is created, and every trial must read the same ones. Those that it first reads later
are added as trials find them. A file that the script itself writes may change from trial to trial.
"""

from collections.abc import Mapping

from autotune.errors import StudyMismatch
from autotune.spec.user_code import changed_since, script_folder, sha256_of
from autotune.spec.workload import Workload

WRITTEN = ""
"""Stands in place of the SHA-256 of a file that the script writes."""


def check_files_of_trial(
    workload: Workload, found: Mapping[str, str], *, has_read_all: bool = True
) -> None:
    """Raise StudyMismatch if a trial has read other files until `autotune.apply` than its study.

    `found` is {path: SHA-256}. Without `has_read_all`, as for a script that failed on the way, a
    file that it has not read is not missed. A study of an earlier release does not know its files.
    """
    known, later = workload.script_files, workload.script_files_after_apply
    if known is None:
        return
    for path in sorted({*known, *found}):
        expected = known.get(path, later.get(path))
        if WRITTEN in (expected, later.get(path), found.get(path)):
            continue
        if path not in found:
            if has_read_all:
                raise StudyMismatch(
                    f"the script no longer reads {path}, which the study was created with",
                    hint=_another_study("let it read the file"),
                )
        elif expected is None:
            raise StudyMismatch(
                f"the script now also reads {path}, which the study was not created with",
                hint=_another_study(
                    "remove what makes it read the file, or let it read the file in every trial"
                ),
            )
        elif expected != found[path]:
            raise changed_since(path)


def with_files_of_trial(
    known: Mapping[str, str] | None, later: Mapping[str, str], found: Mapping[str, str]
) -> dict[str, str]:
    """Return the files that are first read after `autotune.apply`, with those that a trial found.

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


def check_files_unchanged(workload: Workload) -> None:
    """Raise StudyMismatch if a file of the study's script is missing or has changed."""
    if workload.script is None:
        return
    folder = script_folder(workload.script)
    files = {**(workload.script_files or {}), **workload.script_files_after_apply}
    for path, sha256 in sorted(files.items()):
        if sha256 == WRITTEN:
            continue
        try:
            found = sha256_of(folder / path)
        except OSError as error:
            raise StudyMismatch(
                f"{path}, which the study was created with, cannot be read: {error.strerror}",
                hint=_another_study("restore the file"),
            ) from None
        if found != sha256:
            raise changed_since(path)


def _another_study(instead: str) -> str:
    return f"{instead}, or begin another study with another --name"
