"""Reads all of a studies database and says what is wrong with it.

Changes nothing, and upgrades nothing.

Row by row where need be, so that one that is damaged hides no other; all as of one moment, so that
a running search is no fault.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy
from sqlalchemy import Connection, Select, Table, select, text
from sqlalchemy.exc import SQLAlchemyError

from autotune.errors import AutotuneError, StorageUnavailable, UnknownStudy
from autotune.storage.database import Database
from autotune.storage.error_translation import COPY
from autotune.storage.integrity.check_attempts import attempt_findings, running_trials
from autotune.storage.integrity.findings import Checked, Finding, RunningTrial
from autotune.storage.rows import definition_of, forecast_of, record_of
from autotune.storage.schema import check_tables, revision_of, tables_of
from autotune.storage.tables import (
    ATTEMPTS,
    METADATA,
    PREDICTIONS,
    REVISION,
    SCHEMA_VERSION,
    STUDIES,
    TRIALS,
)

_ROWS_AT_A_TIME = 200

SAVE = f"{COPY}, or save the studies that can be read with: autotune studies export"
_DAMAGE = (AutotuneError, SQLAlchemyError, ValueError, TypeError, KeyError, AttributeError)
_OLDER = "nothing: the next other command copies the database and then upgrades it"


def check_database(database: Database, studies: Sequence[str] = ()) -> Checked:
    """All studies, or those named.

    Raises UnknownStudy, and StorageUnavailable for what cannot even be opened.
    """
    try:
        with database.snapshot() as connection:
            return _Check(connection, database.url).run(studies)
    except StorageUnavailable as error:
        hint = COPY if "studies check" in error.hint else error.hint
        raise type(error)(error.message, hint=hint) from None


class _Check:
    def __init__(self, connection: Connection, url: str) -> None:
        self._connection, self._url = connection, url
        self._tables = tables_of(connection)
        self._inspector = sqlalchemy.inspect(connection)
        self._findings: list[Finding] = []

    def run(self, wanted: Sequence[str]) -> Checked:
        revision = self._schema()
        if self._connection.dialect.name == "sqlite":
            self._integrity()
            self._rows_of_nothing()
        trials, names, running = 0, [], list[RunningTrial]()
        for study in self._rows(STUDIES, select(STUDIES.c.id).order_by(STUDIES.c.id)):
            if not wanted or study.name in wanted:
                names.append(study.name)
                trials += self._study(study)
                running += self._attempts(study) if revision == REVISION else []
        if unknown := [one for one in wanted if one not in names]:
            raise UnknownStudy(
                f"there is no study {unknown[0]!r} in {self._url}", hint="see autotune studies"
            )
        return Checked(
            studies=tuple(names),
            trials=trials,
            findings=tuple(self._findings),
            running=tuple(running),
        )

    def _find(self, where: str, what: str, to_do: str, *, is_fault: bool = True) -> None:
        self._findings.append(Finding(where=where, what=what, to_do=to_do, is_fault=is_fault))

    # -- the database ------------------------------------------------------------------------------

    def _schema(self) -> str | None:
        """Raises StorageUnavailable for a later one, whose rows mean what is not known here."""
        revision = revision_of(self._connection)
        if not self._tables & set(METADATA.tables):
            raise UnknownStudy(
                f"there are no studies in {self._url}", hint="begin one with: autotune search"
            )
        try:
            check_tables(self._tables, revision, self._url)
        except StorageUnavailable as error:
            if revision is not None and revision > REVISION:
                raise
            self._find(
                "the database",
                error.message.removeprefix(f"the studies database {self._url} "),
                SAVE,
            )
        else:
            if revision != REVISION:
                older = f"is of an older autotune (schema {revision or 'of before 0001'}, now {REVISION})"
                self._find("the database", older, _OLDER, is_fault=False)
        return revision

    def _integrity(self) -> None:
        for (found,) in self._connection.execute(text("PRAGMA integrity_check(20)")):
            if found != "ok":
                self._find(
                    "the file",
                    found.replace("\n", " ").removeprefix("*** in database main *** "),
                    SAVE,
                )

    def _rows_of_nothing(self) -> None:
        lost: dict[tuple[str, str], int] = {}
        for table, _, parent, _ in self._connection.execute(text("PRAGMA foreign_key_check")):
            if table in METADATA.tables:
                lost[table, parent] = lost.get((table, parent), 0) + 1
        for (table, parent), count in lost.items():
            self._find("the database", f"{table} has {count} rows of what is not in {parent}", SAVE)

    # -- a study -----------------------------------------------------------------------------------

    def _study(self, study: Any) -> int:
        """How many trials it has."""
        where = f"study {study.name!r}"
        if study.schema_version not in range(1, SCHEMA_VERSION + 1):
            to_do = "use the autotune version that wrote it"
            self._find(
                where,
                f"has schema {study.schema_version}, this autotune reads {SCHEMA_VERSION}",
                to_do,
            )
        with self._looking(where):
            definition_of(study).legal_space()
        numbers = list(self._trials(study, where))
        if numbers != list(range(len(numbers))):
            self._find(
                where,
                f"has {len(numbers)} trials, and not those of all numbers up to the last",
                SAVE,
            )
        predictions = select(PREDICTIONS.c.id).where(PREDICTIONS.c.study_id == study.id)
        for row in self._rows(PREDICTIONS, predictions):
            with self._looking(where):
                forecast_of(row)
        return len(numbers)

    def _trials(self, study: Any, where: str) -> Iterator[int]:
        """The numbers of those that are there, whether they can be read or not."""
        trials = select(TRIALS.c.id).where(TRIALS.c.study_id == study.id).order_by(TRIALS.c.number)
        for row in self._rows(TRIALS, trials):
            with self._looking(where):
                record_of(row, cap_bytes=study.cap_bytes)
            if (row.measurement is None) != (row.finished_at is None):
                what = "has a result without its date, or a date without a result"
                self._find(f"{where}, trial {row.number}", what, SAVE)
            if getattr(row, "revision", 0) > getattr(study, "revision", 0):
                self._find(
                    f"{where}, trial {row.number}", "is younger than its study's last change", SAVE
                )
            yield row.number

    def _attempts(self, study: Any) -> list[RunningTrial]:
        running: list[RunningTrial] = []
        if {ATTEMPTS.name, TRIALS.name} <= self._tables:
            where = f"study {study.name!r}"
            with self._looking(f"{where}, attempts"):
                self._findings += attempt_findings(
                    self._connection, study.id, where=where, to_do=SAVE
                )
                running += running_trials(self._connection, study.id)
        return running

    # -- rows --------------------------------------------------------------------------------------

    def _rows(self, table: Table, ids: Select[Any]) -> Iterator[Any]:
        """Those of `ids`, as far as they can be read; each of the others is a finding."""
        known: Sequence[Any] = ()
        if table.name in self._tables:
            with self._looking(f"table {table.name}"):
                known = self._connection.scalars(ids).all()
        for first in range(0, len(known), _ROWS_AT_A_TIME):
            some = known[first : first + _ROWS_AT_A_TIME]
            try:
                yield from self._fetched(table, some)
            except _DAMAGE:
                for one in some:
                    with self._looking(f"{table.name}, row {one}"):
                        yield from self._fetched(table, [one])

    def _fetched(self, table: Table, ids: Sequence[Any]) -> Sequence[Any]:
        """An older schema lacks some columns."""
        there = {column["name"] for column in self._inspector.get_columns(table.name)}
        columns = [column for column in table.columns if column.name in there]
        query = select(*columns).where(table.c.id.in_(ids)).order_by(table.c.id)
        return self._connection.execute(query).all()

    @contextmanager
    def _looking(self, where: str) -> Iterator[None]:
        """What goes wrong in the block is a finding."""
        try:
            yield
        except _DAMAGE as error:
            said = (
                error.message
                if isinstance(error, AutotuneError)
                else (str(error).splitlines() or ["damaged"])[0]
            )
            self._find(where, said, SAVE)
