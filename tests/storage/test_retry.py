"""Waiting for a database that is away: the policy by a clock that the test moves, and its store."""

import sqlite3
from contextlib import closing

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from autotune.errors import Stopped, StorageUnavailable, StorageUnreachable, StudyMismatch
from autotune.spec.attempt import new_attempt_id
from autotune.spec.confirmation import RepeatedSpeed
from autotune.spec.prediction import Forecast
from autotune.storage.retry import RetryPolicy
from autotune.storage.store import StudyStore
from tests.building.studies import config, definition, measured

# -- the policy ------------------------------------------------------------------------------------


class Database:
    """A database that is away until `back_at`, by its clock."""

    def __init__(self, back_at=0.0, stop_at=1e9):
        self.now, self.back_at, self.stop_at = 0.0, back_at, stop_at
        self.waits, self.returns = [], []
        self.calls = 0

    def policy(self, limit_seconds=60.0):
        return RetryPolicy(
            limit_seconds=limit_seconds,
            hint="results wait",
            on_waiting=self.waits.append,
            on_back=self.returns.append,
            check_stop=self.check_stop,
            clock=lambda: self.now,
            sleep=self.sleep,
        )

    def sleep(self, seconds):
        self.now += seconds

    def check_stop(self):
        if self.now >= self.stop_at:
            raise Stopped("stopped")

    def answer(self):
        self.calls += 1
        if self.now < self.back_at:
            raise StorageUnreachable("the studies database is away")
        return "answer"


def test_an_available_database_is_called_once_and_nothing_is_reported():
    database = Database()
    assert database.policy().repeat(database.answer) == "answer"
    assert (database.calls, database.waits, database.returns) == (1, [], [])


def test_what_failed_is_done_again_until_the_database_is_back():
    database = Database(back_at=30.0)
    assert database.policy().repeat(database.answer) == "answer"


def test_it_says_once_that_it_waits_and_once_that_the_database_is_back():
    database = Database(back_at=30.0)
    database.policy().repeat(database.answer)
    assert database.waits == ["the studies database is away"]
    assert [seconds >= 30.0 for seconds in database.returns] == [True]


def test_it_does_not_wait_beyond_its_limit():
    database = Database(back_at=1000.0)
    with pytest.raises(StorageUnreachable, match=r"waited 1 m 00 s") as raised:
        database.policy(limit_seconds=60.0).repeat(database.answer)
    assert (database.now < 63.0, raised.value.exit_code) == (True, 75)


@pytest.mark.parametrize(
    ("hint", "expected"), [("", "results wait"), ("start it", "start it; results wait")]
)
def test_the_error_after_the_limit_has_the_hint_of_the_policy(hint, expected):
    def away():
        raise StorageUnreachable("the studies database is away", hint=hint)

    with pytest.raises(StorageUnreachable) as raised:
        Database().policy(limit_seconds=1.0).repeat(away)
    assert raised.value.hint == expected


def test_a_stop_ends_the_waiting_at_once():
    database = Database(back_at=1000.0, stop_at=5.0)
    with pytest.raises(Stopped):
        database.policy().repeat(database.answer)
    assert database.now < 5.5


def test_what_no_waiting_mends_is_not_waited_for():
    def damaged():
        raise StorageUnavailable("the file is malformed")

    database = Database()
    with pytest.raises(StorageUnavailable, match="malformed"):
        database.policy().repeat(damaged)
    assert (database.now, database.waits, database.returns) == (0.0, [], [])


def test_the_pauses_grow_so_that_a_database_is_not_stormed():
    database = Database(back_at=60.0)
    database.policy(limit_seconds=100.0).repeat(database.answer)
    assert database.calls < 50


def test_before_every_call_but_the_first_it_does_what_the_caller_asks():
    database, calls = Database(back_at=0.5), []
    database.policy().repeat(
        database.answer, before_retry=lambda: calls.append((database.calls, database.now > 0))
    )
    assert calls == [(number, True) for number in range(1, database.calls)]


# -- a store with a policy -------------------------------------------------------------------------


class Outage:
    """Breaks the next use of a store's database, and counts how often the store waited for it."""

    def __init__(self, store):
        self._engine = store._database.engine
        self._before_the_commit = 0
        self._after_the_commit = 0
        self._commit = self._engine.dialect.do_commit
        self._engine.dialect.do_commit = self._commit_and_break
        event.listen(self._engine, "before_cursor_execute", self._break)

    def begins(self, *, failures=1):
        self._before_the_commit = failures

    def begins_after_the_next_commit(self):
        """The call is carried out, and the caller does not learn it."""
        self._after_the_commit = 1

    def _break(self, *_):
        if self._before_the_commit:
            self._before_the_commit -= 1
            raise OperationalError("", {}, _lost_connection())

    def _commit_and_break(self, connection):
        self._commit(connection)
        if self._after_the_commit:
            self._after_the_commit -= 1
            raise _lost_connection()


def _lost_connection():
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR
    return error


class Patient:
    """A store with a policy, whose database can break."""

    def __init__(self, url):
        self.waits = []
        retry = RetryPolicy(
            limit_seconds=10.0, on_waiting=self.waits.append, sleep=lambda seconds: None
        )
        self.store = StudyStore(url, create=True, retry=retry)
        self.store.create_study(definition(), trials_wanted=5)
        self.outage = Outage(self.store)

    def claim(self, attempt_id=None):
        return self.store.attempts.claim(
            "by-hand",
            config(0),
            worker="one",
            attempt_id=attempt_id or new_attempt_id(),
            most_trials=5,
        )


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/autotune.db"


