"""Stores and loads studies, trials, predictions and confirmations; takes and returns dataclasses.

The database is the only state of a study. Optuna's samplers keep none: each process that uses one
feeds it the stored trials.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any

import sqlalchemy
from sqlalchemy import Column, ColumnElement, Select, and_, insert, select, update

from autotune.errors import (
    StorageUnavailable,
    StorageUnreachable,
    StudyMismatch,
)
from autotune.spec.config import TrainingConfig
from autotune.spec.confirmation import Confirmation, new_confirmation_id
from autotune.spec.limits import SizeBytes
from autotune.spec.prediction import Forecast
from autotune.spec.reading import fits
from autotune.spec.result import TrialRecord
from autotune.spec.script_files import with_files_of_trial
from autotune.spec.study import DEFAULT_STORAGE, StudyDefinition
from autotune.storage.attempts import Attempts, lock_study, read_causes, study_names
from autotune.storage.database import BUSY_TIMEOUT_SECONDS, Database
from autotune.storage.error_translation import (
    Conflict,
    check_schema_version,
    damage_hint,
    storage_errors,
    unknown_study,
)
from autotune.storage.leases import AttemptLease
from autotune.storage.retry import ONCE, RetryPolicy, retried
from autotune.storage.rows import (
    DamagedRow,
    confirmation_from_row,
    confirmation_row,
    definition_from_row,
    definition_row,
    forecast_from_row,
    forecast_row,
    record_from_row,
    trial_row,
)
from autotune.storage.schema import open_studies
from autotune.storage.stored_columns import Unreadable, decode
from autotune.storage.tables import (
    ATTEMPTS,
    CONFIRMATIONS,
    PREDICTIONS,
    STUDIES,
    TRIALS,
)


@dataclass(frozen=True, kw_only=True)
class StudySummary:
    """One line of the list of studies."""

    name: str
    created_at: str
    """To the minute, in UTC."""
    trials: int
    """The number of trials with a result."""
    trials_wanted: int


@dataclass(frozen=True, kw_only=True)
class StudyVersion:
    """Equals an earlier one of the same study only if what was read then is still the same."""

    study_id: int
    begun: str
    """Another study of the same name, or with the id of a deleted one, has another one."""
    revision: int
    """Of its trials and confirmations."""
    forecasts: int
    """How many predictions are stored; they never change."""
    trials_wanted: int
    workload_characters: int
    """Of the stored workload, to which a search of a script adds files."""
    running: int
    """How many attempts run with a lease; one expires with time alone."""


@dataclass(frozen=True, kw_only=True)
class StudyEntry:
    """A study in the list of a server, without its trials."""

    version: StudyVersion
    name: str
    created_at: datetime
    """In UTC."""
    device: str
    """The vendor's name of the device."""
    cap_bytes: int


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Trials that were started, failed or finished since a revision of the study.

    `records` are ordered from the oldest change to the newest.
    """

    revision: int
    """The study's revision that they lead to."""
    records: Sequence[TrialRecord]


