"""Who tries which trial, under which lease, and which result counts.

Each call is one transaction and can be repeated.

A process that lost the database in the middle of a call does not know whether it was committed;
asking again with the same attempt's id does no harm. Every change holds the study's row from its
first statement to the commit, so that changes come one after the other, on SQLite as on PostgreSQL.
"""

from collections.abc import Collection, Mapping
from typing import Any, Literal

from sqlalchemy import Connection, case, func, insert, literal_column, select, update

from autotune.failpoints import failpoint
from autotune.spec.attempt import LEASE_SECONDS, MOST_RETRIES, Attempt, AttemptState, RunningAttempt
from autotune.spec.config import TrainingConfig
from autotune.spec.result import Measurement
from autotune.storage.database import Database
from autotune.storage.rows import (
    LONGEST_NAME,
    LONGEST_REASON,
    DamagedRow,
    finite_seconds,
    kept_name,
    kept_text,
    measurement_values,
)
from autotune.storage.tables import ATTEMPTS, STUDIES, TRIALS, DatabaseNow

Delivery = Literal["kept", "known", "late", "unknown"]
"""What became of a result: it is the trial's; it was already; it came too late and is kept aside;
no such attempt."""


_IS_RUNNING = ATTEMPTS.c.state == literal_column("'running'")
"""Written out, not as a parameter, for the index of those that run to serve: there may be very many
that ended."""


