"""The studies database: what was asked and every result. Plain dataclasses in and out; no row leaves this package.

Optuna keeps its own tables in the same database, for its samplers only: what autotune shows comes from here.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Any

import sqlalchemy
from sqlalchemy import Connection, insert, select, update
from sqlalchemy.exc import IntegrityError

from autotune.config import TrainingConfig
from autotune.definition import DEFAULT_STORAGE, StudyDefinition
from autotune.errors import StorageUnavailable, StudyMismatch, UnknownStudy
from autotune.prediction import Forecast, Prediction
from autotune.result import DIRECTIONS, DeviceInfo, Measurement, TrialRecord
from autotune.search_space import SearchSpace
from autotune.storage.database import make_engine, shown_url, storage_errors
from autotune.storage.tables import METADATA, PREDICTIONS, SCHEMA_VERSION, STUDIES, TRIALS
from autotune.workload import Workload


@dataclass(frozen=True, kw_only=True)
class StudySummary:
    """One line of the list of studies."""

    name: str
    created_at: str
    trials: int
    trials_wanted: int
    ok: int


class StudyStore:
    """The studies of one database. Raises StorageUnavailable when it cannot be used."""

    def __init__(self, url: str = DEFAULT_STORAGE, *, create: bool = False) -> None:
        self.url = shown_url(url)
        """The database's URL as it may be shown: without its password."""
        with storage_errors(url):
            self._engine = make_engine(url, create=create)
            if create:
                METADATA.create_all(self._engine)
            elif not sqlalchemy.inspect(self._engine).has_table(STUDIES.name):
                raise UnknownStudy(f"there are no studies in {self.url}", hint="begin one with: autotune search")

    def close(self) -> None:
        self._engine.dispose()

    # -- studies -----------------------------------------------------------------------------------------------

    def create_study(
        self,
        definition: StudyDefinition,
        *,
        trials_wanted: int,
        records: Iterable[TrialRecord] = (),
        forecasts: Iterable[Forecast] = (),
    ) -> None:
        """All or nothing; `records` and `forecasts` are what is known of it already, from earlier studies."""
        row = {
            "schema_version": SCHEMA_VERSION,
            "name": definition.name,
            "workload": definition.workload.to_dict(),
            "space": definition.space.to_dict(),
            "device": asdict(definition.device),
            "unavailable": definition.unavailable,
            "cap_bytes": definition.cap_bytes,
            "seed": definition.seed,
            "sampler": definition.sampler,
            "trials_wanted": trials_wanted,
        }
        try:
            with self._writing() as connection:
                (study_id,) = connection.execute(insert(STUDIES).values(row)).inserted_primary_key or (None,)
                trials = [{"study_id": study_id, **_trial_row(record)} for record in records]
                predictions = [{"study_id": study_id, **_forecast_row(forecast)} for forecast in forecasts]
                for table, rows in ((TRIALS, trials), (PREDICTIONS, predictions)):
                    if rows:
                        connection.execute(insert(table), rows)
        except IntegrityError:
            raise StudyMismatch(
                f"study {definition.name!r} was begun by another search just now", hint="run the command again"
            ) from None

    def set_trials_wanted(self, study: str, trials_wanted: int) -> None:
        with self._writing() as connection:
            connection.execute(update(STUDIES).where(STUDIES.c.name == study).values(trials_wanted=trials_wanted))

    def names(self) -> list[str]:
        """Of all studies, oldest first."""
        with self._reading() as connection:
            return list(connection.scalars(select(STUDIES.c.name).order_by(STUDIES.c.id)).all())

    def has_study(self, study: str) -> bool:
        with self._reading() as connection:
            return connection.scalar(select(STUDIES.c.id).where(STUDIES.c.name == study)) is not None

    def definition(self, study: str) -> tuple[StudyDefinition, int]:
        """The study's definition and how many trials were wanted of it. Raises UnknownStudy."""
        with self._reading() as connection:
            row = connection.execute(select(STUDIES).where(STUDIES.c.name == study)).one_or_none()
            if row is None:
                names = self.names()
                raise UnknownStudy(
                    f"there is no study {study!r} in {self.url}",
                    hint=f"there is {', '.join(names)}" if names else "begin one with: autotune search",
                )
            if row.schema_version != SCHEMA_VERSION:
                raise StorageUnavailable(
                    f"study {study!r} has schema {row.schema_version}, this autotune reads {SCHEMA_VERSION}",
                    hint="use the autotune version that wrote it",
                )
            definition = StudyDefinition(
                name=row.name,
                workload=Workload(**row.workload),
                space=SearchSpace.from_dict(row.space),
                device=DeviceInfo(**row.device),
                unavailable=row.unavailable,
                cap_bytes=row.cap_bytes,
                seed=row.seed,
                sampler=row.sampler,
            )
            return definition, row.trials_wanted

    def studies(self) -> list[StudySummary]:
        """All studies, oldest first."""
        with self._reading() as connection:
            rows = connection.execute(select(STUDIES).order_by(STUDIES.c.id)).all()
        summaries = []
        for row in rows:
            records = [record for record in self.trials(row.name) if record.is_finished]
            summaries.append(
                StudySummary(
                    name=row.name,
                    created_at=f"{row.created_at:%Y-%m-%d %H:%M}",
                    trials=len(records),
                    trials_wanted=row.trials_wanted,
                    ok=sum(record.feasible for record in records),
                )
            )
        return summaries

    def dates(self, study: str) -> tuple[str, str]:
        """When the study was begun and when its last trial ended, to the minute; empty where none has ended."""
        last = select(sqlalchemy.func.max(TRIALS.c.finished_at)).join(STUDIES).where(STUDIES.c.name == study)
        with self._reading() as connection:
            begun = connection.scalar(select(STUDIES.c.created_at).where(STUDIES.c.name == study))
            ended = connection.scalar(last)
        return _minute(begun), _minute(ended)

    # -- trials ------------------------------------------------------------------------------------------------

    def trials(self, study: str) -> list[TrialRecord]:
        """Every trial of the study in the order of its number; one without a result reads as interrupted."""
        predicted = {fingerprint: one.prediction for fingerprint, one in self.forecasts(study).items()}
        with self._reading() as connection:
            rows = connection.execute(
                select(TRIALS, STUDIES.c.cap_bytes)
                .join(STUDIES)
                .where(STUDIES.c.name == study)
                .order_by(TRIALS.c.number)
            ).all()
            return [_record(row, predicted.get(row.fingerprint)) for row in rows]

    def begin_trial(self, study: str, number: int, config: TrainingConfig, *, name: str | None) -> None:
        """Takes down that this configuration is being run. One that was begun before keeps its row."""
        with self._writing() as connection:
            study_id = connection.scalar(select(STUDIES.c.id).where(STUDIES.c.name == study))
            known = select(TRIALS.c.id).where(TRIALS.c.study_id == study_id, TRIALS.c.number == number)
            if connection.scalar(known) is None:
                row = {
                    "study_id": study_id,
                    "number": number,
                    "fingerprint": config.fingerprint,
                    "name": name,
                    "config": config.to_dict(),
                }
                connection.execute(insert(TRIALS).values(row))

    def finish_trial(self, study: str, number: int, measurement: Measurement, *, seconds: float) -> None:
        """Keeps the result. When this returns it is on disk."""
        study_id = select(STUDIES.c.id).where(STUDIES.c.name == study).scalar_subquery()
        with self._writing() as connection:
            connection.execute(
                update(TRIALS)
                .where(TRIALS.c.study_id == study_id, TRIALS.c.number == number)
                .values(measurement=asdict(measurement), seconds=seconds, finished_at=sqlalchemy.func.now())
            )

    # -- predictions -------------------------------------------------------------------------------------------

    def keep_forecast(self, study: str, forecast: Forecast) -> None:
        """Keeps a prediction, or that there is none; what is known of a configuration already stays."""
        if forecast.config.fingerprint in self.forecasts(study):
            return
        study_id = select(STUDIES.c.id).where(STUDIES.c.name == study).scalar_subquery()
        with self._writing() as connection:
            connection.execute(insert(PREDICTIONS).values({"study_id": study_id, **_forecast_row(forecast)}))

    def forecasts(self, study: str) -> dict[str, Forecast]:
        """What was predicted in this study, by the configuration's fingerprint."""
        if not sqlalchemy.inspect(self._engine).has_table(PREDICTIONS.name):
            return {}  # a database from before there were predictions
        with self._reading() as connection:
            rows = connection.execute(select(PREDICTIONS).join(STUDIES).where(STUDIES.c.name == study)).all()
            return {row.fingerprint: _forecast(row) for row in rows}

    # -- connections -------------------------------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with storage_errors(self.url), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        with storage_errors(self.url), self._engine.begin() as connection:
            yield connection


