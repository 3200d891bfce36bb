"""One worker's view of a shared study: its trials, this worker's attempts, and their results.

A worker is a process that takes part in the study; it may run several trials at once.

Every attempt has a worker and a lease. A result is first written to a synced file in the outbox and
then stored in the database, which accepts one result a trial and rejects that of an attempt which
has expired meanwhile. An attempt expires when its worker is dead or its lease has run out; the
first worker that notices ends it.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from autotune.errors import StorageUnavailable, StorageUnreachable
from autotune.spec.attempt import (
    MAX_RETRIES,
    Attempt,
    FinishedTrial,
    RunningAttempt,
    new_attempt_id,
)
from autotune.spec.config import TrainingConfig
from autotune.spec.confirmation import Confirmation, new_confirmation_id
from autotune.spec.result import TrialRecord
from autotune.spec.study import StudyDefinition
from autotune.storage.attempts import Delivery
from autotune.storage.store import StudyStore
from autotune.study.events import AttemptLost, Listener, PoisonTrial, ResultRejected
from autotune.study.workers.heartbeat import HeldLease, LeaseHeartbeat
from autotune.study.workers.liveness import LeaseWatch, WorkerIdentity
from autotune.study.workers.outbox import (
    OUTBOX_FOLDER,
    Outbox,
    OutboxConfirmation,
    OutboxEntry,
    OutboxResult,
)
from autotune.system.failpoints import failpoint

WORKERS = "workers"


class Coordinator:
    """Takes part in a study as one worker. Use it as a context manager.

    `folder` is the study's work folder. `clock` is a monotonic clock in seconds. Methods raise what
    the store does: StorageUnreachable for a database that stays away, and what ends its waiting.
    """

    def __init__(
        self,
        definition: StudyDefinition,
        *,
        store: StudyStore,
        folder: Path,
        listener: Listener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._study = definition.name
        self._folder = folder
        self._store = store
        self._attempts = store.attempts
        self._listener = listener
        self._outbox = Outbox(folder / OUTBOX_FOLDER)
        self._identity = WorkerIdentity(folder / WORKERS)
        self._heartbeat = LeaseHeartbeat(self._attempts)
        self.revision = -1
        """The study's revision that `records` are from."""
        self._watch = LeaseWatch(clock)
        self._study_begun = ""
        """Read on entering, as the database may be away when a confirmation is stored."""
        self._open_attempts: set[str] = set()
        """Ids of this worker's attempts that may still be running in the database."""
        self.records: dict[str, TrialRecord] = {}
        """Every trial of the study by fingerprint, with a result or not."""
        self.unfinished: dict[int, TrialRecord] = {}
        """The trials without a result, by number."""
        self.running: set[int] = set()
        """Numbers of the trials that other workers are running."""
        self.failed_too_often: set[int] = set()
        """Numbers of the trials that failed too often and are left to a later search."""
        self.poison_trials: set[int] = set()
        """Numbers of poison trials, on which more than MAX_RETRIES workers died: they run last.

        When a whole container ends, as when its host runs out of memory, no process remains to
        record the trial as failed.
        """

    def __enter__(self) -> "Coordinator":
        try:
            self._study_begun = self._store.begun(self._study)
            self.refresh()
            self._remove_leftovers()
            if not self.running:
                self._attempts.forgive_losses(self._study)
            self._heartbeat.__enter__()
        except BaseException:
            self._identity.close(leaves_attempts=False)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._heartbeat.__exit__()
        self._identity.close(leaves_attempts=bool(self._open_attempts))

    def refresh(self) -> list[TrialRecord]:
        """Updates this worker's view of the study; also delivers results and ends expired attempts.

        Returns the trials that got a result since the last call, in the order of their results.
        """
        self._outbox.deliver(self._deliver)
        self._expire_dead_attempts()
        changes = self._store.changes(self._study, since=self.revision)
        self.revision = changes.revision
        for record in changes.records:
            self.records[record.config.fingerprint] = record
            if record.is_finished:
                self.unfinished.pop(record.number, None)
            else:
                self.unfinished[record.number] = record
        # An attempt that fails or expires changes its trial, and losses can be forgiven.
        changed = {record.number for record in changes.records} & self.unfinished.keys()
        asked = changed | (self.failed_too_often & self.unfinished.keys())
        losses = self._attempts.causes(self._study, asked, "lost")
        self.failed_too_often = {
            number for number, causes in losses.items() if len(causes) > MAX_RETRIES
        }
        deaths = self._attempts.causes(self._study, changed, "given_up")
        for number, causes in deaths.items():
            if len(causes) > MAX_RETRIES and number not in self.poison_trials:
                self.poison_trials.add(number)
                self._listener(PoisonTrial(number=number, deaths=len(causes)))
        return [record for record in changes.records if record.is_finished]

    # -- this worker's attempt ---------------------------------------------------------------------

    def claim(
        self, config: TrainingConfig, *, most_trials: int, name: str | None = None
    ) -> Attempt | None:
        """Starts an attempt at the trial of `config`; None where it cannot be claimed.

        See `Attempts.claim`.
        """
        attempt_id = new_attempt_id()
        self._open_attempts.add(attempt_id)
        attempt = self._attempts.claim(
            self._study,
            config,
            worker=self._identity.name,
            attempt_id=attempt_id,
            most_trials=most_trials,
            name=name,
        )
        if attempt is None:
            self._open_attempts.discard(attempt_id)
        return attempt

    @contextmanager
    def working_on(self, attempt: Attempt) -> Iterator[HeldLease]:
        """Renews the attempt's lease while the block runs; several attempts may run at once."""
        with self._heartbeat.holding(attempt.id) as lease:
            try:
                yield lease
            finally:
                if lease.is_lost:
                    self._open_attempts.discard(attempt.id)

    def store_result(self, attempt: Attempt, finished: FinishedTrial) -> None:
        """Stores a result, first on disk and then in the database.

        Raises StorageUnreachable; the result then waits on disk, unless that is full, which the
        message says.
        """
        result = OutboxResult(attempt_id=attempt.id, number=attempt.number, finished=finished)
        self._put_and_deliver(result, what=f"the result of trial {attempt.number}")
        failpoint("result delivered")

    def keep_result(self, attempt: Attempt, finished: FinishedTrial) -> None:
        """Writes a result to disk for a later search to store, as the database is away.

        Where the disk is full, too, the trial is measured again.
        """
        result = OutboxResult(attempt_id=attempt.id, number=attempt.number, finished=finished)
        self._write_to_outbox(result)

    def trial_times(self) -> list[tuple[float, float]]:
        """Returns when each measured trial began, in seconds since 1970, and how long it took."""
        return self._store.trial_times(self._study)

    def confirmations(self) -> list[Confirmation]:
        """Returns what was measured beside the study's trials, oldest first."""
        return self._store.confirmations(self._study)

    def store_confirmation(self, confirmation: Confirmation) -> None:
        """Stores a measurement beside the trials, first on disk and then in the database.

        Raises what `store_result` does, and ValueError for a measurement that is impossible.
        """
        result = OutboxConfirmation(
            id=new_confirmation_id(), study_begun=self._study_begun, confirmation=confirmation
        )
        self._put_and_deliver(result, what="the last confirmation")

    def _put_and_deliver(self, result: OutboxEntry, *, what: str) -> None:
        waits_on_disk = self._write_to_outbox(result)

        def write_again() -> None:
            """The disk may have space by now, and the database stay away."""
            nonlocal waits_on_disk
            if not waits_on_disk:
                waits_on_disk = self._write_to_outbox(result)

        try:
            delivery = self._deliver(result, before_retry=write_again)
        except StorageUnreachable as error:
            if waits_on_disk:
                raise
            raise StorageUnreachable(
                f"{error.message}; {what} could not be written to {self._folder} either, "
                "and will be measured again",
                hint="free some space; run the same command again to continue",
            ) from None
        self._outbox.settle(result.id, delivery)

    def _write_to_outbox(self, result: OutboxEntry) -> bool:
        """Returns whether the disk had space; the database may be on another disk.

        The second attempt uses the space that was reserved for a result. It also succeeds where
        another worker has swept a confirmation that was being written.
        """
        for _ in range(2):
            try:
                self._outbox.put(result)
                return True
            except OSError:
                self._identity.release_reserve()
        return False

    def add_script_files(self, found: Mapping[str, str]) -> Mapping[str, str]:
        """Adds files that a script reads late; returns all of the study. Raises StudyMismatch."""
        return self._store.add_script_files(self._study, found)

    def record_failure(self, attempt: Attempt, *, cause: str) -> None:
        """Ends an attempt that failed because of the machine; its trial is retried a few times."""
        self._attempts.end(attempt.id, "lost", cause=cause)
        self._open_attempts.discard(attempt.id)
        failpoint("attempt lost")
        losses = self._attempts.causes(self._study, [attempt.number], "lost")
        attempts_left = max(0, MAX_RETRIES + 1 - len(losses.get(attempt.number, [cause])))
        self._listener(AttemptLost(number=attempt.number, cause=cause, attempts_left=attempts_left))

    def release_attempt(self, attempt: Attempt) -> None:
        """Releases an attempt of a search that was stopped, without waiting for the database.

        Where it is away, the next worker ends the attempt, as its worker is dead by then.
        """
        try:
            self._attempts.release(attempt.id, cause="its search was stopped")
            self._open_attempts.discard(attempt.id)
            failpoint("attempt given back")
        except StorageUnavailable:
            pass

    # -- other workers -----------------------------------------------------------------------------

    def _remove_leftovers(self) -> None:
        """Removes locks of dead workers without an attempt, and their partly written results."""
        # These come first, so that an attempt that starts in between is among the running ones.
        dead_locks = self._identity.dead()
        partly_written = self._outbox.half_written()
        running = self._attempts.running(self._study)
        self._identity.sweep(dead_locks, but={attempt.worker for attempt in running})
        being_written = {
            attempt.id for attempt in running if not self._identity.is_dead(attempt.worker)
        }
        self._outbox.sweep(partly_written - being_written)

    def _deliver(
        self, result: OutboxEntry, *, before_retry: Callable[[], None] = lambda: None
    ) -> Delivery:
        if isinstance(result, OutboxConfirmation):
            if result.study_begun != self._study_begun:
                return "unknown"  # of another study of this name
            self._store.add_confirmation(
                self._study,
                result.confirmation,
                confirmation_id=result.id,
                before_retry=before_retry,
            )
            return "stored"
        delivery = self._attempts.finish(
            result.attempt_id,
            result.finished.measurement,
            seconds=result.finished.seconds,
            before_retry=before_retry,
        )
        self._open_attempts.discard(result.attempt_id)
        if delivery in ("late", "unknown"):
            self._listener(ResultRejected(number=result.number))
        return delivery

    def _expire_dead_attempts(self) -> None:
        """Ends the attempts of dead workers and those with an expired lease.

        This worker's own attempts, of which there may be a thousand, are not read.
        """
        running = self._attempts.running(self._study, but_of=self._identity.name)
        dead = {attempt.worker for attempt in running if self._identity.is_dead(attempt.worker)}
        if dead:
            self._outbox.deliver(self._deliver)  # what they finished since the last delivery
        overdue = self._watch.overdue(
            {attempt.id: (attempt.renewals, attempt.is_expired) for attempt in running}
        )
        for attempt in running:
            if attempt.worker in dead:
                self._expire(attempt, cause="its worker has ended")
            elif attempt.id in overdue:
                self._expire(attempt, cause="its worker has not renewed its lease")
        if dead:
            running = self._attempts.running(self._study, but_of=self._identity.name)
        # A dead worker may have claimed another trial after the first reading.
        for worker in dead - {attempt.worker for attempt in running}:
            self._identity.forget(worker)
        self.running = {attempt.number for attempt in running}

    def _expire(self, attempt: RunningAttempt, *, cause: str) -> None:
        self._attempts.end(attempt.id, "given_up", cause=cause)
        failpoint("dead attempt given up")
