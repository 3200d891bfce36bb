"""The studies database: what was asked, who is at it, and every result.

Plain dataclasses in and out; no row leaves it.

What is kept here is all there is: Optuna's samplers are told of it anew by each process that asks
them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, BinaryIO

import sqlalchemy
from sqlalchemy import Select, and_, insert, select, update

from autotune.errors import StorageUnavailable, StudyMismatch, UnknownStudy
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Forecast
from autotune.spec.result import TrialRecord
from autotune.spec.study import DEFAULT_STORAGE, StudyDefinition
from autotune.storage.attempts import Attempts
from autotune.storage.database import BUSY_TIMEOUT_SECONDS, Database
from autotune.storage.error_translation import (
    Conflict,
    refuse_other_schema,
    storage_errors,
    way_out_of_damage,
)
from autotune.storage.rows import (
    definition_of,
    definition_row,
    forecast_of,
    forecast_row,
    record_of,
    trial_row,
)
from autotune.storage.schema import open_studies
from autotune.storage.tables import PREDICTIONS, STUDIES, TRIALS
from autotune.storage.transfer.transfer import Imported, exported, import_studies


@dataclass(frozen=True, kw_only=True)
class StudySummary:
    """One line of the list of studies."""

    name: str
    created_at: str
    trials: int
    """With a result."""
    trials_wanted: int


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The trials that were begun, lost or finished since a study's last known revision, oldest change first."""

    revision: int
    records: Sequence[TrialRecord]


