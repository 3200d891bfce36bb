"""Exports whole studies from a database as lines of JSON, and imports them into another one."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from sqlalchemy import Connection, Select, insert, select

from autotune.errors import InvalidInput, StudyMismatch, UnknownStudy, suggestion
from autotune.spec.attempt import new_attempt_id
from autotune.spec.confirmation import new_confirmation_id
from autotune.spec.study import check_study_name
from autotune.storage.database import Database
from autotune.storage.error_translation import Conflict, check_schema_version
from autotune.storage.rows import (
    DamagedRow,
    confirmation_from_row,
    definition_from_row,
    forecast_from_row,
    record_from_row,
)
from autotune.storage.tables import (
    ATTEMPTS,
    CONFIRMATIONS,
    PREDICTIONS,
    SCHEMA_VERSION,
    STUDIES,
    TRIALS,
)
from autotune.storage.transfer.import_reader import ImportReader, Line, check_export, read_lines
from autotune.storage.transfer.json_lines import (
    FORMAT,
    Kind,
    column_names,
    encode_line,
    storable_value,
)

_ROWS_AT_A_TIME = 500


# -- export ----------------------------------------------------------------------------------------


def export_lines(database: Database, studies: Sequence[str], *, version: str) -> Iterator[bytes]:
    """Yields the lines of an export file of `studies`, from one snapshot of the database.

    Raises UnknownStudy, and StorageUnavailable for damage.
    """
    digest = hashlib.sha256()
    count = 0
    for line in _lines(database, studies, version=version):
        digest.update(line)
        count += 1
        yield line
    yield encode_line("end", {"lines": count, "sha256": digest.hexdigest()})


def _lines(database: Database, studies: Sequence[str], *, version: str) -> Iterator[bytes]:
    with database.snapshot() as connection:
        rows = {row.name: row for row in connection.execute(select(STUDIES).order_by(STUDIES.c.id))}
        for name in studies:
            if name not in rows:
                hint = "begin one with: autotune search"
                if rows:
                    hint = suggestion(name, rows, otherwise=f"there is {', '.join(rows)}")
                raise UnknownStudy(f"there is no study {name!r} in {database.url}", hint=hint)
        yield encode_line(
            "studies", {"autotune": version, "format": FORMAT, "studies": list(studies)}
        )
        for name in studies:
            check_schema_version(name, rows[name].schema_version, url=database.url)
            yield from _study_lines(connection, rows[name])


def _study_lines(connection: Connection, study: Any) -> Iterator[bytes]:
    """Yields the lines of one study.

    Raises DamagedRow for a row that cannot be read: it could not be imported again.
    """
    definition_from_row(study)
    yield _line("study", study)
    is_of_study = TRIALS.c.study_id == study.id
    trials = select(TRIALS).where(is_of_study).order_by(TRIALS.c.number)
    for number, row in enumerate(_rows(connection, trials)):
        if row.number != number:
            raise DamagedRow(f"trial {number} of study {study.name!r} is missing")
        record_from_row(row, cap_bytes=study.cap_bytes)
        yield _line("trial", row)
    predictions = (
        select(PREDICTIONS).where(PREDICTIONS.c.study_id == study.id).order_by("fingerprint")
    )
    for row in _rows(connection, predictions):
        forecast_from_row(row)
        yield _line("prediction", row)
    attempts = (
        select(ATTEMPTS, TRIALS.c.number.label("trial"))
        .join(TRIALS, ATTEMPTS.c.trial_id == TRIALS.c.id)
        .where(is_of_study)
        .order_by(TRIALS.c.number, ATTEMPTS.c.ordinal)
    )
    for row in _rows(connection, attempts):
        yield _line("attempt", row)
    confirmations = (
        select(CONFIRMATIONS)
        .where(CONFIRMATIONS.c.study_id == study.id)
        .order_by(CONFIRMATIONS.c.ordinal)
    )
    for ordinal, row in enumerate(_rows(connection, confirmations), start=1):
        if row.ordinal != ordinal:
            raise DamagedRow(f"confirmation {ordinal} of study {study.name!r} is missing")
        confirmation_from_row(row)
        yield _line("confirmation", row)


def _rows(connection: Connection, query: Select[Any]) -> Iterator[Any]:
    yield from connection.execute(query, execution_options={"yield_per": _ROWS_AT_A_TIME})


def _line(kind: Kind, row: Any) -> bytes:
    content: dict[str, Any] = {}
    if kind == "attempt":
        content["trial"] = row.trial
    for name in column_names(kind):
        content[name] = storable_value(kind, name, getattr(row, name))
    return encode_line(kind, content)


# -- import ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What an import has added: the names of the studies, and their number of trials in all."""

    studies: tuple[str, ...]
    trials: int


