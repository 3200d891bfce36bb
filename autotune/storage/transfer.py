"""Copies whole studies from one database to another, of any kind, by way of a file if need be.

A file of studies is itself a SQLite studies database, which has them and nothing else. Rows are
read in full and checked before one of them is stored: a file may be by somebody else, SQLite checks
neither types nor ranges, and PostgreSQL would reject what SQLite has accepted.
"""

import math
import shutil
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Connection,
    DateTime,
    Float,
    Integer,
    Select,
    String,
    Table,
    insert,
    select,
)

from autotune.errors import (
    InvalidInput,
    StorageUnavailable,
    StudyMismatch,
    UnknownStudy,
)
from autotune.spec.attempt import new_attempt_id
from autotune.spec.confirmation import new_confirmation_id
from autotune.spec.reading import shown
from autotune.spec.study import check_study_name
from autotune.spec.user_files import open_file
from autotune.storage.database import Database
from autotune.storage.error_translation import Conflict, check_schema_version, unknown_study
from autotune.storage.rows import (
    DamagedRow,
    check_attempt_row,
    confirmation_from_row,
    definition_from_row,
    forecast_from_row,
    record_from_row,
    storable_text,
)
from autotune.storage.schema import open_studies
from autotune.storage.stored_columns import Unreadable
from autotune.storage.tables import ATTEMPTS, CONFIRMATIONS, PREDICTIONS, STUDIES, TRIALS

SQLITE_HEADER = b"SQLite format 3\0"

_FIRST_YEAR, _LAST_YEAR = 1970, 9998
"""Of a date: half a day more or less, in another time zone, is still a date."""

_COPY_AGAIN = "copy the file again, or export the studies again"
_HOW_TO_EXPORT = (
    "such a file is written by: autotune studies export STUDY --out FILE; lines of JSON are of an "
    "earlier autotune, which also imports them"
)


@dataclass(frozen=True, kw_only=True)
class StudyRows:
    """All rows of one study, checked, without the numbers of rows in their database."""

    study: Mapping[str, Any]
    trials: Sequence[Mapping[str, Any]]
    predictions: Sequence[Mapping[str, Any]]
    attempts: Sequence[tuple[int, Mapping[str, Any]]]
    """Each with the number of its trial."""
    confirmations: Sequence[Mapping[str, Any]]

    @property
    def name(self) -> str:
        return str(self.study["name"])


# -- reading ---------------------------------------------------------------------------------------


def read_studies(database: Database, names: Sequence[str] | None = None) -> list[StudyRows]:
    """Returns the studies of these names, or all, from one snapshot of the database.

    Raises UnknownStudy, and StorageUnavailable for a row that could not be stored in any database.
    """
    with database.snapshot() as connection:
        rows = {row.name: row for row in connection.execute(select(STUDIES).order_by(STUDIES.c.id))}
        for name in names or ():
            if name not in rows:
                raise unknown_study(name, rows, url=database.url)
        studies = []
        for name in rows if names is None else names:
            check_schema_version(name, rows[name].schema_version, url=database.url)
            studies.append(_read_study(connection, rows[name]))
        return studies


def _read_study(connection: Connection, study: Any) -> StudyRows:
    """Returns all rows of a study. Raises DamagedRow."""
    definition = definition_from_row(study)
    study_values = _checked_values(STUDIES, study)
    trials: list[Mapping[str, Any]] = []
    for row in connection.execute(_of_study(TRIALS, study, order="number")):
        _check_next("trial", row.number, len(trials), study)
        record_from_row(row, cap_bytes=definition.cap_bytes)
        trial_values = _checked_values(TRIALS, row)
        if (row.measurement is None) != (row.finished_at is None):
            raise DamagedRow(
                f"trial {row.number} has a result without its date, or a date without a result"
            )
        if row.revision > study.revision:
            raise DamagedRow(f"trial {row.number} is younger than its study's last change")
        trials.append(trial_values)
    predictions = []
    for row in connection.execute(_of_study(PREDICTIONS, study, order="fingerprint")):
        forecast_from_row(row)
        predictions.append(_checked_values(PREDICTIONS, row))
    attempts = []
    of_trials = (
        select(ATTEMPTS, TRIALS.c.number)
        .join(TRIALS, ATTEMPTS.c.trial_id == TRIALS.c.id)
        .where(TRIALS.c.study_id == study.id)
        .order_by(TRIALS.c.number, ATTEMPTS.c.ordinal)
    )
    for row in connection.execute(of_trials):
        check_attempt_row(row)
        attempts.append((row.number, _checked_values(ATTEMPTS, row)))
    confirmations: list[Mapping[str, Any]] = []
    for row in connection.execute(_of_study(CONFIRMATIONS, study, order="ordinal")):
        _check_next("confirmation", row.ordinal, len(confirmations) + 1, study)
        confirmation_from_row(row)
        confirmations.append(_checked_values(CONFIRMATIONS, row))
    return StudyRows(
        study=study_values,
        trials=trials,
        predictions=predictions,
        attempts=attempts,
        confirmations=confirmations,
    )


