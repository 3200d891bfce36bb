"""What must hold of a study of quick trials once all is over, whatever happened meanwhile."""

import os
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

from sqlalchemy import select

from autotune.spec.result import Measurement, TrialRecord
from autotune.storage.database import Database, sqlite_file
from autotune.storage.identity import find_work_folder
from autotune.storage.tables import ATTEMPTS, STUDIES, TRIALS
from autotune.study.workers.outbox import OUTBOX_FOLDER
from tests.quick_study.stand_in import measurement_of

MARK = "AUTOTUNE_PROOF"
"""An environment variable of every process of a proof; what they start has it from them."""


def violations(storage: str, study: str, *, trials: int | None = None) -> list[str]:
    """Returns violations of the study's promises, a sentence each; `trials`: expected results."""
    return [
        *_of_trials(storage, study, trials=trials),
        *_of_attempts(storage, study),
        *_of_spool(storage, study),
        *_of_file(storage),
    ]


def _of_trials(storage: str, study: str, *, trials: int | None) -> Iterator[str]:
    from autotune.storage.store import StudyStore

    with closing(StudyStore(storage)) as store:
        records = store.trials(study)
    if [record.number for record in records] != list(range(len(records))):
        yield f"the trials' numbers are not 0 to {len(records) - 1}, each once"
    if trials is not None and len(records) != trials:
        yield f"there are {len(records)} trials, {trials} were wanted"
    for fingerprint, count in Counter(record.config.fingerprint for record in records).items():
        if count > 1:
            yield f"there are {count} trials of {fingerprint}"
    for record in records:
        if not record.is_finished:
            yield f"trial {record.number} has no result"
        elif _measured(record) != asdict(measurement_of(record.config)):
            yield f"trial {record.number} has another result than its configuration gives"


def _measured(record: TrialRecord) -> dict[str, object]:
    """As its process said it: what the search adds is that it was compared with nothing."""
    fields = {name: getattr(record, name) for name in asdict(Measurement(outcome="ok"))}
    return asdict(replace(Measurement(**fields), parity=None, parity_message=None))


def _of_attempts(storage: str, study: str) -> Iterator[str]:
    query = (
        select(TRIALS.c.number, TRIALS.c.finished_at, ATTEMPTS.c.state)
        .select_from(TRIALS.join(STUDIES).outerjoin(ATTEMPTS))
        .where(STUDIES.c.name == study)
    )
    with closing(Database(storage, create=False)) as database, database.reading() as connection:
        rows = connection.execute(query).all()
    finished = Counter(row.number for row in rows if row.state == "finished")
    for number in {row.number for row in rows if row.finished_at is not None}:
        if finished[number] != 1:
            yield f"trial {number} has a result from {finished[number]} attempts"
    for row in rows:
        if row.state == "running":
            yield f"an attempt at trial {row.number} still runs"
        if row.state == "finished" and row.finished_at is None:
            yield f"an attempt at trial {row.number} is finished, and the trial has no result"


def _of_spool(storage: str, study: str) -> Iterator[str]:
    for file in sorted((find_work_folder(storage) / study / OUTBOX_FOLDER).glob("*")):
        yield f"the spool still has {file.name}"


def _of_file(storage: str) -> Iterator[str]:
    file = sqlite_file(storage)
    if file is not None:
        with closing(sqlite3.connect(file)) as connection:
            (said,) = connection.execute("PRAGMA integrity_check").fetchone()
        if said != "ok":
            yield f"the database file is not whole: {said}"


def processes(mark: str) -> list[str]:
    """`pid command` of every process that has the mark and has not ended."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            marked = f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
            command = (
                (folder / "cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
                .strip()
            )
        except OSError:
            continue
        if marked and command:  # a zombie has none
            found.append(f"{folder.name} {command}")
    return found