class StudyStore:
    """The studies of one database.

    With `create`, the database is created where it does not exist. `was_reached` says that this
    process has used it before: what cannot be reached is then away for a while and not
    misconfigured. `busy_timeout_seconds` is how long SQLite waits for another process's lock. All
    methods raise StorageUnavailable for a database that cannot be used, and StorageUnreachable for
    one that cannot be used at the moment. Opening it and the methods that are `retried` first wait
    for it as `retry` says.
    """

    def __init__(
        self,
        url: str = DEFAULT_STORAGE,
        *,
        create: bool = False,
        was_reached: bool = False,
        busy_timeout_seconds: float = BUSY_TIMEOUT_SECONDS,
        retry: RetryPolicy = ONCE,
    ) -> None:
        self._retry = retry

        def open_database() -> Database:
            database = Database(
                url,
                create=create,
                was_reached=was_reached,
                busy_timeout_seconds=busy_timeout_seconds,
            )
            with database.opening():
                try:
                    open_studies(database, create=create)
                except BaseException:
                    database.close()
                    raise
            return database

        self._database = retry.repeat(open_database)
        self.url = self._database.url
        """The database's URL without its password, for messages."""
        self.attempts = Attempts(self._database, retry=retry)

    @property
    def database(self) -> Database:
        """The database, for what is stored in it beside the studies."""
        return self._database

    def close(self) -> None:
        self._database.close()

    # -- studies -----------------------------------------------------------------------------------

    @retried
    def create_study(
        self,
        definition: StudyDefinition,
        *,
        trials_wanted: int,
        records: Sequence[TrialRecord] = (),
        forecasts: Sequence[Forecast] = (),
        confirmations: Sequence[Confirmation] = (),
    ) -> None:
        """Adds a study with the results and predictions that it begins with, in one transaction.

        `records`, `forecasts` and `confirmations` may come from earlier studies. Raises
        StudyMismatch where there is a study of that name; with a retry policy it may be of this
        very call, where the connection was lost during the commit.
        """
        try:
            with self._database.writing() as connection:
                row = definition_row(definition, trials_wanted=trials_wanted)
                inserted = connection.execute(insert(STUDIES).values(row))
                (study_id,) = inserted.inserted_primary_key or (None,)
                trials = [{"study_id": study_id, **trial_row(record)} for record in records]
                predictions = [
                    {"study_id": study_id, **forecast_row(forecast)} for forecast in forecasts
                ]
                if trials:
                    connection.execute(insert(TRIALS), trials)
                beside = [
                    {
                        "id": new_confirmation_id(),
                        "study_id": study_id,
                        "ordinal": ordinal,
                        **confirmation_row(confirmation),
                    }
                    for ordinal, confirmation in enumerate(confirmations, start=1)
                ]
                if predictions:
                    connection.execute(insert(PREDICTIONS), predictions)
                if beside:
                    connection.execute(insert(CONFIRMATIONS), beside)
        except Conflict:
            raise StudyMismatch(
                f"there is a study {definition.name!r} in {self.url} already",
                hint="give the new one another --name",
            ) from None

    @retried
    def set_trials_wanted(self, study: str, trials_wanted: int) -> None:
        with self._database.writing() as connection:
            connection.execute(
                update(STUDIES).where(STUDIES.c.name == study).values(trials_wanted=trials_wanted)
            )

    @retried
    def add_script_files(self, study: str, found: Mapping[str, str]) -> Mapping[str, str]:
        """Adds files that a trial's script first read after `autotune.apply`: {path: SHA-256}.

        Returns all such files of the study. Raises UnknownStudy, and StudyMismatch if one of them
        has changed since another trial has read it; nothing is added then.
        """
        of_study = STUDIES.c.name == study
        with self._database.writing() as connection:
            if found:  # locks the study's row until the commit
                connection.execute(update(STUDIES).where(of_study).values(name=study))
            row = connection.execute(select(STUDIES.c.workload).where(of_study)).one_or_none()
            if row is None:
                raise unknown_study(study, study_names(connection), url=self.url)
            workload = dict(row.workload)
            later = workload.get("script_files_after_apply", {})
            merged = with_files_of_trial(workload.get("script_files"), later, found)
            if merged != later:
                workload["script_files_after_apply"] = merged
                connection.execute(update(STUDIES).where(of_study).values(workload=workload))
        return merged

    @retried
    def names(self) -> list[str]:
        """Returns the names of all studies, oldest first."""
        with self._database.reading() as connection:
            return study_names(connection)

    @retried
    def has_study(self, study: str) -> bool:
        with self._database.reading() as connection:
            return (
                connection.scalar(select(STUDIES.c.id).where(STUDIES.c.name == study)) is not None
            )

    @retried
    def definition(self, study: str) -> tuple[StudyDefinition, int]:
        """Returns the study's definition and its number of wanted trials. Raises UnknownStudy."""
        with self._database.reading() as connection:
            row = connection.execute(select(STUDIES).where(STUDIES.c.name == study)).one_or_none()
            if row is None:
                raise unknown_study(study, study_names(connection), url=self.url)
            check_schema_version(study, row.schema_version, url=self.url)
            return definition_from_row(row), row.trials_wanted

    @retried
    def studies(self) -> list[StudySummary]:
        """Returns a summary of every study, oldest first."""
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

    @retried
    def version(self, study: str) -> StudyVersion | None:
        """Returns the version of what is stored of a study; None where there is no such study."""
        entries = self._entries(STUDIES.c.name == study)
        return entries[0].version if entries else None

    @retried
    def entries(self) -> list[StudyEntry]:
        """Returns every study, oldest first, without a look at its trials."""
        return self._entries()

    def _entries(self, *conditions: ColumnElement[bool]) -> list[StudyEntry]:
        query = _ENTRIES.where(*conditions)
        with self._database.reading() as connection:
            return [_entry(row) for row in connection.execute(query)]

    @retried
    def finished_trials(self, studies: Sequence[int]) -> dict[int, int]:
        """Returns the number of trials with a result by the id of their study, one of `studies`."""
        query = (
            select(TRIALS.c.study_id, sqlalchemy.func.count(TRIALS.c.finished_at))
            .where(TRIALS.c.study_id.in_(studies))
            .group_by(TRIALS.c.study_id)
        )
        with self._database.reading() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    @retried
    def outcomes(self) -> dict[str, int]:
        """Returns how many trials of all studies ended in each outcome."""
        outcome = TRIALS.c.measurement["outcome"].as_string().label("outcome")
        query = (
            select(outcome, sqlalchemy.func.count())
            .where(TRIALS.c.finished_at.is_not(None))
            .group_by(outcome)
        )
        try:
            with self._database.reading() as connection:
                return {str(name): number for name, number in connection.execute(query)}
        except StorageUnreachable:
            raise
        except StorageUnavailable:  # the database itself cannot decode one of them
            return self._readable_outcomes()

    def _readable_outcomes(self) -> dict[str, int]:
        """Does what `outcomes` does, without the trials that cannot be decoded."""
        query = select(TRIALS.c.measurement).where(TRIALS.c.finished_at.is_not(None))
        with self._database.reading() as connection:
            stored = connection.scalars(query).all()
        return dict(Counter(str(one.get("outcome")) for one in stored if isinstance(one, dict)))

    @retried
    def dates(self, study: str) -> tuple[str, str]:
        """Returns when the study was created and its last trial finished, to the minute in UTC.

        The second is empty where no trial has finished.
        """
        last = (
            select(sqlalchemy.func.max(TRIALS.c.finished_at))
            .join(STUDIES)
            .where(STUDIES.c.name == study)
        )
        with self._database.reading() as connection:
            begun = connection.scalar(select(STUDIES.c.created_at).where(STUDIES.c.name == study))
            ended = connection.scalar(last)
        return _minute(begun), _minute(ended)

    @retried
    def begun(self, study: str) -> str:
        """Returns when the study was created, in UTC, as exactly as the database stores it.

        A copy of the study keeps it; another study of the same name has another one. Raises
        UnknownStudy.
        """
        created_at = select(STUDIES.c.created_at).where(STUDIES.c.name == study)
        with self._database.reading() as connection:
            moment = connection.scalar(created_at)
            if moment is None:
                raise unknown_study(study, study_names(connection), url=self.url)
        return f"{_in_utc(moment):%Y-%m-%dT%H:%M:%S.%f}"

    # -- trials ------------------------------------------------------------------------------------

    @retried
    def trials(self, study: str) -> list[TrialRecord]:
        """Returns every trial of the study by number; one without a result is interrupted.

        Raises StorageUnavailable where some are missing.
        """
        records = self._records(study, _select_trials(study).order_by(TRIALS.c.number))
        for number, record in enumerate(records):
            if record.number != number:
                raise StorageUnavailable(
                    f"trial {number} of study {study!r} in {self.url} is missing",
                    hint=damage_hint(self.url),
                )
        return records

    @retried
    def trial_times(self, study: str) -> list[tuple[float, float]]:
        """Returns of each trial that was measured in the study when it began, and its seconds.

        It began at seconds since 1970 by the clock of the database, which may store whole ones.
        """
        query = _select_finished(study, TRIALS.c.seconds).where(TRIALS.c.seconds.is_not(None))
        with self._database.reading() as connection:
            return [
                (_in_utc(row.began).replace(tzinfo=UTC).timestamp(), row.seconds)
                for row in connection.execute(query)
            ]

    @retried
    def trial_dates(self, study: str) -> dict[int, tuple[datetime, datetime]]:
        """Returns by its number when each trial with a result began and finished, in UTC.

        The clock is that of the database, which may store whole seconds.
        """
        query = _select_finished(study, TRIALS.c.number, TRIALS.c.finished_at)
        with self._database.reading() as connection:
            return {
                row.number: (
                    _in_utc(row.began).replace(tzinfo=UTC),
                    _in_utc(row.finished_at).replace(tzinfo=UTC),
                )
                for row in connection.execute(query)
            }

    @retried
    def changes(self, study: str, *, since: int) -> Changes:
        """Returns the trials that changed after revision `since`; -1 returns all of them."""
        with self._database.reading() as connection:
            revision = connection.scalar(select(STUDIES.c.revision).where(STUDIES.c.name == study))
        if revision is None or revision == since:
            return Changes(revision=since, records=())
        changed = _select_trials(study).where(
            TRIALS.c.revision > since, TRIALS.c.revision <= revision
        )
        records = self._records(study, changed.order_by(TRIALS.c.revision, TRIALS.c.number))
        return Changes(revision=revision, records=records)

    def _records(self, study: str, query: Select[Any]) -> list[TrialRecord]:
        try:
            with self._database.reading() as connection:
                rows = connection.execute(query).all()
        except StorageUnreachable:
            raise
        except StorageUnavailable:
            # The database has to decode predictions; this names one that cannot be.
            self.forecasts(study)
            raise
        unfinished = [row.number for row in rows if row.measurement is None]
        losses = read_causes(self._database, study, unfinished, "lost")
        with storage_errors(self.url):  # translates DamagedRow
            records = []
            for row in rows:
                record = record_from_row(
                    row,
                    cap_bytes=row.cap_bytes,
                    predicted_bytes=row.predicted,
                    losses=losses.get(row.number, ()),
                )
                records.append(record)
            return records

    # -- predictions -------------------------------------------------------------------------------

    @retried
    def store_forecast(self, study: str, forecast: Forecast) -> None:
        """Stores a prediction, or that there is none, unless the configuration has one already."""
        if self._has_forecast(study, forecast.config):
            return
        study_id = select(STUDIES.c.id).where(STUDIES.c.name == study).scalar_subquery()
        try:
            with self._database.writing() as connection:
                connection.execute(
                    insert(PREDICTIONS).values({"study_id": study_id, **forecast_row(forecast)})
                )
        except Conflict:
            pass  # another worker has predicted the same configuration

    def _has_forecast(self, study: str, config: TrainingConfig) -> bool:
        query = (
            select(PREDICTIONS.c.id)
            .join(STUDIES)
            .where(STUDIES.c.name == study, PREDICTIONS.c.fingerprint == config.fingerprint)
        )
        with self._database.reading() as connection:
            return connection.scalar(query) is not None

    @retried
    def forecasts(self, study: str, *, of: TrainingConfig | None = None) -> dict[str, Forecast]:
        """Returns the study's predictions by the configuration's fingerprint, or only that of one.

        It is empty where that one has none.
        """
        query = select(PREDICTIONS).join(STUDIES).where(STUDIES.c.name == study)
        if of is not None:
            query = query.where(PREDICTIONS.c.fingerprint == of.fingerprint)
        with self._database.reading() as connection:
            rows = connection.execute(query).all()
            return {row.fingerprint: forecast_from_row(row) for row in rows}

    # -- confirmations -----------------------------------------------------------------------------

    def add_confirmation(
        self,
        study: str,
        confirmation: Confirmation,
        *,
        confirmation_id: str,
        before_retry: Callable[[], None] = lambda: None,
    ) -> None:
        """Stores a measurement beside the study's trials; a repeated call stores nothing.

        `before_retry` is called whenever the retry policy is about to try again. When this returns,
        the measurement is on disk. Raises UnknownStudy, and ValueError for one that is impossible,
        such as a negative speed.
        """
        row = confirmation_row(confirmation)
        store_row = partial(self._add_confirmation, study, row, confirmation_id=confirmation_id)
        self._retry.repeat(store_row, before_retry=before_retry)

    def _add_confirmation(
        self, study: str, row: Mapping[str, Any], *, confirmation_id: str
    ) -> None:
        is_same = CONFIRMATIONS.c.id == confirmation_id
        with self._database.writing() as connection:
            study_id, _ = lock_study(connection, study)
            if connection.scalar(select(CONFIRMATIONS.c.id).where(is_same)) is not None:
                return
            last = connection.scalar(
                select(sqlalchemy.func.max(CONFIRMATIONS.c.ordinal)).where(
                    CONFIRMATIONS.c.study_id == study_id
                )
            )
            connection.execute(
                insert(CONFIRMATIONS).values(
                    id=confirmation_id, study_id=study_id, ordinal=(last or 0) + 1, **row
                )
            )

    @retried
    def confirmations(self, study: str) -> list[Confirmation]:
        """Returns what was measured beside the study's trials, oldest first.

        Raises StorageUnavailable where some cannot be read.
        """
        query = (
            select(CONFIRMATIONS)
            .join(STUDIES)
            .where(STUDIES.c.name == study)
            .order_by(CONFIRMATIONS.c.ordinal)
        )
        with self._database.reading() as connection:
            return [confirmation_from_row(row) for row in connection.execute(query)]


