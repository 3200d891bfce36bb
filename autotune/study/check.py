"""A look at studies with all that belongs to them: the database, and what waits beside it in the work folder."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from autotune.errors import InvalidInput, StorageUnavailable
from autotune.spec.study import check_study_name
from autotune.storage.database import Database
from autotune.storage.integrity.check import check_database
from autotune.storage.integrity.findings import Checked, Finding, RunningTrial
from autotune.study.work_folder import place_of_work
from autotune.study.workers.coordinator import WORKERS
from autotune.study.workers.liveness import is_dead
from autotune.study.workers.outbox import OUTBOX_FOLDER, Outbox, read_result


def check_studies(storage: str, studies: Sequence[str] = ()) -> Checked:
    """All studies of a database, or those named; nothing is changed.

    Raises UnknownStudy and StorageUnavailable.
    """
    checked = _looked_at(storage, studies)
    work = place_of_work(storage)
    folders = {name: work / name for name in checked.studies if _names_a_folder(name)}
    beside = [finding for name, folder in folders.items() for finding in _waiting(name, folder)]
    running = [
        finding
        for one in checked.running
        if one.study in folders
        for finding in _running(one, folders[one.study] / WORKERS)
    ]
    return replace(checked, findings=(*checked.findings, *running, *beside))


def _names_a_folder(study: str) -> bool:
    """What cannot be a study's name is a finding of the database's check already."""
    try:
        check_study_name(study)
    except InvalidInput:
        return False
    return True


def _looked_at(storage: str, studies: Sequence[str]) -> Checked:
    """Again where somebody began to write into a file that nobody had open, and was read as such."""
    while True:
        database = Database(storage, read_only=True)
        try:
            checked = check_database(database, studies)
            if not database.has_been_opened_meanwhile:
                return checked
        except StorageUnavailable:
            if not database.has_been_opened_meanwhile:
                raise
        finally:
            database.close()


def _running(one: RunningTrial, workers: Path) -> Iterator[Finding]:
    what = (
        "its worker has ended"
        if is_dead(workers, one.worker)
        else "its lease is over"
        if one.is_expired
        else None
    )
    if what:
        yield Finding(
            where=f"study {one.study!r}, trial {one.number}",
            what=f"is said to be running, and {what}",
            to_do=_goes_on(one.study, "gives it up and tries again"),
            is_fault=False,
        )


def _waiting(study: str, folder: Path) -> Iterator[Finding]:
    where = f"study {study!r}"
    whole, damaged = list[Path](), list[Path]()
    for file in sorted((folder / OUTBOX_FOLDER).glob("*.json")):
        with suppress(FileNotFoundError):  # delivered meanwhile
            (damaged if read_result(file) is None else whole).append(file)
    if whole:
        what = (
            f"{len(whole)} finished results wait in {folder / OUTBOX_FOLDER}"
            if len(whole) > 1
            else _waits(whole[0])
        )
        yield Finding(
            where=where, what=what, to_do=_goes_on(study, "delivers them"), is_fault=False
        )
    for file in damaged:
        yield Finding(
            where=where, what=f"{file} is no whole result", to_do="look at it, then remove it"
        )
    for file in Outbox(folder / OUTBOX_FOLDER).left_over():
        what = f"{file} is a result that could not be read, or of an attempt that the database does not know"
        yield Finding(where=where, what=what, to_do="look at it, then remove it", is_fault=False)


def _waits(file: Path) -> str:
    return f"the finished result {file} waits"


def _goes_on(study: str, does: str) -> str:
    return f"the next autotune search --name {study} {does}"
