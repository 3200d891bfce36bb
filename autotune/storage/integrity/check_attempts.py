"""Checks that the attempts at a study's trials agree with the trials' results."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, case, select

from autotune.storage.integrity.findings import Finding, RunningTrial
from autotune.storage.rows import DamagedRow, check_attempt_row, running_attempt_from_row
from autotune.storage.tables import ATTEMPTS, STUDIES, TRIALS, DatabaseNow


def running_trials(connection: Connection, study_id: int) -> list[RunningTrial]:
    """Returns the study's running attempts, ordered by trial number.

    Those that cannot be read are among the `attempt_findings`.
    """
    expired = case((ATTEMPTS.c.lease_until < DatabaseNow(), 1), else_=0).label("expired")
    query = (
        select(STUDIES.c.name, TRIALS.c.number, ATTEMPTS, expired)
        .select_from(ATTEMPTS.join(TRIALS).join(STUDIES))
        .where(STUDIES.c.id == study_id, ATTEMPTS.c.state == "running")
        .order_by(TRIALS.c.number)
    )
    running = []
    for row in connection.execute(query):
        with suppress(DamagedRow):
            attempt = running_attempt_from_row(row)
            running.append(
                RunningTrial(
                    study=row.name,
                    number=attempt.number,
                    worker=attempt.worker,
                    is_expired=attempt.is_expired,
                )
            )
    return running


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
    for attempt in attempts:
        try:
            check_attempt_row(attempt)
        except DamagedRow as error:
            yield str(error)
    ordinals = [attempt.ordinal for attempt in attempts]
    if ordinals != list(range(1, len(attempts) + 1)):
        yield f"has attempts {', '.join(map(str, ordinals))}, but not those in between"
    if states["running"] > 1 or (states["running"] and has_result):
        yield f"has {states['running']} running attempts{' and a result' if has_result else ''}"
    if states["finished"] != has_result:
        yield f"has {states['finished']} finished attempts and {'a' if has_result else 'no'} result"