_ENTRY_COLUMNS = ("id", "name", "created_at", "cap_bytes", "revision", "trials_wanted")


def _select_entries() -> Select[Any]:
    """Selects all that a `StudyEntry` says, oldest study first."""
    forecasts = (
        select(sqlalchemy.func.count())
        .where(PREDICTIONS.c.study_id == STUDIES.c.id)
        .scalar_subquery()
    )
    workload = sqlalchemy.func.length(sqlalchemy.cast(STUDIES.c.workload, sqlalchemy.Text))
    # Counted together, which reads the attempts that run; for each study it reads all trials.
    running = (
        select(TRIALS.c.study_id, sqlalchemy.func.count().label("running"))
        .select_from(ATTEMPTS.join(TRIALS))
        .where(AttemptLease.unexpired)
        .group_by(TRIALS.c.study_id)
        .subquery()
    )
    return (
        select(
            *(STUDIES.c[name] for name in _ENTRY_COLUMNS),
            # As text, which `_entry` decodes once.
            sqlalchemy.cast(STUDIES.c.device, sqlalchemy.Text).label("device"),
            forecasts.label("forecasts"),
            workload.label("workload_characters"),
            sqlalchemy.func.coalesce(running.c.running, 0).label("running"),
        )
        .select_from(STUDIES.outerjoin(running, running.c.study_id == STUDIES.c.id))
        .order_by(STUDIES.c.id)
    )


