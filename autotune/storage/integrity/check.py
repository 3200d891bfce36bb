"""Reads all of a studies database and reports what is wrong with it; changes nothing.

Where a batch of rows cannot be read, its rows are read one by one, so that a damaged row hides no
other. Everything is read from one snapshot, so that a running search causes no findings.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy
from sqlalchemy import Connection, Select, Table, select, text
from sqlalchemy.exc import SQLAlchemyError

from autotune.errors import AutotuneError, StorageUnavailable, UnknownStudy, suggestion
from autotune.storage.database import Database, is_identity
from autotune.storage.error_translation import COPY
from autotune.storage.integrity.check_attempts import attempt_findings, running_trials
from autotune.storage.integrity.findings import Checked, Finding, RunningTrial
from autotune.storage.integrity.sqlite_file import reject_stored_programs
from autotune.storage.rows import (
    confirmation_from_row,
    definition_from_row,
    forecast_from_row,
    record_from_row,
)
from autotune.storage.schema import check_tables, has_attempts, revision_of, tables_of
from autotune.storage.tables import (
    ATTEMPTS,
    CONFIRMATIONS,
    IDENTITY,
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
    """Checks the database with all its studies, or only those named in `studies`.

    Raises UnknownStudy, and StorageUnavailable for a database that cannot be opened at all.
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
        revision = self._check_schema()
        self._check_identity()
        if self._connection.dialect.name == "sqlite":
            self._check_integrity()
            self._check_foreign_keys()
        trials = 0
        names: list[str] = []
        running: list[RunningTrial] = []
        known = []
        for study in self._rows(STUDIES, select(STUDIES.c.id).order_by(STUDIES.c.id)):
            known.append(study.name)
            if wanted and study.name not in wanted:
                continue
            names.append(study.name)
            trials += self._check_study(study)
            if has_attempts(revision):
                running += self._check_attempts(study)
        unknown = [name for name in wanted if name not in names]
        if unknown:
            raise UnknownStudy(
                f"there is no study {unknown[0]!r} in {self._url}",
                hint=suggestion(unknown[0], known, otherwise="see autotune studies"),
            )
        return Checked(
            studies=tuple(names),
            trials=trials,
            findings=tuple(self._findings),
            running=tuple(running),
        )

    def _add_finding(self, where: str, what: str, to_do: str, *, is_fault: bool = True) -> None:
        self._findings.append(Finding(where=where, what=what, to_do=to_do, is_fault=is_fault))

    # -- the database ------------------------------------------------------------------------------

    def _check_schema(self) -> str | None:
        """Returns the schema revision; an older one, or missing tables, become findings.

        Raises StorageUnavailable for a later revision, whose rows this autotune cannot interpret,
        and for a view or a trigger, which could run without end.
        """
        if self._connection.dialect.name == "sqlite":
            reject_stored_programs(self._connection, self._url)
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
            self._add_finding(
                "the database",
                error.message.removeprefix(f"the studies database {self._url} "),
                SAVE,
            )
        else:
            if revision != REVISION:
                found = revision or "of before 0001"
                what = f"is of an older autotune (schema {found}, now {REVISION})"
                self._add_finding("the database", what, _OLDER, is_fault=False)
        return revision

    def _check_identity(self) -> None:
        """Looks at what names the work folder of a database on a server."""
        if IDENTITY.name not in self._tables:
            return
        found = self._connection.execute(select(IDENTITY.c.identity)).scalars().all()
        if len(found) != 1 or not is_identity(found[0]):
            what = f"has lost its identity: the table {IDENTITY.name} has {found!r:.100}"
            self._add_finding("the database", what, SAVE)

    def _check_integrity(self) -> None:
        for (found,) in self._connection.execute(text("PRAGMA integrity_check(20)")):
            if found != "ok":
                self._add_finding(
                    "the file",
                    found.replace("\n", " ").removeprefix("*** in database main *** "),
                    SAVE,
                )

    def _check_foreign_keys(self) -> None:
        orphans: Counter[tuple[str, str]] = Counter()
        for table, _, parent, _ in self._connection.execute(text("PRAGMA foreign_key_check")):
            if table in METADATA.tables:
                orphans[table, parent] += 1
        for (table, parent), count in orphans.items():
            self._add_finding(
                "the database",
                f"{table} has {count} rows that refer to missing rows of {parent}",
                SAVE,
            )

    # -- a study -----------------------------------------------------------------------------------

    def _check_study(self, study: Any) -> int:
        """Checks all of a study but its attempts; returns the number of trials."""
        where = f"study {study.name!r}"
        if study.schema_version not in range(1, SCHEMA_VERSION + 1):
            self._add_finding(
                where,
                f"has schema {study.schema_version}, this autotune reads {SCHEMA_VERSION}",
                "use the autotune version that wrote it",
            )
        with self._errors_as_findings(where):
            definition_from_row(study).legal_space()
        numbers = list(self._check_trials(study, where))
        if numbers != list(range(len(numbers))):
            self._add_finding(
                where,
                f"has {len(numbers)} trials, but not one for every number up to the last",
                SAVE,
            )
        predictions = select(PREDICTIONS.c.id).where(PREDICTIONS.c.study_id == study.id)
        for row in self._rows(PREDICTIONS, predictions):
            with self._errors_as_findings(where):
                forecast_from_row(row)
        self._check_confirmations(study, where)
        return len(numbers)

    def _check_trials(self, study: Any, where: str) -> Iterator[int]:
        """Yields the numbers of the study's trials, whether they can be read or not."""
        trials = select(TRIALS.c.id).where(TRIALS.c.study_id == study.id).order_by(TRIALS.c.number)
        for row in self._rows(TRIALS, trials):
            with self._errors_as_findings(where):
                record_from_row(row, cap_bytes=study.cap_bytes)
            if (row.measurement is None) != (row.finished_at is None):
                what = "has a result without its date, or a date without a result"
                self._add_finding(f"{where}, trial {row.number}", what, SAVE)
            if getattr(row, "revision", 0) > getattr(study, "revision", 0):
                self._add_finding(
                    f"{where}, trial {row.number}", "is younger than its study's last change", SAVE
                )
            yield row.number

    def _check_confirmations(self, study: Any, where: str) -> None:
        confirmations = (
            select(CONFIRMATIONS.c.id)
            .where(CONFIRMATIONS.c.study_id == study.id)
            .order_by(CONFIRMATIONS.c.ordinal)
        )
        ordinals = set()
        for row in self._rows(CONFIRMATIONS, confirmations):
            ordinals.add(row.ordinal)
            with self._errors_as_findings(where):
                confirmation_from_row(row)
        if ordinals != set(range(1, len(ordinals) + 1)):
            self._add_finding(
                where,
                f"has {len(ordinals)} confirmations, but not one for every number up to the last",
                SAVE,
            )

    def _check_attempts(self, study: Any) -> list[RunningTrial]:
        running: list[RunningTrial] = []
        if {ATTEMPTS.name, TRIALS.name} <= self._tables:
            where = f"study {study.name!r}"
            with self._errors_as_findings(f"{where}, attempts"):
                self._findings += attempt_findings(
                    self._connection, study.id, where=where, to_do=SAVE
                )
                running += running_trials(self._connection, study.id)
        return running

    # -- rows --------------------------------------------------------------------------------------

    def _rows(self, table: Table, ids: Select[Any]) -> Iterator[Any]:
        """Yields the rows selected by `ids` that can be read; each of the others is a finding."""
        row_ids: Sequence[Any] = ()
        if table.name in self._tables:
            with self._errors_as_findings(f"table {table.name}"):
                row_ids = self._connection.scalars(ids).all()
        for first in range(0, len(row_ids), _ROWS_AT_A_TIME):
            batch = row_ids[first : first + _ROWS_AT_A_TIME]
            try:
                yield from self._fetch(table, batch)
            except _DAMAGE:
                for row_id in batch:
                    with self._errors_as_findings(f"{table.name}, row {row_id}"):
                        yield from self._fetch(table, [row_id])

    def _fetch(self, table: Table, ids: Sequence[Any]) -> Sequence[Any]:
        """Reads rows with the columns that exist: an older schema lacks some."""
        existing = {column["name"] for column in self._inspector.get_columns(table.name)}
        columns = [column for column in table.columns if column.name in existing]
        query = select(*columns).where(table.c.id.in_(ids)).order_by(table.c.id)
        return self._connection.execute(query).all()

    @contextmanager
    def _errors_as_findings(self, where: str) -> Iterator[None]:
        """Turns an error of the block into a finding."""
        try:
            yield
        except AutotuneError as error:
            self._add_finding(where, error.message, SAVE)
        except _DAMAGE as error:
            lines = str(error).splitlines()
            self._add_finding(where, lines[0] if lines else "damaged", SAVE)