def _of_study(table: Table, study: Any, *, order: str) -> Select[Any]:
    return select(table).where(table.c.study_id == study.id).order_by(order)


def _check_next(kind: str, number: Any, expected: int, study: Any) -> None:
    """Raises DamagedRow where a row is missing between `number` and the one before it."""
    if number != expected:
        raise DamagedRow(
            f"{kind} {expected} of study {study.name!r} is missing: the next is {shown(number)}"
        )


def _checked_values(table: Table, row: Any) -> dict[str, Any]:
    """Returns what every database can store of a row, by column.

    Left out are the columns that mean something in one database only: numbers of rows. Raises
    DamagedRow.
    """
    values = {}
    for column in table.columns:
        is_row_number = column.primary_key and isinstance(column.type, Integer)
        if not is_row_number and not column.foreign_keys:
            values[column.name] = _checked_value(column, getattr(row, column.name), table)
    return values


def _checked_value(column: Column[Any], value: Any, table: Table) -> Any:
    """Returns `value` as every database can store it.

    Texts that are too long are cut; infinities and NaN, which older databases have, become null; a
    date is one in UTC. Raises DamagedRow for a value of another type, or that is too large.
    """
    value = _finite(value)
    if value is None and column.nullable:
        return None
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    match column.type:
        case String(length=longest) if isinstance(value, str):
            return storable_text(value, longest=longest or len(value))
        case JSON() if isinstance(value, dict):
            return value
        case DateTime() if isinstance(value, datetime) and _FIRST_YEAR <= value.year <= _LAST_YEAR:
            return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
        case Float() if is_whole or isinstance(value, float):
            return value
        case BigInteger() if is_whole:
            return value
        case Integer() if is_whole and -(2**31) <= value < 2**31:
            return value
    found = value.why if isinstance(value, Unreadable) else f"is {shown(value)}"
    raise DamagedRow(f"a row of {table.name} cannot be read: {column.name} {found}")


