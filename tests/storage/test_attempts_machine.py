"""Workers that claim, renew, finish, lose and release trials in any order, against a model.

The model holds what each trial and each attempt must say; it knows no SQL and no files.
"""

import atexit
import shutil
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from hypothesis.strategies import integers, sampled_from
from sqlalchemy import select, update

from autotune.spec.attempt import LEASE_SECONDS, MAX_RETRIES, FinishedTrial, new_attempt_id
from autotune.storage.store import StudyStore
from autotune.storage.tables import ATTEMPTS
from autotune.study.workers.outbox import Outbox, OutboxResult
from tests.building.studies import config, definition, measured, open_store

STUDY = "by-hand"
MOST_TRIALS = 3
CONFIGURATIONS = 4
WORKERS = ("one", "two", "three")


@dataclass
class Try:
    """What the model knows of an attempt."""

    id: str
    number: int
    ordinal: int
    worker: str
    result: float
    """The perplexity that this attempt measures."""
    state: str = "running"
    is_expired: bool = False
    is_kept_aside: bool = False


@dataclass
class Model:
    numbers: dict[int, int] = field(default_factory=dict)
    """Configuration to the number of its trial."""
    tries: dict[str, Try] = field(default_factory=dict)
    results: dict[int, float] = field(default_factory=dict)
    """Trial number to its one result."""
    order: list[int] = field(default_factory=list)
    """Trial numbers in the order of their results."""

    def of_trial(self, number):
        return [one for one in self.tries.values() if one.number == number]

    def may_claim(self, configuration):
        number = self.numbers.get(configuration)
        if number is None:
            return len(self.numbers) < MOST_TRIALS
        states = [one.state for one in self.of_trial(number)]
        return (
            number not in self.results
            and "running" not in states
            and states.count("lost") <= MAX_RETRIES
        )

    def claim(self, attempt_id, configuration, worker):
        number = self.numbers.setdefault(configuration, len(self.numbers))
        one = Try(
            attempt_id,
            number,
            len(self.of_trial(number)) + 1,
            worker,
            result=10.0 + len(self.tries),
        )
        self.tries[attempt_id] = one
        return one

    def tell(self, one):
        if one.state == "finished":
            return "known"
        if one.state != "running":
            one.state, one.is_kept_aside = "late", True
            return "late"
        one.state, self.results[one.number] = "finished", one.result
        self.order.append(one.number)
        return "stored"


