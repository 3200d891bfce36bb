"""A study as one of its workers sees and changes it: what is known, what this worker takes, and what becomes of it.

Every attempt has an owner and a lease. A result goes to a synced file first and to the database
then, which takes one result for a trial and refuses that of an attempt which was given up
meanwhile. An attempt whose worker is dead, or whose lease has run out, is given up by whoever
notices first.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import StorageAway, StorageUnavailable
from autotune.execution.local import FinishedTrial
from autotune.failpoints import failpoint
from autotune.spec.attempt import (
    LEASE_SECONDS,
    MOST_RETRIES,
    RENEWAL_SECONDS,
    Attempt,
    AttemptState,
    RunningAttempt,
    new_attempt_id,
)
from autotune.spec.config import TrainingConfig
from autotune.spec.result import TrialRecord
from autotune.spec.study import StudyDefinition
from autotune.storage.attempts import Delivery
from autotune.storage.store import StudyStore
from autotune.study.events import AttemptLost, ComesLast, Listener, ResultRefused
from autotune.study.workers.heartbeat import LeaseHeartbeat
from autotune.study.workers.liveness import WorkerIdentity
from autotune.study.workers.outbox import OUTBOX_FOLDER, Outbox, OutboxResult
from autotune.study.workers.retry import DatabaseRetry

WORKERS = "workers"

_SECONDS_A_LOOK_COUNTS = RENEWAL_SECONDS
"""At most, of the time since the look before: the database may have been away, and nobody could
renew."""
_UNRENEWED_SECONDS, _UNRENEWED_SECONDS_WITHOUT_EXPIRY = 3 * RENEWAL_SECONDS, 2 * LEASE_SECONDS
"""After which an attempt is given up: one that has expired, and one whose expiry a clock that was
set back delays."""


@dataclass(kw_only=True)
class _Watched:
    """How long this worker has seen another one not renew its lease, by its own clock, which nobody moves."""

    renewals: int
    looked_at: float
    unrenewed_seconds: float = 0.0


class Coordinator:
    """Use as a context manager: it is this worker's presence in the study."""

    def __init__(
        self,
        definition: StudyDefinition,
        *,
        store: StudyStore,
        folder: Path,
        listener: Listener,
        retry: DatabaseRetry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._study, self._folder = definition.name, folder
        self._store, self._attempts = store, store.attempts
        self._listener, self._retry, self._clock = listener, retry, clock
        self._outbox = Outbox(folder / OUTBOX_FOLDER)
        self._identity = WorkerIdentity(folder / WORKERS)
        self.revision = -1
        """Of the study, as this worker knows it."""
        self._watched: dict[str, _Watched] = {}
        self._lease: LeaseHeartbeat | None = None
        self._open: set[str] = set()
        """Attempts of this worker that may still run by what the database says."""
        self.records: dict[str, TrialRecord] = {}
        """By fingerprint: every trial of the study, with a result or not."""
        self.unfinished: dict[int, TrialRecord] = {}
        """By number: those of them that have no result."""
        self.running: set[int] = set()
        """Numbers of the trials that other workers are at."""
        self.lost_too_often: set[int] = set()
        """Numbers of the trials that are left to a later search."""
        self.deadly: set[int] = set()
        """Numbers of the trials at which more workers died than one is tried again: their turn
        comes last.

        What ends a whole container, as its host running out of memory does, leaves nobody to say
        that it was lost.
        """

    def __enter__(self) -> "Coordinator":
        try:
            self.refresh()
            self._sweep()
            if not self.running:
                self._retry(lambda: self._attempts.forgive_losses(self._study))
        except BaseException:
            self._identity.close(leaves_attempts=False)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._identity.close(leaves_attempts=bool(self._open))

    def refresh(self) -> list[TrialRecord]:
        """Brings `records` and `running` up to date; returns what has got a result since, in the order it came."""
        self._deliver_waiting()
        self._give_up_dead()
        changes = self._retry(lambda: self._store.changes(self._study, since=self.revision))
        self.revision = changes.revision
        for record in changes.records:
            self.records[record.config.fingerprint] = record
            if record.is_finished:
                self.unfinished.pop(record.number, None)
            else:
                self.unfinished[record.number] = record
        losses = self._retry(lambda: self._attempts.losses(self._study, self.unfinished))
        self.lost_too_often = {
            number for number, (count, _) in losses.items() if count > MOST_RETRIES
        }
        deaths = self._retry(lambda: self._attempts.deaths(self._study, self.unfinished))
        for number, count in deaths.items():
            if count > MOST_RETRIES and number not in self.deadly:
                self.deadly.add(number)
                self._listener(ComesLast(number=number, deaths=count))
        return [record for record in changes.records if record.is_finished]

    # -- this worker's attempt ---------------------------------------------------------------------

    def claim(
        self, config: TrainingConfig, *, most_trials: int, name: str | None = None
    ) -> Attempt | None:
        """Takes the trial; None where another worker was quicker, or there is nothing to be had."""
        attempt_id = new_attempt_id()
        self._open.add(attempt_id)
        attempt = self._retry(
            lambda: self._attempts.claim(
                self._study,
                config,
                worker=self._identity.name,
                attempt_id=attempt_id,
                most_trials=most_trials,
                name=name,
            )
        )
        if attempt is None:
            self._open.discard(attempt_id)
        return attempt

    @contextmanager
    def working_on(self, attempt: Attempt) -> Iterator[None]:
        """Renews the lease meanwhile."""
        with LeaseHeartbeat(self._attempts, attempt.id) as self._lease:
            try:
                yield
            finally:
                if self._lease.is_lost:
                    self._open.discard(attempt.id)
                self._lease = None

    @property
    def has_lost_its_lease(self) -> bool:
        """Whether what this worker is at was given up by another one."""
        return self._lease is not None and self._lease.is_lost

    def keep(self, attempt: Attempt, finished: FinishedTrial) -> None:
        """On disk and then in the database.

        Raises StorageAway; the result then waits on disk, unless that is full.
        """
        result = OutboxResult(
            attempt_id=attempt.id,
            number=attempt.number,
            measurement=finished.measurement,
            seconds=finished.seconds,
        )
        waits_on_disk = False

        def finish() -> Delivery:
            nonlocal waits_on_disk
            waits_on_disk = waits_on_disk or self._put(result)
            return self._finish(result)

        try:
            delivery = self._retry(finish)
        except StorageAway as error:
            if waits_on_disk:
                raise
            raise StorageAway(
                f"{error.message}; the result of trial {attempt.number} could not be written to {self._folder} either, "
                "and will be measured again",
                hint="free some space; the same command then goes on from here",
            ) from None
        self._outbox.settle(attempt.id, delivery)
        failpoint("result delivered")
        self._say_if_refused(attempt.number, delivery)

    def _put(self, result: OutboxResult) -> bool:
        """False where even the room that was kept for it does not suffice; the database may be on another disk."""
        for _ in range(2):
            try:
                self._outbox.put(result)
                return True
            except OSError:
                self._identity.free_room()
        return False

    def lose(self, attempt: Attempt, *, cause: str) -> None:
        """The machine has cost this attempt; the trial is tried again, a few times."""
        self._retry(lambda: self._attempts.end(attempt.id, "lost", cause=cause))
        self._open.discard(attempt.id)
        failpoint("attempt lost")
        of_trial = self._retry(lambda: self._attempts.losses(self._study, [attempt.number]))
        losses, _ = of_trial.get(attempt.number, (1, cause))
        left = max(0, MOST_RETRIES + 1 - losses)
        self._listener(AttemptLost(number=attempt.number, cause=cause, attempts_left=left))

    def give_back(self, attempt: Attempt) -> None:
        """As far as the database is there: this is done on the way out, and a dead worker's attempt is free anyway."""
        try:
            self._attempts.end(attempt.id, "given_back", cause="its search was stopped")
            self._open.discard(attempt.id)
            failpoint("attempt given back")
        except StorageUnavailable:
            pass

    # -- what others left --------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Removes what dead workers left that nobody needs: locks without an attempt, results half written."""
        dead, half_written = self._identity.dead(), self._outbox.half_written()
        running = self._retry(self._running)
        self._identity.sweep(dead, but={one.worker for one in running})
        self._outbox.sweep(
            half_written - {one.id for one in running if not self._identity.is_dead(one.worker)}
        )

    def _finish(self, result: OutboxResult) -> Delivery:
        delivery = self._attempts.finish(
            result.attempt_id, result.measurement, seconds=result.seconds
        )
        self._open.discard(result.attempt_id)
        return delivery

    def _running(self) -> list[RunningAttempt]:
        return self._attempts.running(self._study)

    def _deliver_waiting(self) -> None:
        delivered = self._outbox.deliver(lambda result: self._retry(lambda: self._finish(result)))
        for number, delivery in delivered.items():
            self._say_if_refused(number, delivery)

    def _say_if_refused(self, number: int, delivery: Delivery) -> None:
        if delivery in ("late", "unknown"):
            self._listener(ResultRefused(number=number))

    def _give_up_dead(self) -> None:
        running = self._retry(self._running)
        dead = {one.worker for one in running if self._identity.is_dead(one.worker)}
        if dead:
            self._deliver_waiting()  # what they finished since
        for one in running:
            if one.worker in dead:
                self._end(one, "given_up", cause="its worker has ended")
            elif self._is_overdue(one):
                self._end(one, "given_up", cause="its worker has not renewed its lease")
        still = self._retry(self._running) if dead else running
        for worker in dead - {
            one.worker for one in still
        }:  # it may have taken another before it died
            self._identity.forget(worker)
        self._watched = {one.id: self._watched[one.id] for one in still if one.id in self._watched}
        self.running = {one.number for one in still if one.worker != self._identity.name}

    def _end(self, one: RunningAttempt, state: AttemptState, *, cause: str) -> None:
        self._retry(lambda: self._attempts.end(one.id, state, cause=cause))
        failpoint("dead attempt given up")

    def _is_overdue(self, one: RunningAttempt) -> bool:
        """Whether its lease is over: by the database's clock, and by what this worker has seen itself.

        A clock that is set forward ends no lease that is still renewed; one that is set back keeps
        none for ever.
        """
        if one.worker == self._identity.name:
            return False
        now, seen = self._clock(), self._watched.get(one.id)
        if seen is None or seen.renewals != one.renewals:
            self._watched[one.id] = _Watched(renewals=one.renewals, looked_at=now)
            return False
        seen.unrenewed_seconds += min(now - seen.looked_at, _SECONDS_A_LOOK_COUNTS)
        seen.looked_at = now
        limit = _UNRENEWED_SECONDS if one.is_expired else _UNRENEWED_SECONDS_WITHOUT_EXPIRY
        return seen.unrenewed_seconds >= limit