def _minute(moment: datetime | None) -> str:
    """In UTC, which is what a database without time zones keeps."""
    if moment is None:
        return ""
    return f"{moment.astimezone(UTC) if moment.tzinfo else moment:%Y-%m-%d %H:%M}"


def _trial_row(record: TrialRecord) -> dict[str, Any]:
    """Of a trial whose result an earlier study has."""
    return {
        "number": record.number,
        "fingerprint": record.config.fingerprint,
        "name": record.name,
        "config": record.config.to_dict(),
        "measurement": {field.name: getattr(record, field.name) for field in fields(Measurement)},
        "seconds": record.seconds,
        "finished_at": datetime.now(UTC),
    }


def _forecast_row(forecast: Forecast) -> dict[str, Any]:
    return {
        "fingerprint": forecast.config.fingerprint,
        "config": forecast.config.to_dict(),
        "prediction": None if forecast.prediction is None else forecast.prediction.to_dict(),
        "refusal": forecast.refusal[:500],
    }


def _forecast(row: Any) -> Forecast:
    prediction = None if row.prediction is None else Prediction.from_dict(row.prediction)
    return Forecast(config=TrainingConfig(**row.config), prediction=prediction, refusal=row.refusal)


def _record(row: Any, prediction: Prediction | None) -> TrialRecord:
    measurement = row.measurement or asdict(Measurement(outcome="interrupted", message="has no result yet"))
    device_bytes = measurement["device_bytes"]
    if measurement["perplexity"] is not None and measurement.get("perplexity_source") is None:
        measurement = {**measurement, "perplexity_source": "measured"}  # written before it could be shared
    return TrialRecord(
        **measurement,
        number=row.number,
        config=TrainingConfig(**row.config),
        name=row.name,
        feasible=measurement["outcome"] == "ok"
        and all(measurement[objective] is not None for objective in DIRECTIONS)
        and device_bytes is not None
        and device_bytes <= row.cap_bytes,
        predicted_peak_memory_bytes=None if prediction is None else prediction.peak_memory_bytes,
        seconds=row.seconds,
    )