class StudyStore:
    """The studies of one database.

    Raises StorageUnavailable when it cannot be used, StorageAway when not just now.
    """

    def __init__(
        self,
        url: str = DEFAULT_STORAGE,
        *,
        create: bool = False,
        was_reached: bool = False,
        busy_timeout_seconds: float = BUSY_TIMEOUT_SECONDS,
    ) -> None:
        self._database = Database(
            url, create=create, was_reached=was_reached, busy_timeout_seconds=busy_timeout_seconds
        )
        self.url = self._database.url
        """The database's URL as it may be shown: without its password."""
        self.attempts = Attempts(self._database)
        with self._database.opening():
            try:
                open_studies(self._database, create=create)
            except BaseException:
                self._database.close()
                raise

    def close(self) -> None:
        self._database.close()

    # -- studies -----------------------------------------------------------------------------------

    def create_study(
        self,
        definition: StudyDefinition,
        *,
        trials_wanted: int,
        records: Iterable[TrialRecord] = (),
        forecasts: Iterable[Forecast] = (),
    ) -> None:
        """All or nothing; `records` and `forecasts` are what is known of it already, as from earlier studies.

        Raises StudyMismatch where there is a study of that name.
        """
        try:
            with self._database.writing() as connection:
                row = definition_row(definition, trials_wanted=trials_wanted)
                (study_id,) = connection.execute(
                    insert(STUDIES).values(row)
                ).inserted_primary_key or (None,)
                trials = [{"study_id": study_id, **trial_row(record)} for record in records]
                predictions = [
                    {"study_id": study_id, **forecast_row(forecast)} for forecast in forecasts
                ]
                for table, rows in ((TRIALS, trials), (PREDICTIONS, predictions)):
                    if rows:
                        connection.execute(insert(table), rows)
        except Conflict:
            raise StudyMismatch(
                f"there is a study {definition.name!r} in {self.url} already",
                hint="give the new one another --name",
            ) from None

    def set_trials_wanted(self, study: str, trials_wanted: int) -> None:
        with self._database.writing() as connection:
            connection.execute(
                update(STUDIES).where(STUDIES.c.name == study).values(trials_wanted=trials_wanted)
            )

    def names(self) -> list[str]:
        """Of all studies, oldest first."""
        with self._database.reading() as connection:
            return list(connection.scalars(select(STUDIES.c.name).order_by(STUDIES.c.id)).all())

    def has_study(self, study: str) -> bool:
        with self._database.reading() as connection:
            return (
                connection.scalar(select(STUDIES.c.id).where(STUDIES.c.name == study)) is not None
            )

    def definition(self, study: str) -> tuple[StudyDefinition, int]:
        """The study's definition and how many trials were wanted of it. Raises UnknownStudy."""
        with self._database.reading() as connection:
            row = connection.execute(select(STUDIES).where(STUDIES.c.name == study)).one_or_none()
            if row is None:
                names = self.names()
                raise UnknownStudy(
                    f"there is no study {study!r} in {self.url}",
                    hint=f"there is {', '.join(names)}"
                    if names
                    else "begin one with: autotune search",
                )
            refuse_other_schema(study, row.schema_version, url=self.url)
            return definition_of(row), row.trials_wanted

    def studies(self) -> list[StudySummary]:
        """All studies, oldest first."""
        finished = sqlalchemy.func.count(TRIALS.c.finished_at).label("finished")
        columns = (STUDIES.c.id, STUDIES.c.name, STUDIES.c.created_at, STUDIES.c.trials_wanted)
        query = (
            select(*columns, finished)
            .outerjoin(TRIALS)
            .group_by(STUDIES.c.id)
            .order_by(STUDIES.c.id)
        )
        with self._database.reading() as connection:
            return [
                StudySummary(
                    name=row.name,
                    created_at=_minute(row.created_at),
                    trials=row.finished,
                    trials_wanted=row.trials_wanted,
                )
                for row in connection.execute(query)
            ]

    def dates(self, study: str) -> tuple[str, str]:
        """When the study was begun and when its last trial ended, to the minute; empty where none has ended."""
        last = (
            select(sqlalchemy.func.max(TRIALS.c.finished_at))
            .join(STUDIES)
            .where(STUDIES.c.name == study)
        )
        with self._database.reading() as connection:
            begun = connection.scalar(select(STUDIES.c.created_at).where(STUDIES.c.name == study))
            ended = connection.scalar(last)
        return _minute(begun), _minute(ended)

    # -- whole studies -----------------------------------------------------------------------------

    def exported(self, studies: Sequence[str], *, version: str) -> Iterator[bytes]:
        """The lines of a file of these studies (`transfer.py`). Raises UnknownStudy."""
        return exported(self._database, studies, version=version)

    def import_studies(self, file: BinaryIO, *, source: str, name: str | None = None) -> Imported:
        """Brings in all of such a file, or raises InvalidInput or StudyMismatch and changes nothing."""
        return import_studies(self._database, file, source=source, name=name)

    # -- trials ------------------------------------------------------------------------------------

    def trials(self, study: str) -> list[TrialRecord]:
        """Every trial of the study in the order of its number; one without a result reads as interrupted.

        Raises StorageUnavailable where some are missing.
        """
        records = self._records(study, _trials_of(study).order_by(TRIALS.c.number))
        missing = next(
            (number for number, record in enumerate(records) if record.number != number), None
        )
        if missing is not None:
            raise StorageUnavailable(
                f"trial {missing} of study {study!r} in {self.url} is missing",
                hint=way_out_of_damage(self.url),
            )
        return records

    def changes(self, study: str, *, since: int) -> Changes:
        """What has changed after revision `since`; -1 for everything."""
        with self._database.reading() as connection:
            revision = connection.scalar(select(STUDIES.c.revision).where(STUDIES.c.name == study))
        if revision is None or revision == since:
            return Changes(revision=since, records=())
        changed = _trials_of(study).where(TRIALS.c.revision > since, TRIALS.c.revision <= revision)
        records = self._records(study, changed.order_by(TRIALS.c.revision, TRIALS.c.number))
        return Changes(revision=revision, records=records)

    def _records(self, study: str, query: Select[Any]) -> list[TrialRecord]:
        with self._database.reading() as connection:
            rows = connection.execute(query).all()
        losses = self.attempts.losses(
            study, [row.number for row in rows if row.measurement is None]
        )
        with storage_errors(self.url):  # a damaged row
            records = []
            for row in rows:
                count, cause = losses.get(row.number, (0, ""))
                known = {"cap_bytes": row.cap_bytes, "predicted_bytes": row.predicted}
                records.append(record_of(row, **known, losses=count, cause=cause))
            return records

    # -- predictions -------------------------------------------------------------------------------

    def keep_forecast(self, study: str, forecast: Forecast) -> None:
        """Keeps a prediction, or that there is none; what is known of a configuration already stays."""
        if self._has_forecast(study, forecast.config):
            return
        study_id = select(STUDIES.c.id).where(STUDIES.c.name == study).scalar_subquery()
        try:
            with self._database.writing() as connection:
                connection.execute(
                    insert(PREDICTIONS).values({"study_id": study_id, **forecast_row(forecast)})
                )
        except Conflict:
            pass  # another worker has predicted the same

    def _has_forecast(self, study: str, config: TrainingConfig) -> bool:
        one = select(PREDICTIONS.c.id).join(STUDIES)
        with self._database.reading() as connection:
            found = one.where(
                STUDIES.c.name == study, PREDICTIONS.c.fingerprint == config.fingerprint
            )
            return connection.scalar(found) is not None

    def forecasts(self, study: str) -> dict[str, Forecast]:
        """What was predicted in this study, by the configuration's fingerprint."""
        with self._database.reading() as connection:
            rows = connection.execute(
                select(PREDICTIONS).join(STUDIES).where(STUDIES.c.name == study)
            ).all()
            return {row.fingerprint: forecast_of(row) for row in rows}


def _trials_of(study: str) -> Select[Any]:
    predicted = and_(
        TRIALS.c.study_id == PREDICTIONS.c.study_id,
        TRIALS.c.fingerprint == PREDICTIONS.c.fingerprint,
    )
    return (
        select(
            TRIALS,
            STUDIES.c.cap_bytes,
            PREDICTIONS.c.prediction["peak_memory_bytes"].as_float().label("predicted"),
        )
        .select_from(TRIALS.join(STUDIES).outerjoin(PREDICTIONS, predicted))
        .where(STUDIES.c.name == study)
    )


def _minute(moment: datetime | None) -> str:
    """In UTC, which is what a database without time zones keeps."""
    if moment is None:
        return ""
    return f"{moment.astimezone(UTC) if moment.tzinfo else moment:%Y-%m-%d %H:%M}"
