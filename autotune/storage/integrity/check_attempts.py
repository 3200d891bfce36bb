"""Checks that the attempts at a study's trials agree with the trials' results."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, get_args

from sqlalchemy import Connection, case, select

from autotune.spec.attempt import AttemptState
from autotune.storage.integrity.findings import Finding, RunningTrial
from autotune.storage.rows import measurement_from_values
from autotune.storage.tables import ATTEMPTS, STUDIES, TRIALS, DatabaseNow


def running_trials(connection: Connection, study_id: int) -> list[RunningTrial]:
    """Returns the study's running attempts, ordered by trial number."""
    expired = case((ATTEMPTS.c.lease_until < DatabaseNow(), 1), else_=0).label("expired")
    query = (
        select(STUDIES.c.name, TRIALS.c.number, ATTEMPTS.c.worker, expired)
        .select_from(ATTEMPTS.join(TRIALS).join(STUDIES))
        .where(STUDIES.c.id == study_id, ATTEMPTS.c.state == "running")
        .order_by(TRIALS.c.number)
    )
    return [
        RunningTrial(
            study=row.name, number=row.number, worker=row.worker, is_expired=bool(row.expired)
        )
        for row in connection.execute(query)
    ]


def attempt_findings(
    connection: Connection, study_id: int, *, where: str, to_do: str
) -> Iterator[Finding]:
    """Yields what is wrong with the attempts of the study, and late results, which are no fault.

    `where` names the study, and `to_do` says what to do about a fault.
    """
    query = (
        select(ATTEMPTS, TRIALS.c.number, TRIALS.c.finished_at.is_not(None).label("has_result"))
        .join(TRIALS, ATTEMPTS.c.trial_id == TRIALS.c.id)
        .where(TRIALS.c.study_id == study_id)
        .order_by(TRIALS.c.number, ATTEMPTS.c.ordinal)
    )
    for number, rows in groupby(connection.execute(query), key=lambda row: row.number):
        attempts = list(rows)
        trial = f"{where}, trial {number}"
        for what in _faults(attempts, has_result=bool(attempts[0].has_result)):
            yield Finding(where=trial, what=what, to_do=to_do)
        for attempt in attempts:
            if attempt.state == "late":
                what = (
                    f"the result of attempt {attempt.ordinal} arrived after the attempt had ended "
                    f"({attempt.cause}); it is stored but does not count"
                )
                yield Finding(
                    where=trial,
                    what=what,
                    to_do="nothing: that of another attempt counts",
                    is_fault=False,
                )


def _faults(attempts: Sequence[Any], *, has_result: bool) -> Iterator[str]:
    """Yields what is wrong with the attempts at one trial, each as the end of a sentence."""
    states = Counter(attempt.state for attempt in attempts)
    unknown_states = sorted(set(states) - set(get_args(AttemptState)))
    if unknown_states:
        yield f"has an attempt that is {', '.join(unknown_states)}"
    ordinals = [attempt.ordinal for attempt in attempts]
    if ordinals != list(range(1, len(attempts) + 1)):
        yield f"has attempts {', '.join(map(str, ordinals))}, but not those in between"
    if states["running"] > 1 or (states["running"] and has_result):
        yield f"has {states['running']} running attempts{' and a result' if has_result else ''}"
    if states["finished"] != has_result:
        yield f"has {states['finished']} finished attempts and {'a' if has_result else 'no'} result"
    for attempt in attempts:
        if attempt.state == "late" and not _is_measurement(attempt.measurement):
            yield f"the late result of attempt {attempt.ordinal} cannot be read"


def _is_measurement(stored: Any) -> bool:
    try:
        measurement_from_values(stored)
    except (ValueError, TypeError):
        return False
    return True
