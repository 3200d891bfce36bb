"""Whole studies out of a database as lines of text, and into another one: all of them, or none and a reason."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from sqlalchemy import Connection, Select, insert, select

from autotune.errors import InvalidInput, StudyMismatch, UnknownStudy
from autotune.spec.attempt import new_attempt_id
from autotune.spec.study import check_study_name
from autotune.storage.database import Database
from autotune.storage.error_translation import Conflict, refuse_other_schema
from autotune.storage.rows import DamagedRow, definition_of, forecast_of, record_of
from autotune.storage.tables import ATTEMPTS, PREDICTIONS, SCHEMA_VERSION, STUDIES, TRIALS
from autotune.storage.transfer.import_reader import ImportReader, Line, lines_of_file
from autotune.storage.transfer.json_lines import FORMAT, Kind, columns_of, kept_value, line_of

_ROWS_AT_A_TIME = 500


# -- out -------------------------------------------------------------------------------------------


def exported(database: Database, studies: Sequence[str], *, version: str) -> Iterator[bytes]:
    """The lines of `studies`, as they are at one moment.

    Raises UnknownStudy, and StorageUnavailable for damage.
    """
    digest, count = hashlib.sha256(), 0
    for line in _lines(database, studies, version=version):
        digest.update(line)
        count += 1
        yield line
    yield line_of("end", {"lines": count, "sha256": digest.hexdigest()})


def _lines(database: Database, studies: Sequence[str], *, version: str) -> Iterator[bytes]:
    with database.snapshot() as connection:
        rows = {row.name: row for row in connection.execute(select(STUDIES).order_by(STUDIES.c.id))}
        for name in studies:
            if name not in rows:
                raise UnknownStudy(
                    f"there is no study {name!r} in {database.url}", hint=_which(rows)
                )
        yield line_of("studies", {"autotune": version, "format": FORMAT, "studies": list(studies)})
        for name in studies:
            refuse_other_schema(name, rows[name].schema_version, url=database.url)
            yield from _lines_of_study(connection, rows[name])


def _which(names: Sequence[str] | dict[str, Any]) -> str:
    return f"there is {', '.join(names)}" if names else "begin one with: autotune search"


def _lines_of_study(connection: Connection, study: Any) -> Iterator[bytes]:
    """What cannot be read as what it is does not leave: it could not be brought back."""
    definition_of(study)
    yield _line("study", study)
    of_study = TRIALS.c.study_id == study.id
    for number, row in enumerate(
        _rows(connection, select(TRIALS).where(of_study).order_by(TRIALS.c.number))
    ):
        if row.number != number:
            raise DamagedRow(f"trial {number} of study {study.name!r} is missing")
        record_of(row, cap_bytes=study.cap_bytes)
        yield _line("trial", row)
    for row in _rows(
        connection,
        select(PREDICTIONS).where(PREDICTIONS.c.study_id == study.id).order_by("fingerprint"),
    ):
        forecast_of(row)
        yield _line("prediction", row)
    attempts = select(ATTEMPTS, TRIALS.c.number.label("trial")).join(
        TRIALS, ATTEMPTS.c.trial_id == TRIALS.c.id
    )
    for row in _rows(
        connection, attempts.where(of_study).order_by(TRIALS.c.number, ATTEMPTS.c.ordinal)
    ):
        yield _line("attempt", row)


def _rows(connection: Connection, query: Select[Any]) -> Iterator[Any]:
    yield from connection.execute(query, execution_options={"yield_per": _ROWS_AT_A_TIME})


def _line(kind: Kind, row: Any) -> bytes:
    trial = {"trial": row.trial} if kind == "attempt" else {}
    return line_of(
        kind,
        {
            **trial,
            **{name: kept_value(kind, name, getattr(row, name)) for name in columns_of(kind)},
        },
    )


# -- in --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Imported:
    studies: tuple[str, ...]
    trials: int


def check_file(file: BinaryIO, *, source: str) -> None:
    """Reads it to its end, and goes back to its beginning where it has one. Raises InvalidInput."""
    if file.seekable():
        for line in lines_of_file(file, source=source):
            _ = line.studies() if line.number == 1 else line.values
        file.seek(0)


def import_studies(
    database: Database, file: BinaryIO, *, source: str, name: str | None = None
) -> Imported:
    """Brings in the studies of a file that `exported` made; `name` is a new one, where the file has one study.

    Raises InvalidInput for a file that is not whole, not as it was made or none of ours, and
    StudyMismatch for studies that are there already; nothing is changed then.
    """
    if name is not None:
        check_study_name(name)
    try:
        with database.writing() as connection:
            return _bring_in(connection, database.url, file, source=source, name=name)
    except Conflict:
        raise StudyMismatch(
            f"{source} has attempts that are in {database.url} already, or have just been brought in",
            hint="give the study another name with --name",
        ) from None


def _bring_in(
    connection: Connection, url: str, file: BinaryIO, *, source: str, name: str | None
) -> Imported:
    lines = lines_of_file(file, source=source)
    header = next(lines)
    names = header.studies()
    if name is not None and len(names) != 1:
        raise InvalidInput(
            f"--name {name} is for a file with one study, {source} has {', '.join(names)}",
            hint="leave --name out, or export them one by one",
        )
    _refuse_known(connection, url, [name] if name is not None else names)
    counts = [
        _Incoming(connection, study, new_name=name).take()
        for study in ImportReader.each_of(lines, names=names, source=source)
    ]
    return Imported(studies=tuple(names if name is None else [name]), trials=sum(counts))


def _refuse_known(connection: Connection, url: str, names: Sequence[str]) -> None:
    known = set(connection.scalars(select(STUDIES.c.name)))
    if there := [one for one in names if one in known]:
        way_out = (
            "import it as another: --name NEW"
            if len(names) == 1
            else "export them one by one, for --name NEW"
        )
        what = (
            f"there is a study {there[0]!r}"
            if len(there) == 1
            else f"there are studies {', '.join(there)}"
        )
        raise StudyMismatch(
            f"{what} in {url} already", hint=f"{way_out}; or name another database with --storage"
        )


class _Incoming:
    """Writes the rows of one study as they come, some at a time."""

    def __init__(
        self, connection: Connection, study: ImportReader, *, new_name: str | None
    ) -> None:
        self._connection, self._study, self._new_name = connection, study, new_name

    def take(self) -> int:
        """How many trials it has."""
        row = {**self._study.row, "schema_version": SCHEMA_VERSION}
        row["name"] = self._new_name or row["name"]
        (study_id,) = self._connection.execute(
            insert(STUDIES).values(row)
        ).inserted_primary_key or (None,)
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
        return len(ids)

    def _attempt(self, line: Line, ids: dict[int, int]) -> dict[str, Any]:
        """An attempt that runs elsewhere runs no more here; the attempts of a copy are none of the original's."""
        values = line.values
        if line.content["trial"] not in ids:
            raise line.refused(f"there is no trial {line.content['trial']}")
        values = {**values, "trial_id": ids[line.content["trial"]]}
        if values["state"] == "running":
            values |= {"state": "given_up", "cause": "was running when the study was exported"}
            values["ended_at"] = values["started_at"]
        return {**values, "id": new_attempt_id()} if self._new_name else values

    def _insert(self, table: Any, rows: Iterator[dict[str, Any]]) -> None:
        waiting: list[dict[str, Any]] = []
        for row in rows:
            waiting.append(row)
            if len(waiting) == _ROWS_AT_A_TIME:
                self._connection.execute(insert(table), waiting)
                waiting.clear()
        if waiting:
            self._connection.execute(insert(table), waiting)
