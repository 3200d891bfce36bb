"""Attempts at trials: claiming a trial under a lease, renewing it, and storing one result a trial.

Each call is one transaction and is idempotent: a process that lost the connection during a call
does not know whether it was committed, and repeats the call with the same attempt id. Every
change locks the study's row from its first statement to the commit, so that changes to a study are
serialized, on SQLite and on PostgreSQL.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, func, insert, not_, select, update

from autotune.spec.attempt import MAX_RETRIES, Attempt, AttemptState, RunningAttempt
from autotune.spec.config import TrainingConfig
from autotune.spec.result import Measurement
from autotune.storage.database import Database
from autotune.storage.error_translation import unknown_study
from autotune.storage.leases import IS_RUNNING, AttemptLease
from autotune.storage.retry import ONCE, RetryPolicy, retried
from autotune.storage.rows import (
    LONGEST_NAME,
    LONGEST_REASON,
    finite_seconds,
    measurement_values,
    running_attempt_from_row,
    storable_name,
    storable_text,
)
from autotune.storage.schema import check_revision
from autotune.storage.tables import ATTEMPTS, STUDIES, TRIALS
from autotune.system.failpoints import failpoint

Delivery = Literal["stored", "known", "late", "unknown"]
"""What happened to a delivered result.

`stored`: it is now the trial's result. `known`: it was stored before. `late`: its attempt had
ended, so that the result is stored with the attempt and does not count. `unknown`: there is no such
attempt. Also of a confirmation: `stored`, or `unknown` where there is no such study.
"""


class Attempts:
    """Reads and changes the attempts at the trials of all studies of one database.

    All methods raise StorageUnavailable, and StorageUnreachable for a database that is away for
    now. All but `renew` and `release` first wait for it as `retry` says.
    """

    def __init__(self, database: Database, *, retry: RetryPolicy = ONCE) -> None:
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
        where a new trial would exceed `most_trials`. Raises UnknownStudy.
        """
        try:
            with self._database.writing() as connection:
                study_id, revision = lock_study(connection, study)
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
                ordinal = _start_attempt(connection, trial, attempt_id, worker=worker)
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
        store_result = partial(self._finish, attempt_id, measurement, seconds=seconds)
        return self._retry.repeat(store_result, before_retry=before_retry)

    def _finish(self, attempt_id: str, measurement: Measurement, *, seconds: float) -> Delivery:
        result = {
            "measurement": measurement_values(measurement),
            "seconds": finite_seconds(seconds),
        }
        of_attempt = ATTEMPTS.c.id == attempt_id
        with self._database.writing() as connection:
            revision = _lock_study_of(connection, of_attempt)
            if revision is None:
                return "unknown"
            if not _end_attempt(connection, attempt_id, "finished"):
                state = connection.scalar(select(ATTEMPTS.c.state).where(of_attempt))
                if state == "finished":
                    return "known"
                connection.execute(
                    update(ATTEMPTS).where(of_attempt).values(state="late", **result)
                )
                return "late"
            _update_trial(
                connection, of_attempt, finished_at=func.now(), revision=revision, **result
            )
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
        of_attempt = ATTEMPTS.c.id == attempt_id
        with self._database.writing() as connection:
            revision = _lock_study_of(connection, of_attempt)
            if not _end_attempt(connection, attempt_id, state, cause=cause):
                # The trial did not change: with a new revision, workers would read it again.
                return False
            _update_trial(connection, of_attempt, revision=revision)
            return True

    def renew(self, attempt_ids: Collection[str]) -> set[str]:
        """Extends leases by LEASE_SECONDS from now; returns the ids of those that still run.

        Never waits for the database: leases are renewed from a thread of its own, which tries again
        after RENEWAL_SECONDS anyway.
        """
        lease = AttemptLease(*attempt_ids)
        with self._database.writing() as connection:
            lease.write(connection)
            return set(connection.scalars(select(ATTEMPTS.c.id).where(lease.is_held)))

    @retried
    def running(self, study: str, *, but_of: str = "") -> list[RunningAttempt]:
        """Returns the running attempts of the study, ordered by trial number.

        Those of the worker `but_of` are left out.
        """
        expired = not_(AttemptLease.unexpired).label("expired")
        query = (
            select(ATTEMPTS, TRIALS.c.number, expired)
            .join(TRIALS, ATTEMPTS.c.trial_id == TRIALS.c.id)
            .join(STUDIES, TRIALS.c.study_id == STUDIES.c.id)
            .where(STUDIES.c.name == study, IS_RUNNING, ATTEMPTS.c.worker != but_of)
            .order_by(TRIALS.c.number)
        )
        with self._database.reading() as connection:
            return [running_attempt_from_row(row) for row in connection.execute(query)]

    @retried
    def causes(
        self, study: str, numbers: Collection[int], state: AttemptState
    ) -> Mapping[int, list[str]]:
        """Returns {trial number: why its attempts ended, oldest first} for `numbers`.

        Only attempts that ended in `state` count, such as `lost`, where the machine ended them, or
        `given_up`, where their worker died or no longer renewed its lease. Trials without one are
        left out.
        """
        return read_causes(self._database, study, numbers, state)

    @retried
    def forgive_losses(self, study: str) -> None:
        """Resets the count of failed attempts, so that a later search retries such trials.

        Raises UnknownStudy.
        """
        trials_of_study = select(TRIALS.c.id).join(STUDIES).where(STUDIES.c.name == study)
        with self._database.writing() as connection:
            lock_study(connection, study)
            connection.execute(
                update(ATTEMPTS)
                .where(ATTEMPTS.c.trial_id.in_(trials_of_study), ATTEMPTS.c.state == "lost")
                .values(state="forgiven")
            )