class Attempts:
    """Attempts at the trials of all studies of one database.

    Raises StorageUnavailable and StorageAway.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def claim(
        self,
        study: str,
        config: TrainingConfig,
        *,
        worker: str,
        attempt_id: str,
        most_trials: int,
        name: str | None = None,
    ) -> Attempt | None:
        """Takes the trial of `config`, a new one or one without a result.

        None where it has a result or another worker, was lost too often, or would be one more than
        `most_trials`.
        """
        try:
            with self._database.writing() as connection:
                study_id, revision = _hold(connection, STUDIES.c.name == study)
                trial = _trial_of(connection, study_id, config)
                if trial is None:
                    trial = _add_trial(
                        connection,
                        study_id,
                        config,
                        revision=revision,
                        most_trials=most_trials,
                        name=name,
                    )
                _check_free(connection, trial, attempt_id)
                if (
                    type(trial.number) is not int
                ):  # it names the trial's log; SQLite holds texts in any column
                    raise DamagedRow(f"trial {trial.number!r:.60} has no number")
                ordinal = _begin(connection, trial.id, attempt_id, worker=worker)
                attempt = Attempt(
                    id=attempt_id,
                    study=study,
                    number=trial.number,
                    name=trial.name,
                    ordinal=ordinal,
                )
                failpoint("trial claimed, not committed")
        except _NotToBeHad:
            return None  # and nothing was changed
        failpoint("trial claimed")
        return attempt

    def finish(self, attempt_id: str, measurement: Measurement, *, seconds: float) -> Delivery:
        """Keeps the result of an attempt. When this returns it is on disk, once."""
        of_attempt = select(TRIALS.c.study_id).join(ATTEMPTS).where(ATTEMPTS.c.id == attempt_id)
        result = {
            "measurement": measurement_values(measurement),
            "seconds": finite_seconds(seconds),
        }
        with self._database.writing() as connection:
            study_id = connection.scalar(of_attempt)
            if study_id is None:
                return "unknown"
            _, revision = _hold(connection, STUDIES.c.id == study_id)
            row = connection.execute(select(ATTEMPTS).where(ATTEMPTS.c.id == attempt_id)).one()
            if row.state == "finished":
                return "known"
            if row.state != "running":
                _change(connection, attempt_id, {"state": "late", **result})
                return "late"
            _change(connection, attempt_id, {"state": "finished", "ended_at": func.now()})
            values = {**result, "finished_at": func.now(), "revision": revision}
            connection.execute(update(TRIALS).where(TRIALS.c.id == row.trial_id).values(values))
            failpoint("result kept, not committed")
        failpoint("result kept")
        return "kept"

    def end(self, attempt_id: str, state: AttemptState, *, cause: str) -> bool:
        """Ends a running attempt without a result; False where it no longer ran."""
        of_attempt = (
            select(TRIALS.c.id, TRIALS.c.study_id).join(ATTEMPTS).where(ATTEMPTS.c.id == attempt_id)
        )
        with self._database.writing() as connection:
            trial = connection.execute(of_attempt).one_or_none()
            if trial is None:
                return False
            _, revision = _hold(connection, STUDIES.c.id == trial.study_id)
            ended = connection.execute(
                update(ATTEMPTS)
                .where(ATTEMPTS.c.id == attempt_id, ATTEMPTS.c.state == "running")
                .values(
                    state=state, cause=kept_text(cause, longest=LONGEST_REASON), ended_at=func.now()
                )
            )
            if ended.rowcount == 0:
                # a trial that has a result meanwhile has not changed: nobody is told of it again
                return False
            connection.execute(
                update(TRIALS).where(TRIALS.c.id == trial.id).values(revision=revision)
            )
            return True

    def renew(self, attempt_id: str) -> bool:
        """Extends the lease by its whole length; False where the attempt has been ended by somebody."""
        with self._database.writing() as connection:
            renewed = connection.execute(
                update(ATTEMPTS)
                .where(ATTEMPTS.c.id == attempt_id, ATTEMPTS.c.state == "running")
                .values(lease_until=DatabaseNow() + LEASE_SECONDS, renewals=ATTEMPTS.c.renewals + 1)
            )
            return renewed.rowcount == 1

    def running(self, study: str) -> list[RunningAttempt]:
        """Of the study, in the order of their trials."""
        expired = case((ATTEMPTS.c.lease_until < DatabaseNow(), 1), else_=0).label("expired")
        query = (
            select(ATTEMPTS, TRIALS.c.number, expired)
            .join(TRIALS, ATTEMPTS.c.trial_id == TRIALS.c.id)
            .join(STUDIES, TRIALS.c.study_id == STUDIES.c.id)
            .where(STUDIES.c.name == study, _IS_RUNNING)
            .order_by(TRIALS.c.number)
        )
        with self._database.reading() as connection:
            return [
                RunningAttempt(
                    id=row.id,
                    number=row.number,
                    worker=row.worker,
                    renewals=row.renewals,
                    is_expired=bool(row.expired),
                )
                for row in connection.execute(query)
            ]

    def losses(self, study: str, numbers: Collection[int]) -> Mapping[int, tuple[int, str]]:
        """Of these trials, number to how many of its attempts were lost, and what the last one was lost to."""
        if not numbers:
            return {}
        query = (
            select(TRIALS.c.number, ATTEMPTS.c.cause)
            .join(TRIALS, ATTEMPTS.c.trial_id == TRIALS.c.id)
            .join(STUDIES, TRIALS.c.study_id == STUDIES.c.id)
            .where(
                STUDIES.c.name == study, TRIALS.c.number.in_(numbers), ATTEMPTS.c.state == "lost"
            )
            .order_by(ATTEMPTS.c.ordinal)
        )
        found: dict[int, tuple[int, str]] = {}
        with self._database.reading() as connection:
            for number, cause in connection.execute(query):
                found[number] = (found.get(number, (0, ""))[0] + 1, cause)
        return found

    def deaths(self, study: str, numbers: Collection[int]) -> Mapping[int, int]:
        """Of these trials, number to how many of its attempts were given up: their workers died, or seemed to."""
        if not numbers:
            return {}
        query = (
            select(TRIALS.c.number, func.count().label("deaths"))
            .join(ATTEMPTS, ATTEMPTS.c.trial_id == TRIALS.c.id)
            .join(STUDIES, TRIALS.c.study_id == STUDIES.c.id)
            .where(
                STUDIES.c.name == study,
                TRIALS.c.number.in_(numbers),
                ATTEMPTS.c.state == "given_up",
            )
            .group_by(TRIALS.c.number)
        )
        with self._database.reading() as connection:
            return {row.number: row.deaths for row in connection.execute(query)}

    def forgive_losses(self, study: str) -> None:
        """Lets trials that the machine has cost all their attempts be tried anew, as by a later search."""
        of_study = select(TRIALS.c.id).join(STUDIES).where(STUDIES.c.name == study)
        with self._database.writing() as connection:
            _hold(connection, STUDIES.c.name == study)
            connection.execute(
                update(ATTEMPTS)
                .where(ATTEMPTS.c.trial_id.in_(of_study), ATTEMPTS.c.state == "lost")
                .values(state="forgiven")
            )


class _NotToBeHad(Exception):
    """Rolls a claim back."""


# -- within a transaction --------------------------------------------------------------------------


def _hold(connection: Connection, which: Any) -> tuple[int, int]:
    """The study's id and its new revision; nobody else changes its trials until the commit."""
    connection.execute(update(STUDIES).where(which).values(revision=STUDIES.c.revision + 1))
    row = connection.execute(select(STUDIES.c.id, STUDIES.c.revision).where(which)).one()
    return row.id, row.revision