_ENTRIES = _select_entries()
"""Made once: a server asks for it with every request."""


_NO_DATE = datetime(1970, 1, 1)


@lru_cache(maxsize=10_000)
def _entry(row: Any) -> StudyEntry:
    """Returns the entry of a row, which is made once for as long as the study does not change."""
    # One row that cannot be read must not end the list; its own page says what it is.
    device = decode(row.device)
    moment = _NO_DATE if isinstance(row.created_at, Unreadable) else row.created_at
    created_at = _in_utc(moment).replace(tzinfo=UTC)
    return StudyEntry(
        version=StudyVersion(
            study_id=row.id,
            begun=created_at.isoformat(),
            revision=row.revision,
            forecasts=row.forecasts,
            trials_wanted=row.trials_wanted,
            workload_characters=row.workload_characters,
            running=row.running,
        ),
        name=row.name,
        created_at=created_at,
        device=str(device.get("name", "")) if isinstance(device, dict) else "",
        cap_bytes=row.cap_bytes if fits(SizeBytes, row.cap_bytes) else 0,
    )


def _select_trials(study: str) -> Select[Any]:
    """Selects the study's trials with its cap and their predicted peak, both in bytes."""
    same_config = and_(
        TRIALS.c.study_id == PREDICTIONS.c.study_id,
        TRIALS.c.fingerprint == PREDICTIONS.c.fingerprint,
    )
    return (
        select(
            TRIALS,
            STUDIES.c.cap_bytes,
            PREDICTIONS.c.prediction["peak_memory_bytes"].as_float().label("predicted"),
        )
        .select_from(TRIALS.join(STUDIES).outerjoin(PREDICTIONS, same_config))
        .where(STUDIES.c.name == study)
    )