def read_causes(
    database: Database, study: str, numbers: Collection[int], state: AttemptState
) -> Mapping[int, list[str]]:
    """Does what `Attempts.causes` does, without its retry policy."""
    if not numbers:
        return {}
    query = (
        select(TRIALS.c.number, ATTEMPTS.c.cause)
        .join(TRIALS, ATTEMPTS.c.trial_id == TRIALS.c.id)
        .join(STUDIES, TRIALS.c.study_id == STUDIES.c.id)
        .where(STUDIES.c.name == study, TRIALS.c.number.in_(numbers), ATTEMPTS.c.state == state)
        .order_by(ATTEMPTS.c.ordinal)
    )
    causes: dict[int, list[str]] = {}
    with database.reading() as connection:
        for number, cause in connection.execute(query):
            causes.setdefault(number, []).append(cause)
    return causes


class _TrialUnavailable(Exception):
    """The trial cannot be claimed; raised to roll the transaction back."""


# -- within a transaction --------------------------------------------------------------------------


def study_names(connection: Connection) -> list[str]:
    """Returns the names of all studies, oldest first."""
    return list(connection.scalars(select(STUDIES.c.name).order_by(STUDIES.c.id)))


def lock_study(connection: Connection, study: str) -> tuple[int, int]:
    """Raises the study's revision; returns its id and the new revision.

    The update locks the study's row: no other transaction changes its trials or confirmations until
    the commit. Raises UnknownStudy, and StorageUnavailable for a database that a later autotune has
    upgraded.
    """
    row = _lock(connection, STUDIES.c.name == study)
    if row is None:
        url = str(connection.engine.url)
        raise unknown_study(study, study_names(connection), url=url)
    return row.id, row.revision


def _lock_study_of(connection: Connection, of_attempt: ColumnElement[bool]) -> int | None:
    """Does what `lock_study` does for the study of an attempt; returns its new revision.

    None where there is no such attempt.
    """
    study_id = connection.scalar(select(TRIALS.c.study_id).join(ATTEMPTS).where(of_attempt))
    row = _lock(connection, STUDIES.c.id == study_id)
    return None if row is None else row.revision


def _lock(connection: Connection, condition: ColumnElement[bool]) -> Any:
    """Locks the row of a study, and returns its id and its new revision; None without a study."""
    connection.execute(update(STUDIES).where(condition).values(revision=STUDIES.c.revision + 1))
    check_revision(connection, str(connection.engine.url))
    return connection.execute(
        select(STUDIES.c.id, STUDIES.c.revision).where(condition)
    ).one_or_none()


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


def _start_attempt(connection: Connection, trial: Any, attempt_id: str, *, worker: str) -> int:
    """Returns the attempt's ordinal; an earlier call, whose reply was lost, may have started it.

    Raises _TrialUnavailable where the trial has a result, runs elsewhere or failed too often; also
    where this same attempt was started before and has ended since.
    """
    if trial.finished_at is not None:
        raise _TrialUnavailable
    attempts = connection.execute(
        select(ATTEMPTS.c.id, ATTEMPTS.c.state, ATTEMPTS.c.ordinal)
        .where(ATTEMPTS.c.trial_id == trial.id)
        .order_by(ATTEMPTS.c.ordinal)
    ).all()
    losses, last = 0, 0
    for attempt in attempts:
        is_running, is_same = attempt.state == "running", attempt.id == attempt_id
        if is_running and is_same:
            return int(attempt.ordinal)
        if is_running or is_same:
            raise _TrialUnavailable
        losses += attempt.state == "lost"
        last = attempt.ordinal
    if losses > MAX_RETRIES:
        raise _TrialUnavailable
    connection.execute(
        insert(ATTEMPTS).values(
            id=attempt_id,
            trial_id=trial.id,
            ordinal=last + 1,
            worker=storable_text(worker, longest=LONGEST_NAME),
            state="running",
            lease_until=AttemptLease.until,
            renewals=0,
            cause="",
        )
    )
    return last + 1


def _end_attempt(
    connection: Connection, attempt_id: str, state: AttemptState, *, cause: str = ""
) -> bool:
    """Ends an attempt; returns False, and changes nothing, where it has ended already."""
    cause = storable_text(cause, longest=LONGEST_REASON)
    lease = AttemptLease(attempt_id)
    return lease.write(connection, state=state, cause=cause, ended_at=func.now())


def _update_trial(connection: Connection, of_attempt: ColumnElement[bool], **values: Any) -> None:
    trial_id = select(ATTEMPTS.c.trial_id).where(of_attempt).scalar_subquery()
    connection.execute(update(TRIALS).where(TRIALS.c.id == trial_id).values(values))