class Sharing(RuleBasedStateMachine):
    """Each rule changes the database and the model alike; the invariants compare them."""

    attempts = Bundle("attempts")
    """Ids, of attempts in every state: workers tell of those long given up too, and of one that
    never was."""

    def __init__(self):
        super().__init__()
        self.model = Model()
        self.heard, self.revision = [], -1
        self.dead = set()

    @initialize(target=attempts)
    def begin(self):
        """With two trials that run: a choice of rules without `claim` is of use too."""
        self.folder = tempfile.TemporaryDirectory()
        self.store = StudyStore(self.new_database(Path(self.folder.name)))
        self.outbox = Outbox(Path(self.folder.name) / "spool")
        return multiple(self._take(0, "one"), self._take(1, "two"), new_attempt_id())

    def new_database(self, folder):
        shutil.copy(empty_study(), folder / "autotune.db")
        return f"sqlite:///{folder}/autotune.db"

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
            self.folder.cleanup()

    # -- what workers do ---------------------------------------------------------------------------

    @rule(
        target=attempts, configuration=integers(0, CONFIGURATIONS - 1), worker=sampled_from(WORKERS)
    )
    def claim(self, configuration, worker):
        if self.model.may_claim(configuration):
            return self._take(configuration, worker)
        self._claim(new_attempt_id(), configuration, worker, may=False)
        return multiple()

    def _take(self, configuration, worker):
        attempt_id = new_attempt_id()
        for _ in range(2):  # again, as after a commit whose answer was lost
            self._claim(attempt_id, configuration, worker, may=True)
        self.model.claim(attempt_id, configuration, worker)
        return attempt_id

    def _claim(self, attempt_id, configuration, worker, *, may):
        attempt = self.store.attempts.claim(
            STUDY,
            config(configuration),
            worker=worker,
            attempt_id=attempt_id,
            most_trials=MOST_TRIALS,
        )
        assert (attempt is not None) == may

    @rule(attempt_id=attempts)
    def claim_again_what_was_ended_since(self, attempt_id):
        one = self.model.tries.get(attempt_id)
        if one is not None and one.state != "running":
            configuration = next(
                c for c, number in self.model.numbers.items() if number == one.number
            )
            self._claim(attempt_id, configuration, one.worker, may=False)

    @rule(attempt_id=attempts)
    def renew(self, attempt_id):
        one = self.model.tries.get(attempt_id)
        renewed = attempt_id in self.store.attempts.renew([attempt_id])
        assert renewed == (one is not None and one.state == "running")
        if renewed:
            one.is_expired = False

    @rule(attempt_id=attempts)
    def let_the_lease_run_out(self, attempt_id):
        with self.store._database.writing() as connection:
            past = ATTEMPTS.c.lease_until - 10 * LEASE_SECONDS
            connection.execute(
                update(ATTEMPTS).where(ATTEMPTS.c.id == attempt_id).values(lease_until=past)
            )
        if one := self.model.tries.get(attempt_id):
            one.is_expired = True

    @rule(attempt_id=attempts)
    def tell(self, attempt_id):
        """For the first time, again, or after the attempt has expired."""
        one = self.model.tries.get(attempt_id)
        expected = "unknown" if one is None else self.model.tell(one)
        result = measured(perplexity=one.result if one else 1.0)
        assert self.store.attempts.finish(attempt_id, result, seconds=1.0) == expected

    @rule(attempt_id=attempts)
    def put_into_the_spool(self, attempt_id):
        """And die, or wait for a database that is away."""
        if one := self.model.tries.get(attempt_id):
            finished = FinishedTrial(measurement=measured(perplexity=one.result), seconds=1.0)
            self.outbox.put(OutboxResult(attempt_id=one.id, number=one.number, finished=finished))

    @rule(attempt_id=attempts, state=sampled_from(["given_back", "lost"]))
    def end(self, attempt_id, state):
        self._end(attempt_id, state)

    @rule(worker=sampled_from(WORKERS))
    def crash(self, worker):
        """Silently; another worker of that name goes on."""
        self.dead |= {
            one.id
            for one in self.model.tries.values()
            if one.worker == worker and one.state == "running"
        }

    # -- recovery ----------------------------------------------------------------------------------

    @rule()
    def deliver_the_spool(self):
        expected = {
            one.attempt_id: self.model.tell(self.model.tries[one.attempt_id])
            for one in self.outbox.waiting()
        }
        said = {}

        def finish(result):
            said[result.attempt_id] = self.store.attempts.finish(
                result.attempt_id, result.finished.measurement, seconds=1.0
            )
            return said[result.attempt_id]

        self.outbox.deliver(finish)
        assert said == expected

    @rule()
    def give_up_what_is_dead_or_expired(self):
        for one in self.store.attempts.running(STUDY):
            if one.id in self.dead or one.is_expired:
                self._end(one.id, "given_up")

    @rule()
    @precondition(lambda self: any(one.state == "lost" for one in self.model.tries.values()))
    def forgive(self):
        self.store.attempts.forgive_losses(STUDY)
        for one in self.model.tries.values():
            one.state = "forgiven" if one.state == "lost" else one.state

    def _end(self, attempt_id, state):
        one = self.model.tries.get(attempt_id)
        was_running = one is not None and one.state == "running"
        assert self.store.attempts.end(attempt_id, state, cause="because") == was_running
        if was_running:
            one.state = state

    @rule()
    def listen(self):
        """As a worker that follows the others; how often it listens must not matter."""
        changes = self.store.changes(STUDY, since=self.revision)
        self.revision = changes.revision
        self.heard += [record.number for record in changes.records if record.is_finished]

    # -- what must hold ----------------------------------------------------------------------------

    @invariant()
    def trials_are_as_the_model_says(self):
        records = self.store.trials(STUDY) if hasattr(self, "store") else []
        found = {
            record.number: record.perplexity if record.is_finished else None for record in records
        }
        assert found == {
            number: self.model.results.get(number) for number in self.model.numbers.values()
        }
        assert [record.number for record in records] == list(range(len(records)))

    @invariant()
    def attempts_are_as_the_model_says(self):
        if not hasattr(self, "store"):
            return
        with self.store._database.reading() as connection:
            rows = connection.execute(select(ATTEMPTS)).all()
        found = {
            row.id: (row.state, row.ordinal, row.measurement and row.measurement["perplexity"])
            for row in rows
        }
        assert found == {
            one.id: (one.state, one.ordinal, one.result if one.is_kept_aside else None)
            for one in self.model.tries.values()
        }

    @invariant()
    def who_runs_is_as_the_model_says(self):
        running = self.store.attempts.running(STUDY) if hasattr(self, "store") else []
        expected = {
            one.id: one.is_expired for one in self.model.tries.values() if one.state == "running"
        }
        assert {one.id: one.is_expired for one in running} == expected

    @invariant()
    def every_result_is_heard_once_and_in_order(self):
        if hasattr(self, "store"):
            since = self.store.changes(STUDY, since=self.revision).records
            assert (
                self.heard + [record.number for record in since if record.is_finished]
                == self.model.order
            )


@cache
def empty_study():
    """A database with the study and no trial."""
    file = Path(tempfile.mkdtemp(), "empty.db")
    atexit.register(shutil.rmtree, file.parent)
    with open_store(f"sqlite:///{file}") as store:
        store.create_study(definition(), trials_wanted=MOST_TRIALS)
    return file


QUICK = settings(
    max_examples=30,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
TestSharing = Sharing.TestCase
TestSharing.settings = QUICK


@pytest.mark.slow
def test_workers_share_a_study_in_postgresql(postgres):
    from hypothesis.stateful import run_state_machine_as_test

    class OnPostgres(Sharing):
        def new_database(self, folder):
            self.name = folder.name.lower()
            url = postgres.create_database(self.name)
            with open_store(url) as store:
                store.create_study(definition(), trials_wanted=MOST_TRIALS)
            return url

        def teardown(self):
            super().teardown()
            postgres.drop_database(self.name)

    run_state_machine_as_test(OnPostgres, settings=settings(QUICK, max_examples=30))


@pytest.mark.slow
def test_workers_share_a_study_for_long():
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Sharing, settings=settings(QUICK, max_examples=300))
