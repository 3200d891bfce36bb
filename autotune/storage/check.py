"""Reads all of a studies database and reports what is wrong with it; changes nothing.

SQLite checks its file and the references between rows; every row of a study is read as a command
would read it. All is of one snapshot, so that a running search causes no findings.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, Table, select, text
from sqlalchemy.exc import SQLAlchemyError

from autotune.errors import (
    AutotuneError,
    StorageUnavailable,
    UnknownStudy,
    first_line_of,
    suggestion,
)
from autotune.storage.database import Database
from autotune.storage.error_translation import COPY, check_schema_version
from autotune.storage.identity import work_folder_path
from autotune.storage.rows import (
    check_attempt_row,
    confirmation_from_row,
    definition_from_row,
    forecast_from_row,
    record_from_row,
)
from autotune.storage.schema import orphaned_rows, revision_of, tables_of
from autotune.storage.tables import (
    ATTEMPTS,
    CONFIRMATIONS,
    PREDICTIONS,
    REVISION,
    STUDIES,
    TRIALS,
)

_SAVE = f"{COPY}, or save the studies that can be read with: autotune studies export"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault or remark, where it is, and what to do about it."""

    where: str
    """`the database`, `study 'x'`."""
    what: str
    to_do: str
    is_fault: bool = True
    """False for a remark: no result is wrong or in danger."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The result of a check: what was read, and what was found."""

    studies: tuple[str, ...]
    trials: int
    """The number of trials of all `studies`."""
    findings: tuple[Finding, ...]

    @property
    def faults(self) -> int:
        """The number of findings that are faults."""
        return sum(finding.is_fault for finding in self.findings)


def check_database(database: Database, studies: Sequence[str] = ()) -> Checked:
    """Checks the database with all its studies, or only those named in `studies`.

    Raises UnknownStudy, and StorageUnavailable for a database that cannot be opened at all.
    """
    try:
        with database.snapshot() as connection:
            return _Check(connection, database).run(studies)
    except StorageUnavailable as error:
        hint = COPY if "studies check" in error.hint else error.hint
        raise type(error)(error.message, hint=hint) from None


class _Check:
    def __init__(self, connection: Connection, database: Database) -> None:
        self._connection, self._database = connection, database
        self._findings: list[Finding] = []

    def run(self, wanted: Sequence[str]) -> Checked:
        revision = revision_of(self._connection, self._database.url)
        if STUDIES.name not in tables_of(self._connection):
            raise UnknownStudy(
                f"there are no studies in {self._database.url}",
                hint="begin one with: autotune search",
            )
        if self._connection.dialect.name == "sqlite":  # PostgreSQL always checks references
            self._check_file()
        if revision != REVISION:
            what = f"is of an older autotune (schema {revision or 'none'}, now {REVISION})"
            to_do = "the next other command copies the database and upgrades it; then check it"
            self._add_finding("the database", what, to_do, is_fault=False)
            return Checked(studies=(), trials=0, findings=tuple(self._findings))
        with self._errors_as_findings("the database"):
            work_folder_path(self._database)  # of a server, it is named in the database
        studies = self._rows("the studies", select(STUDIES).order_by(STUDIES.c.id))
        names = [study.name for study in studies]
        for name in wanted:
            if name not in names:
                raise UnknownStudy(
                    f"there is no study {name!r} in {self._database.url}",
                    hint=suggestion(name, names, otherwise="see autotune studies"),
                )
        chosen = [study for study in studies if not wanted or study.name in wanted]
        return Checked(
            trials=sum(self._check_study(study) for study in chosen),
            studies=tuple(study.name for study in chosen),
            findings=tuple(self._findings),
        )

    def _check_file(self) -> None:
        with self._errors_as_findings("the file"):
            for (damage,) in self._connection.execute(text("PRAGMA integrity_check(20)")):
                if damage != "ok":
                    self._add_finding("the file", damage.replace("\n", " "), _SAVE)
        with self._errors_as_findings("the database"):
            for orphans in orphaned_rows(self._connection):
                self._add_finding("the database", orphans, _SAVE)

    def _check_study(self, study: Any) -> int:
        """Reads every row of a study; returns the number of its trials."""
        where = f"study {study.name!r}"
        with self._errors_as_findings(where):
            check_schema_version(study.name, study.schema_version, url=self._database.url)
            definition_from_row(study).legal_space()
        trials = self._rows(
            where,
            _of_study(TRIALS, study).order_by(TRIALS.c.number),
            lambda row: record_from_row(row, cap_bytes=study.cap_bytes),
        )
        self._check_numbers(where, "trials", [row.number for row in trials], first=0)
        confirmations = self._rows(
            where,
            _of_study(CONFIRMATIONS, study).order_by(CONFIRMATIONS.c.ordinal),
            confirmation_from_row,
        )
        ordinals = [row.ordinal for row in confirmations]
        self._check_numbers(where, "confirmations", ordinals, first=1)
        self._rows(where, _of_study(PREDICTIONS, study), forecast_from_row)
        of_trials = TRIALS.c.study_id == study.id
        attempts = select(ATTEMPTS).select_from(ATTEMPTS.join(TRIALS)).where(of_trials)
        self._rows(where, attempts, check_attempt_row)
        return len(trials)

    def _check_numbers(self, where: str, kind: str, numbers: list[int], *, first: int) -> None:
        if numbers != list(range(first, first + len(numbers))):
            what = f"has {len(numbers)} {kind}, but not one for every number up to the last"
            self._add_finding(where, what, _SAVE)

    def _rows(
        self, where: str, query: Select[Any], read: Callable[[Any], object] = lambda row: row
    ) -> Sequence[Any]:
        """Returns all rows; each that `read` rejects is a finding, as is that there are none."""
        rows: Sequence[Any] = ()
        with self._errors_as_findings(where):
            rows = self._connection.execute(query).all()
        for row in rows:
            with self._errors_as_findings(where):
                read(row)
        return rows

    def _add_finding(self, where: str, what: str, to_do: str, *, is_fault: bool = True) -> None:
        self._findings.append(Finding(where=where, what=what, to_do=to_do, is_fault=is_fault))

    @contextmanager
    def _errors_as_findings(self, where: str) -> Iterator[None]:
        """Turns an error of the block into a finding."""
        try:
            yield
        except AutotuneError as error:
            self._add_finding(where, error.message, _SAVE)
        except (SQLAlchemyError, ValueError) as error:
            self._add_finding(where, first_line_of(getattr(error, "orig", None) or error), _SAVE)


def _of_study(table: Table, study: Any) -> Select[Any]:
    return select(table).where(table.c.study_id == study.id)