def check_file(file: BinaryIO, *, source: str) -> None:
    """Reads a seekable file to its end, and returns to its beginning; a pipe is left as it is.

    Raises InvalidInput for a line that cannot be imported.
    """
    if file.seekable():
        check_export(file, source=source)
        file.seek(0)


def import_studies(
    database: Database, file: BinaryIO, *, source: str, name: str | None = None
) -> Imported:
    """Imports the studies of a file that `export_lines` wrote, in one transaction.

    `name` is a new name, for a file with one study. Raises InvalidInput for a file that is
    truncated, changed or not an export, and StudyMismatch for studies that exist already; then
    nothing is changed.
    """
    if name is not None:
        check_study_name(name)
    try:
        with database.writing() as connection:
            return _import_lines(connection, database.url, file, source=source, name=name)
    except Conflict:
        raise StudyMismatch(
            f"{source} has attempts or confirmations that are in {database.url} already, or were "
            "just imported",
            hint="give the study another name with --name",
        ) from None


def _import_lines(
    connection: Connection, url: str, file: BinaryIO, *, source: str, name: str | None
) -> Imported:
    lines = read_lines(file, source=source)
    header = next(lines)
    names = header.studies()
    if name is not None and len(names) != 1:
        raise InvalidInput(
            f"--name {name} is for a file with one study, {source} has {', '.join(names)}",
            hint="leave --name out, or export them one by one",
        )
    _reject_existing_studies(connection, url, [name] if name is not None else names)
    trials = 0
    for study in ImportReader.read_studies(lines, names=names, source=source):
        trials += _StudyWriter(connection, study, new_name=name).write()
    return Imported(studies=tuple(names if name is None else [name]), trials=trials)


def _reject_existing_studies(connection: Connection, url: str, names: Sequence[str]) -> None:
    known = set(connection.scalars(select(STUDIES.c.name)))
    existing = [name for name in names if name in known]
    if not existing:
        return
    if len(existing) == 1:
        found = f"there is a study {existing[0]!r}"
    else:
        found = f"there are studies {', '.join(existing)}"
    if len(names) == 1:
        hint = "import it as another: --name NEW"
    else:
        hint = "export each study to a file of its own, and import it with --name NEW"
    raise StudyMismatch(
        f"{found} in {url} already", hint=f"{hint}; or name another database with --storage"
    )


class _StudyWriter:
    """Inserts the rows of one study while they are read, in batches."""

    def __init__(
        self, connection: Connection, study: ImportReader, *, new_name: str | None
    ) -> None:
        self._connection, self._study, self._new_name = connection, study, new_name

    def write(self) -> int:
        """Inserts the study with all that belongs to it; returns its number of trials."""
        row = {**self._study.row, "schema_version": SCHEMA_VERSION}
        if self._new_name:
            row["name"] = self._new_name
        inserted = self._connection.execute(insert(STUDIES).values(row))
        (study_id,) = inserted.inserted_primary_key or (None,)
        self._insert(
            TRIALS, ({"study_id": study_id, **line.values} for line in self._study.trials())
        )
        self._insert(
            PREDICTIONS,
            ({"study_id": study_id, **line.values} for line in self._study.predictions()),
        )
        trials = select(TRIALS.c.number, TRIALS.c.id).where(TRIALS.c.study_id == study_id)
        ids = {row.number: row.id for row in self._connection.execute(trials)}
        self._insert(ATTEMPTS, (self._attempt(line, ids) for line in self._study.attempts()))
        self._insert(
            CONFIRMATIONS,
            (self._confirmation(line, study_id) for line in self._study.confirmations()),
        )
        return len(ids)

    def _attempt(self, line: Line, ids: dict[int, int]) -> dict[str, Any]:
        """Returns the row of an attempt.

        One that was running counts as expired, as its worker knows the original database only. An
        import under a new name gives the attempts new ids: they are copies.
        """
        values = line.values
        values = {**values, "trial_id": ids[line.content["trial"]]}
        if values["state"] == "running":
            values |= {"state": "given_up", "cause": "was running when the study was exported"}
            values["ended_at"] = values["started_at"]
        if self._new_name:
            values["id"] = new_attempt_id()
        return values

    def _confirmation(self, line: Line, study_id: Any) -> dict[str, Any]:
        """Returns the row of a confirmation; a copy under a new name gets a new id."""
        values = {**line.values, "study_id": study_id}
        if self._new_name:
            values["id"] = new_confirmation_id()
        return values

    def _insert(self, table: Any, rows: Iterator[dict[str, Any]]) -> None:
        batch: list[dict[str, Any]] = []
        for row in rows:
            batch.append(row)
            if len(batch) == _ROWS_AT_A_TIME:
                self._connection.execute(insert(table), batch)
                batch.clear()
        if batch:
            self._connection.execute(insert(table), batch)