@pytest.fixture
def patient(url):
    opened = Patient(url)
    with closing(opened.store):
        yield opened


REPEATED = RepeatedSpeed(config=config(0), tokens_per_second=1000.0, seconds=5.0)
NO_PREDICTION = Forecast(config=config(0), error="its model is not known")

IDEMPOTENT_CALLS = {
    "create_study": lambda store: store.create_study(definition("other"), trials_wanted=1),
    "add_confirmation": lambda store: store.add_confirmation(
        "by-hand", REPEATED, confirmation_id="c" * 32
    ),
    "begun": lambda store: store.begun("by-hand"),
    "confirmations": lambda store: store.confirmations("by-hand"),
    "set_trials_wanted": lambda store: store.set_trials_wanted("by-hand", 3),
    "names": lambda store: store.names(),
    "has_study": lambda store: store.has_study("by-hand"),
    "definition": lambda store: store.definition("by-hand"),
    "studies": lambda store: store.studies(),
    "dates": lambda store: store.dates("by-hand"),
    "trials": lambda store: store.trials("by-hand"),
    "changes": lambda store: store.changes("by-hand", since=-1),
    "store_forecast": lambda store: store.store_forecast("by-hand", NO_PREDICTION),
    "forecasts": lambda store: store.forecasts("by-hand"),
    "attempts.claim": lambda store: store.attempts.claim(
        "by-hand", config(1), worker="one", attempt_id="a" * 32, most_trials=5
    ),
    "attempts.finish": lambda store: store.attempts.finish("a" * 32, measured(), seconds=1.0),
    "attempts.end": lambda store: store.attempts.end("a" * 32, "lost", cause="because"),
    "attempts.running": lambda store: store.attempts.running("by-hand"),
    "attempts.causes": lambda store: store.attempts.causes("by-hand", [0], "lost"),
    "attempts.forgive_losses": lambda store: store.attempts.forgive_losses("by-hand"),
}


@pytest.mark.parametrize("call", IDEMPOTENT_CALLS.values(), ids=IDEMPOTENT_CALLS)
def test_a_store_repeats_an_idempotent_call_and_says_once_that_it_waits(patient, call):
    patient.claim()
    patient.outage.begins(failures=3)
    call(patient.store)
    assert len(patient.waits) == 1


def test_a_store_without_a_policy_raises_at_once(url):
    with closing(StudyStore(url, create=True)) as store:
        Outage(store).begins()
        with pytest.raises(StorageUnreachable, match=r"disk I/O error"):
            store.names()


@pytest.mark.parametrize(
    "call",
    [
        lambda attempts: attempts.renew(["a" * 32]),
        lambda attempts: attempts.release("a" * 32, cause="its search was stopped"),
    ],
    ids=["renew", "release"],
)
def test_a_lease_is_renewed_and_released_without_waiting(patient, call):
    patient.outage.begins()
    with pytest.raises(StorageUnreachable):
        call(patient.store.attempts)
    assert patient.waits == []


def test_a_store_waits_for_a_lock_while_it_is_opened(url):
    StudyStore(url, create=True).close()
    holder = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    with closing(holder):
        holder.execute("PRAGMA locking_mode=EXCLUSIVE")
        holder.execute("BEGIN EXCLUSIVE")
        policy = RetryPolicy(limit_seconds=60.0, on_waiting=lambda message: holder.close())
        with closing(StudyStore(url, busy_timeout_seconds=0.01, retry=policy)) as store:
            assert store.names() == []


# -- calls whose reply was lost --------------------------------------------------------------------


def test_a_trial_is_claimed_once_where_the_reply_was_lost(patient):
    patient.outage.begins_after_the_next_commit()
    attempt = patient.claim("a" * 32)
    assert (attempt.number, attempt.ordinal, len(patient.waits)) == (0, 1, 1)
    assert [one.id for one in patient.store.attempts.running("by-hand")] == ["a" * 32]


def test_a_result_is_stored_once_where_the_reply_was_lost(patient):
    attempt = patient.claim()
    patient.outage.begins_after_the_next_commit()
    delivery = patient.store.attempts.finish(attempt.id, measured(perplexity=20.0), seconds=1.0)
    assert (delivery, len(patient.waits)) == ("known", 1)
    assert [record.perplexity for record in patient.store.trials("by-hand")] == [20.0]


def test_a_loss_counts_once_where_the_reply_was_lost(patient):
    attempt = patient.claim()
    patient.outage.begins_after_the_next_commit()
    patient.store.attempts.end(attempt.id, "lost", cause="the device is gone")
    losses = patient.store.attempts.causes("by-hand", [0], "lost")
    assert (losses, len(patient.waits)) == ({0: ["the device is gone"]}, 1)


def test_a_prediction_is_stored_once_where_the_reply_was_lost(patient):
    patient.outage.begins_after_the_next_commit()
    patient.store.store_forecast("by-hand", NO_PREDICTION)
    assert (len(patient.store.forecasts("by-hand")), len(patient.waits)) == (1, 1)


def test_a_confirmation_is_stored_once_where_the_reply_was_lost(patient):
    patient.outage.begins_after_the_next_commit()
    patient.store.add_confirmation("by-hand", REPEATED, confirmation_id="c" * 32)
    assert (patient.store.confirmations("by-hand"), len(patient.waits)) == ([REPEATED], 1)


def test_a_study_whose_creation_was_not_confirmed_is_there_already(patient):
    patient.outage.begins_after_the_next_commit()
    with pytest.raises(StudyMismatch, match="there is a study 'other'"):
        patient.store.create_study(definition("other"), trials_wanted=1)
    assert patient.store.names() == ["by-hand", "other"]
