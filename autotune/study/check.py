"""Checks studies: the database, and the results in the work folder that are not in it yet."""

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from autotune.errors import InvalidInput, StorageUnavailable
from autotune.spec.study import check_study_name
from autotune.storage.check import Checked, Finding, check_database
from autotune.storage.database import Database
from autotune.storage.identity import find_work_folder
from autotune.study.workers.outbox import OUTBOX_FOLDER, Outbox, read_result


def check_studies(storage: str, studies: Sequence[str] = ()) -> Checked:
    """Check all studies of a database, or those named; nothing is changed.

    Raises UnknownStudy and StorageUnavailable.
    """
    with closing(Database(storage, read_only=True)) as database:
        checked = check_database(database, studies)
    work = _work_folder(storage)
    findings = list(checked.findings)
    for name in checked.studies:
        if work is not None and _is_study_name(name):
            findings.extend(_check_outbox(name, work / name))
    return replace(checked, findings=tuple(findings))


def _work_folder(storage: str) -> Path | None:
    """Returns the work folder; None where the database that names it has lost its identity.

    The check of the database reports that.
    """
    try:
        return find_work_folder(storage)
    except StorageUnavailable:
        return None


def _is_study_name(study: str) -> bool:
    """Returns whether it is a valid name; the database's check reports an invalid one."""
    try:
        check_study_name(study)
    except InvalidInput:
        return False
    return True


def _check_outbox(study: str, folder: Path) -> Iterator[Finding]:
    """Yield findings for results not in the database yet, and for files that are not results."""
    where = f"study {study!r}"
    outbox = folder / OUTBOX_FOLDER
    readable: list[Path] = []
    damaged: list[Path] = []
    for file in sorted(outbox.glob("*.json")):
        with suppress(FileNotFoundError):  # delivered meanwhile
            if read_result(file) is None:
                damaged.append(file)
            else:
                readable.append(file)
    if readable:
        what = f"the finished result {readable[0]} waits"
        if len(readable) > 1:
            what = f"{len(readable)} finished results wait in {outbox}"
        to_do = f"the next autotune search --name {study} delivers them"
        yield Finding(where=where, what=what, to_do=to_do, is_fault=False)
    to_do = "look at it, then remove it"
    for file in damaged:
        yield Finding(where=where, what=f"{file} is not a complete result", to_do=to_do)
    for file in Outbox(outbox).left_over():
        what = (
            f"{file} is a result that cannot be read, or of an attempt or a study that the "
            "database does not know"
        )
        yield Finding(where=where, what=what, to_do=to_do, is_fault=False)