def _trial_of(connection: Connection, study_id: int, config: TrainingConfig) -> Any:
    which = (TRIALS.c.study_id == study_id, TRIALS.c.fingerprint == config.fingerprint)
    columns = (TRIALS.c.id, TRIALS.c.number, TRIALS.c.name, TRIALS.c.finished_at)
    return connection.execute(select(*columns).where(*which)).one_or_none()


def _add_trial(
    connection: Connection,
    study_id: int,
    config: TrainingConfig,
    *,
    revision: int,
    most_trials: int,
    name: str | None,
) -> Any:
    last = connection.scalar(select(func.max(TRIALS.c.number)).where(TRIALS.c.study_id == study_id))
    number = 0 if last is None else last + 1
    if number >= most_trials:
        raise _NotToBeHad
    row = {
        "number": number,
        "fingerprint": config.fingerprint,
        "name": kept_name(name),
        "config": config.to_dict(),
    }
    connection.execute(insert(TRIALS).values(study_id=study_id, revision=revision, **row))
    return _trial_of(connection, study_id, config)


def _check_free(connection: Connection, trial: Any, attempt_id: str) -> None:
    """Raises _NotToBeHad where the trial has a result, a worker other than ours, or was lost too often.

    And where this very attempt was begun by a call whose answer was lost, and given up by somebody
    since.
    """
    attempts = connection.execute(
        select(ATTEMPTS.c.id, ATTEMPTS.c.state).where(ATTEMPTS.c.trial_id == trial.id)
    ).all()
    is_taken = any(one.state == "running" and one.id != attempt_id for one in attempts)
    is_over = any(one.state != "running" and one.id == attempt_id for one in attempts)
    losses = sum(one.state == "lost" for one in attempts)
    if trial.finished_at is not None or is_taken or is_over or losses > MOST_RETRIES:
        raise _NotToBeHad


def _begin(connection: Connection, trial_id: int, attempt_id: str, *, worker: str) -> int:
    """The attempt's ordinal; it may have been begun before, by a call that did not see its own commit."""
    begun = connection.scalar(select(ATTEMPTS.c.ordinal).where(ATTEMPTS.c.id == attempt_id))
    if begun is not None:
        return int(begun)
    last = connection.scalar(
        select(func.max(ATTEMPTS.c.ordinal)).where(ATTEMPTS.c.trial_id == trial_id)
    )
    ordinal = (last or 0) + 1
    connection.execute(
        insert(ATTEMPTS).values(
            id=attempt_id,
            trial_id=trial_id,
            ordinal=ordinal,
            worker=kept_text(worker, longest=LONGEST_NAME),
            state="running",
            lease_until=DatabaseNow() + LEASE_SECONDS,
            renewals=0,
            cause="",
        )
    )
    return ordinal


def _change(connection: Connection, attempt_id: str, values: Mapping[str, Any]) -> None:
    connection.execute(update(ATTEMPTS).where(ATTEMPTS.c.id == attempt_id).values(dict(values)))