def _finite(value: Any) -> Any:
    """Returns `value` with null in place of infinities and NaN, at any depth."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# -- adding ----------------------------------------------------------------------------------------


def add_studies(
    database: Database, studies: Sequence[StudyRows], *, new_name: str | None = None
) -> None:
    """Adds whole studies to a database, in one transaction.

    `new_name` is for a single study. Raises InvalidInput, and StudyMismatch for studies that exist
    already; then nothing is changed.
    """
    names = [study.name for study in studies]
    if new_name is not None:
        check_study_name(new_name)
        if len(studies) != 1:
            raise InvalidInput(
                f"--name {new_name} is for one study, and there are {', '.join(names)}",
                hint="leave --name out, or export them one by one",
            )
        names = [new_name]
    try:
        with database.writing() as connection:
            _reject_existing_studies(connection, database.url, names)
            for name, study in zip(names, studies, strict=True):
                _add_study(connection, study, name)
    except Conflict as error:
        raise StudyMismatch(
            f"the studies cannot be added to {database.url}: {error.message}",
            hint=f"{_COPY_AGAIN}; a study of that name may have been added meanwhile",
        ) from None


def _reject_existing_studies(connection: Connection, url: str, names: Sequence[str]) -> None:
    known = set(connection.scalars(select(STUDIES.c.name)))
    existing = [name for name in names if name in known]
    if existing:
        raise StudyMismatch(
            f"{url} has a study {existing[0]!r} already",
            hint="import it as another, from a file of its own: --name NEW; or name another "
            "database with --storage",
        )


def _add_study(connection: Connection, study: StudyRows, name: str) -> None:
    """Inserts a study with all that belongs to it; attempts and confirmations get ids of the copy.

    An attempt that was running counts as given up: its worker knows the other database only.
    """
    inserted = connection.execute(insert(STUDIES).values({**study.study, "name": name}))
    (study_id,) = inserted.inserted_primary_key or (None,)
    of_study = {"study_id": study_id}
    _insert(connection, TRIALS, [{**row, **of_study} for row in study.trials])
    _insert(connection, PREDICTIONS, [{**row, **of_study} for row in study.predictions])
    trials = select(TRIALS.c.number, TRIALS.c.id).where(TRIALS.c.study_id == study_id)
    trial_ids = {row.number: row.id for row in connection.execute(trials)}
    attempts = []
    for number, row in study.attempts:
        copied = {**row, "trial_id": trial_ids[number], "id": new_attempt_id()}
        if row["state"] == "running":
            copied |= {"state": "given_up", "cause": "was running when the study was exported"}
            copied["ended_at"] = row["started_at"]
        attempts.append(copied)
    _insert(connection, ATTEMPTS, attempts)
    confirmations = [
        {**row, **of_study, "id": new_confirmation_id()} for row in study.confirmations
    ]
    _insert(connection, CONFIRMATIONS, confirmations)


def _insert(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        connection.execute(insert(table), rows)


# -- files -----------------------------------------------------------------------------------------


def write_file(studies: Sequence[StudyRows], target: BinaryIO) -> None:
    """Writes a SQLite database of these studies.

    It is made in a temporary folder, as `target` may be on a network file system, or a pipe.
    """
    with TemporaryDirectory(prefix="autotune-") as folder:
        file = Path(folder, "studies.db")
        with closing(Database(f"sqlite:///{file}", create=True)) as database:
            open_studies(database, create=True)
            add_studies(database, studies)
        with file.open("rb") as written:
            shutil.copyfileobj(written, target)


def read_file(file: Path) -> list[StudyRows]:
    """Returns the studies of a SQLite database, which is not changed, also of an earlier autotune.

    Raises InvalidInput for a file that cannot be imported as a whole.
    """
    with TemporaryDirectory(prefix="autotune-") as folder:
        copy = Path(folder, "studies.db")
        _copy_database(file, copy)
        url = f"sqlite:///{copy}"
        try:
            with closing(Database(url)) as database:
                open_studies(database, create=False, is_copy=True)
                studies = read_studies(database)
        except (StorageUnavailable, UnknownStudy) as error:
            message = error.message.replace(url, str(file))
            raise InvalidInput(f"{file} cannot be imported: {message}", hint=_COPY_AGAIN) from None
    if not studies:
        raise InvalidInput(f"{file} has no studies", hint=_HOW_TO_EXPORT)
    return studies


def _copy_database(file: Path, copy: Path) -> None:
    """Copies a database that may be by anybody. Raises InvalidInput for one that must not be read.

    SQLite runs the statements of a view when it is read and those of a trigger with a change, as of
    an upgrade; they can be without end. autotune creates neither.
    """
    try:
        with open_file(file) as opened, copy.open("wb") as copied:
            header = opened.read(len(SQLITE_HEADER))
            if header != SQLITE_HEADER:
                raise InvalidInput(f"{file} is not a file of exported studies", hint=_HOW_TO_EXPORT)
            copied.write(header)
            shutil.copyfileobj(opened, copied)
    except OSError as error:
        raise InvalidInput(
            f"{file} cannot be read: {error.strerror or error}",
            hint="name a file that autotune studies export has written",
        ) from None
    if file.with_name(f"{file.name}-wal").exists():
        raise InvalidInput(
            f"{file} is in use: a part of it is in {file.name}-wal",
            hint=f"export the study from it: autotune studies export STUDY --storage "
            f"sqlite:///{file} --out FILE",
        )
    try:
        with closing(sqlite3.connect(copy)) as connection:
            (damage,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            program = connection.execute(
                "SELECT type, name FROM sqlite_master WHERE type IN ('view', 'trigger')"
            ).fetchone()
    except sqlite3.Error as error:
        damage, program = str(error), None
    if damage != "ok":
        raise InvalidInput(f"{file} is damaged: {damage}", hint=_COPY_AGAIN)
    if program is not None:
        raise InvalidInput(
            f"{file} has a {program[0]} {program[1]!r:.100}, which autotune has not created",
            hint="ask whoever made it for an export of the study",
        )