def _select_finished(study: str, *columns: Column[Any]) -> Select[Any]:
    """Selects columns of the study's trials with a result, and as `began` when each began."""
    is_result = and_(ATTEMPTS.c.trial_id == TRIALS.c.id, ATTEMPTS.c.state == "finished")
    # A study of before attempts were stored has only the trial's own date.
    began = sqlalchemy.func.coalesce(ATTEMPTS.c.started_at, TRIALS.c.started_at)
    return (
        select(sqlalchemy.type_coerce(began, TRIALS.c.started_at.type).label("began"), *columns)
        .select_from(sqlalchemy.join(TRIALS, STUDIES).outerjoin(ATTEMPTS, is_result))
        .where(STUDIES.c.name == study, TRIALS.c.finished_at.is_not(None))
    )


def _minute(moment: datetime | Unreadable | None) -> str:
    """Formats a moment in UTC; None is empty, and so is what is not a date."""
    if moment is None or isinstance(moment, Unreadable):
        return ""
    return f"{_in_utc(moment):%Y-%m-%d %H:%M}"


def _in_utc(moment: datetime | Unreadable) -> datetime:
    """Returns a moment in UTC, which is what a database without time zones stores.

    Raises DamagedRow for one that is not a date.
    """
    if isinstance(moment, Unreadable):
        raise DamagedRow(f"a date of the study {moment.why}")
    return moment if moment.tzinfo is None else moment.astimezone(UTC)
