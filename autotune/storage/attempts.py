"""Attempts at trials: claiming a trial under a lease, renewing it, and storing one result a trial.

Each call is one transaction and is idempotent: a process that lost the connection during a call
does not know whether it was committed, and repeats the call with the same attempt id. Every
change locks the study's row from its first statement to the commit, so that changes to a study are
serialized, on SQLite and on PostgreSQL.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from sqlalchemy import Connection, case, func, insert, literal_column, select, update

from autotune.failpoints import failpoint
from autotune.spec.attempt import LEASE_SECONDS, MAX_RETRIES, Attempt, AttemptState, RunningAttempt
from autotune.spec.config import TrainingConfig
from autotune.spec.result import Measurement
from autotune.storage.database import Database
from autotune.storage.retry import RetryPolicy, retried
from autotune.storage.rows import (
    LONGEST_NAME,
    LONGEST_REASON,
    finite_seconds,
    measurement_values,
    running_attempt_from_row,
    storable_name,
    storable_text,
)
from autotune.storage.tables import ATTEMPTS, STUDIES, TRIALS, DatabaseNow

Delivery = Literal["stored", "known", "late", "unknown"]
"""What happened to a delivered result.

`stored`: it is now the trial's result. `known`: it was stored before. `late`: its attempt had
ended, so that the result is stored with the attempt and does not count. `unknown`: there is no such
attempt. Also of a confirmation: `stored`, or `unknown` where there is no such study.
"""


_IS_RUNNING = ATTEMPTS.c.state == literal_column("'running'")
"""A literal instead of a bound parameter, so that the query uses the partial index on running
attempts: there may be very many ended ones."""


class Attempts:
    """Reads and changes the attempts at the trials of all studies of one database.

    All methods raise StorageUnavailable, and StorageUnreachable for a database that is away for
    now. With `retry`, all but `renew` and `release` first wait for it as that policy says.
    """

    def __init__(self, database: Database, *, retry: RetryPolicy | None = None) -> None:
        self._database = database
        self._retry = retry

    @retried
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
        """Starts an attempt at the trial of `config`, which is added where it does not exist.

        Returns None where the trial has a result, runs on another worker or failed too often, or
        where a new trial would exceed `most_trials`.
        """
        try:
            with self._database.writing() as connection:
                study_id, revision = lock_study(connection, STUDIES.c.name == study)
                trial = _find_trial(connection, study_id, config)
                if trial is None:
                    trial = _add_trial(
                        connection,
                        study_id,
                        config,
                        revision=revision,
                        most_trials=most_trials,
                        name=name,
                    )
                _check_available(connection, trial, attempt_id)
                ordinal = _start_attempt(connection, trial.id, attempt_id, worker=worker)
                attempt = Attempt(
                    id=attempt_id,
                    study=study,
                    number=trial.number,
                    name=trial.name,
                    ordinal=ordinal,
                )
                failpoint("trial claimed, not committed")
        except _TrialUnavailable:
            return None  # the transaction was rolled back
        failpoint("trial claimed")
        return attempt

    def finish(
        self,
        attempt_id: str,
        measurement: Measurement,
        *,
        seconds: float,
        before_retry: Callable[[], None] = lambda: None,
    ) -> Delivery:
        """Stores the result of an attempt; a repeated call stores nothing.

        `seconds` is the wall-clock time of the trial. `before_retry` is called whenever the retry
        policy is about to try again. When this returns, the result is on disk.
        """

        def store_result() -> Delivery:
            return self._finish(attempt_id, measurement, seconds=seconds)

        if self._retry is None:
            return store_result()
        return self._retry.repeat(store_result, before_retry=before_retry)

    def _finish(self, attempt_id: str, measurement: Measurement, *, seconds: float) -> Delivery:
        study_of_attempt = (
            select(TRIALS.c.study_id).join(ATTEMPTS).where(ATTEMPTS.c.id == attempt_id)
        )
        result = {
            "measurement": measurement_values(measurement),
            "seconds": finite_seconds(seconds),
        }
        with self._database.writing() as connection:
            study_id = connection.scalar(study_of_attempt)
            if study_id is None:
                return "unknown"
            _, revision = lock_study(connection, STUDIES.c.id == study_id)
            row = connection.execute(select(ATTEMPTS).where(ATTEMPTS.c.id == attempt_id)).one()
            if row.state == "finished":
                return "known"
            if row.state != "running":
                _update_attempt(connection, attempt_id, {"state": "late", **result})
                return "late"
            _update_attempt(connection, attempt_id, {"state": "finished", "ended_at": func.now()})
            values = {**result, "finished_at": func.now(), "revision": revision}
            connection.execute(update(TRIALS).where(TRIALS.c.id == row.trial_id).values(values))
            failpoint("result kept, not committed")
        failpoint("result kept")
        return "stored"

    @retried
    def end(self, attempt_id: str, state: AttemptState, *, cause: str) -> bool:
        """Ends a running attempt without a result; returns whether it was running."""
        return self._end(attempt_id, state, cause=cause)

    def release(self, attempt_id: str, *, cause: str) -> bool:
        """Ends a running attempt of a search that stops; returns whether it was running.

        Never waits for the database: the search ends now, and the next worker ends the attempt.
        """
        return self._end(attempt_id, "given_back", cause=cause)

    def _end(self, attempt_id: str, state: AttemptState, *, cause: str) -> bool:
        trial_of_attempt = (
            select(TRIALS.c.id, TRIALS.c.study_id).join(ATTEMPTS).where(ATTEMPTS.c.id == attempt_id)
        )
        with self._database.writing() as connection:
            trial = connection.execute(trial_of_attempt).one_or_none()
            if trial is None:
                return False
            _, revision = lock_study(connection, STUDIES.c.id == trial.study_id)
            ended = connection.execute(
                update(ATTEMPTS)
                .where(ATTEMPTS.c.id == attempt_id, ATTEMPTS.c.state == "running")
                .values(
                    state=state,
                    cause=storable_text(cause, longest=LONGEST_REASON),
                    ended_at=func.now(),
                )
            )
            if ended.rowcount == 0:
                # The trial did not change: with a new revision, workers would read it again.
                return False
            connection.execute(
                update(TRIALS).where(TRIALS.c.id == trial.id).values(revision=revision)
            )
            return True

    def renew(self, attempt_ids: Collection[str]) -> set[str]:
        """Extends leases by LEASE_SECONDS from now; returns the ids of those that still run.

        Never waits for the database: leases are renewed from a thread of its own, which tries again
        after RENEWAL_SECONDS anyway.
        """
        still_running = ATTEMPTS.c.id.in_(attempt_ids), ATTEMPTS.c.state == "running"
        with self._database.writing() as connection:
            connection.execute(
                update(ATTEMPTS)
                .where(*still_running)
                .values(lease_until=DatabaseNow() + LEASE_SECONDS, renewals=ATTEMPTS.c.renewals + 1)
            )
            return set(connection.scalars(select(ATTEMPTS.c.id).where(*still_running)))

    @retried
    def running(self, study: str, *, but_of: str = "") -> list[RunningAttempt]:
        """Returns the running attempts of the study, ordered by trial number.

        Those of the worker `but_of` are left out.
        """
        expired = case((ATTEMPTS.c.lease_until < DatabaseNow(), 1), else_=0).label("expired")
        query = (
            select(ATTEMPTS, TRIALS.c.number, expired)
            .join(TRIALS, ATTEMPTS.c.trial_id == TRIALS.c.id)
            .join(STUDIES, TRIALS.c.study_id == STUDIES.c.id)
            .where(STUDIES.c.name == study, _IS_RUNNING, ATTEMPTS.c.worker != but_of)
            .order_by(TRIALS.c.number)
        )
        with self._database.reading() as connection:
            return [running_attempt_from_row(row) for row in connection.execute(query)]

    @retried
    def losses(self, study: str, numbers: Collection[int]) -> Mapping[int, tuple[int, str]]:
        """Returns {trial number: (failed attempts, cause of the last one)} for `numbers`.

        Only attempts that the machine ended (state `lost`) count; trials without one are left out.
        """
        return read_losses(self._database, study, numbers)

    @retried
    def deaths(self, study: str, numbers: Collection[int]) -> Mapping[int, int]:
        """Returns {trial number: expired attempts} for `numbers`.

        An attempt expires (state `given_up`) where its worker died or no longer renewed its lease.
        """
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

    @retried
    def forgive_losses(self, study: str) -> None:
        """Resets the count of failed attempts, so that a later search retries such trials."""
        trials_of_study = select(TRIALS.c.id).join(STUDIES).where(STUDIES.c.name == study)
        with self._database.writing() as connection:
            lock_study(connection, STUDIES.c.name == study)
            connection.execute(
                update(ATTEMPTS)
                .where(ATTEMPTS.c.trial_id.in_(trials_of_study), ATTEMPTS.c.state == "lost")
                .values(state="forgiven")
            )


def read_losses(
    database: Database, study: str, numbers: Collection[int]
) -> Mapping[int, tuple[int, str]]:
    """Does what `Attempts.losses` does, without its retry policy."""
    if not numbers:
        return {}
    query = (
        select(TRIALS.c.number, ATTEMPTS.c.cause)
        .join(TRIALS, ATTEMPTS.c.trial_id == TRIALS.c.id)
        .join(STUDIES, TRIALS.c.study_id == STUDIES.c.id)
        .where(STUDIES.c.name == study, TRIALS.c.number.in_(numbers), ATTEMPTS.c.state == "lost")
        .order_by(ATTEMPTS.c.ordinal)
    )
    losses: dict[int, tuple[int, str]] = {}
    with database.reading() as connection:
        for number, cause in connection.execute(query):
            earlier, _ = losses.get(number, (0, ""))
            losses[number] = (earlier + 1, cause)
    return losses


class _TrialUnavailable(Exception):
    """The trial cannot be claimed; raised to roll the transaction back."""


# -- within a transaction --------------------------------------------------------------------------


def lock_study(connection: Connection, condition: Any) -> tuple[int, int]:
    """Raises the study's revision; returns its id and the new revision.

    The update locks the study's row: no other transaction changes its trials or confirmations until
    the commit.
    """
    connection.execute(update(STUDIES).where(condition).values(revision=STUDIES.c.revision + 1))
    row = connection.execute(select(STUDIES.c.id, STUDIES.c.revision).where(condition)).one()
    return row.id, row.revision


def _find_trial(connection: Connection, study_id: int, config: TrainingConfig) -> Any:
    query = select(TRIALS.c.id, TRIALS.c.number, TRIALS.c.name, TRIALS.c.finished_at).where(
        TRIALS.c.study_id == study_id, TRIALS.c.fingerprint == config.fingerprint
    )
    return connection.execute(query).one_or_none()


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
        raise _TrialUnavailable
    row = {
        "number": number,
        "fingerprint": config.fingerprint,
        "name": storable_name(name),
        "config": config.to_dict(),
    }
    connection.execute(insert(TRIALS).values(study_id=study_id, revision=revision, **row))
    return _find_trial(connection, study_id, config)


def _check_available(connection: Connection, trial: Any, attempt_id: str) -> None:
    """Raises _TrialUnavailable where the trial has a result, runs elsewhere or failed too often.

    Also where an earlier call, whose reply was lost, started this same attempt, and it has ended
    since.
    """
    attempts = connection.execute(
        select(ATTEMPTS.c.id, ATTEMPTS.c.state).where(ATTEMPTS.c.trial_id == trial.id)
    ).all()
    if trial.finished_at is not None:
        raise _TrialUnavailable
    losses = 0
    for attempt in attempts:
        if attempt.state == "running" and attempt.id != attempt_id:
            raise _TrialUnavailable
        if attempt.state != "running" and attempt.id == attempt_id:
            raise _TrialUnavailable
        if attempt.state == "lost":
            losses += 1
    if losses > MAX_RETRIES:
        raise _TrialUnavailable


def _start_attempt(connection: Connection, trial_id: int, attempt_id: str, *, worker: str) -> int:
    """Returns the attempt's ordinal.

    A call that did not see its own commit may have started the attempt before.
    """
    existing = connection.scalar(select(ATTEMPTS.c.ordinal).where(ATTEMPTS.c.id == attempt_id))
    if existing is not None:
        return int(existing)
    last = connection.scalar(
        select(func.max(ATTEMPTS.c.ordinal)).where(ATTEMPTS.c.trial_id == trial_id)
    )
    ordinal = (last or 0) + 1
    connection.execute(
        insert(ATTEMPTS).values(
            id=attempt_id,
            trial_id=trial_id,
            ordinal=ordinal,
            worker=storable_text(worker, longest=LONGEST_NAME),
            state="running",
            lease_until=DatabaseNow() + LEASE_SECONDS,
            renewals=0,
            cause="",
        )
    )
    return ordinal


def _update_attempt(connection: Connection, attempt_id: str, values: Mapping[str, Any]) -> None:
    connection.execute(update(ATTEMPTS).where(ATTEMPTS.c.id == attempt_id).values(dict(values)))
