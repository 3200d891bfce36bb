"""Attempts at trials: who has which, for how long, and which result counts.

On SQLite and on PostgreSQL alike.
"""

import pytest
from sqlalchemy import select, update

from autotune.spec.attempt import LEASE_SECONDS, MAX_RETRIES, new_attempt_id
from autotune.storage.error_translation import Conflict
from autotune.storage.tables import ATTEMPTS
from tests.building.studies import config, definition, keep, measured, open_store

MOST = 5


@pytest.fixture
def store(store_url):
    """A store with one study and no trial."""
    with open_store(store_url) as opened:
        opened.create_study(definition(), trials_wanted=MOST)
        yield opened


def claim(store, number=0, *, worker="one", attempt_id=None):
    return store.attempts.claim(
        "by-hand",
        config(number),
        worker=worker,
        attempt_id=attempt_id or new_attempt_id(),
        most_trials=MOST,
    )


def row_of(store, attempt):
    with store._database.reading() as connection:
        return connection.execute(select(ATTEMPTS).where(ATTEMPTS.c.id == attempt.id)).one()


def the_trial(store):
    [record] = store.trials("by-hand")
    return record


# -- claiming a trial ------------------------------------------------------------------------------


def test_trials_are_numbered_in_the_order_of_their_claims(store):
    assert [claim(store, number).number for number in (4, 2, 3)] == [0, 1, 2]


def test_the_list_of_studies_says_how_many_trials_of_each_run_now(store):
    store.create_study(definition("other"), trials_wanted=MOST)
    first = claim(store, 0)
    claim(store, 1)
    assert [entry.version.running for entry in store.entries()] == [2, 0]
    assert [entry.device for entry in store.entries()] == [definition().device.name] * 2
    store.attempts.finish(first.id, measured(), seconds=1.0)
    assert [entry.version.running for entry in store.entries()] == [1, 0]


def test_a_trial_that_another_worker_has_cannot_be_claimed(store):
    claim(store, worker="one")
    assert claim(store, worker="two") is None


def test_a_trial_with_a_result_cannot_be_claimed(store):
    keep(store, config(0), measured())
    assert claim(store) is None


def test_no_more_trials_are_claimed_than_are_wanted(store):
    assert [claim(store, number) is None for number in range(MOST + 1)] == [False] * MOST + [True]


def test_claiming_a_trial_again_with_the_same_attempt_id_returns_the_same_attempt(store):
    """As after a commit whose answer was lost."""
    first = claim(store)
    assert claim(store, attempt_id=first.id) == first
    assert len(store.trials("by-hand")) == 1


def test_an_attempt_that_expired_before_its_worker_got_the_reply_cannot_be_claimed(store):
    first = claim(store)
    store.attempts.end(first.id, "given_up", cause="because")
    assert claim(store, attempt_id=first.id) is None


@pytest.mark.parametrize("state", ["given_up", "given_back", "lost"])
def test_a_released_trial_can_be_claimed_again_under_its_number(store, state):
    first = claim(store)
    store.attempts.end(first.id, state, cause="because")
    again = claim(store, worker="two")
    assert (again.number, again.ordinal) == (first.number, 2)


def test_a_failed_claim_changes_nothing(store):
    claim(store)
    before = store.changes("by-hand", since=-1).revision
    claim(store, worker="two")
    assert store.changes("by-hand", since=-1).revision == before


def test_the_database_rejects_a_second_retry_of_one_attempt(store):
    first = claim(store)
    copy = row_of(store, first)._mapping
    with pytest.raises(Conflict), store._database.writing() as connection:
        connection.execute(
            ATTEMPTS.insert().values({**copy, "id": new_attempt_id(), "state": "given_up"})
        )


def test_the_database_rejects_two_running_attempts_at_one_trial(store):
    first = claim(store)
    copy = row_of(store, first)._mapping
    with pytest.raises(Conflict), store._database.writing() as connection:
        connection.execute(ATTEMPTS.insert().values({**copy, "id": new_attempt_id(), "ordinal": 2}))


# -- results ---------------------------------------------------------------------------------------


def test_a_result_becomes_the_trials(store):
    attempt = claim(store)
    assert store.attempts.finish(attempt.id, measured(), seconds=2.5) == "stored"
    assert (the_trial(store).outcome, the_trial(store).seconds) == ("ok", 2.5)


def test_a_result_that_is_delivered_twice_counts_once(store):
    attempt = claim(store)
    store.attempts.finish(attempt.id, measured(perplexity=20.0), seconds=1.0)
    assert store.attempts.finish(attempt.id, measured(perplexity=99.0), seconds=9.0) == "known"
    assert the_trial(store).perplexity == 20.0


@pytest.mark.parametrize("state", ["given_up", "given_back", "lost"])
def test_a_late_result_does_not_count_and_is_stored_with_its_attempt(store, state):
    attempt = claim(store)
    store.attempts.end(attempt.id, state, cause="because")
    assert store.attempts.finish(attempt.id, measured(perplexity=99.0), seconds=1.0) == "late"
    assert the_trial(store).outcome == "interrupted"
    row = row_of(store, attempt)
    assert (row.state, row.measurement["perplexity"]) == ("late", 99.0)


def test_a_late_result_does_not_change_that_of_the_retry(store):
    late = claim(store)
    store.attempts.end(late.id, "given_up", cause="because")
    retry = claim(store, worker="two")
    store.attempts.finish(retry.id, measured(perplexity=20.0), seconds=1.0)
    store.attempts.finish(late.id, measured(perplexity=99.0), seconds=1.0)
    assert the_trial(store).perplexity == 20.0


def test_a_late_result_does_not_end_the_retry(store):
    late = claim(store)
    store.attempts.end(late.id, "given_up", cause="because")
    retry = claim(store, worker="two")
    store.attempts.finish(late.id, measured(), seconds=1.0)
    assert [one.id for one in store.attempts.running("by-hand")] == [retry.id]


def test_a_result_of_an_unknown_attempt_is_not_stored(store):
    assert store.attempts.finish(new_attempt_id(), measured(), seconds=1.0) == "unknown"


def test_an_attempt_is_ended_once(store):
    attempt = claim(store)
    assert [store.attempts.end(attempt.id, "given_up", cause="because") for _ in range(2)] == [
        True,
        False,
    ]


def test_a_finished_attempt_does_not_expire(store):
    attempt = claim(store)
    store.attempts.finish(attempt.id, measured(), seconds=1.0)
    assert store.attempts.end(attempt.id, "given_up", cause="because") is False
    assert the_trial(store).outcome == "ok"


def test_expiring_an_attempt_that_has_finished_reports_no_change(store):
    attempt = claim(store)
    store.attempts.finish(attempt.id, measured(), seconds=1.0)
    known = store.changes("by-hand", since=-1).revision
    store.attempts.end(attempt.id, "given_up", cause="because")
    assert list(store.changes("by-hand", since=known).records) == []


# -- leases ----------------------------------------------------------------------------------------


def let_the_lease_run_out(store, attempt):
    with store._database.writing() as connection:
        past = ATTEMPTS.c.lease_until - LEASE_SECONDS - 1
        connection.execute(
            update(ATTEMPTS).where(ATTEMPTS.c.id == attempt.id).values(lease_until=past)
        )


def test_a_new_lease_is_not_over(store):
    claim(store)
    assert [one.is_expired for one in store.attempts.running("by-hand")] == [False]


def test_a_lease_is_over_after_its_time_by_the_databases_clock(store):
    let_the_lease_run_out(store, claim(store))
    assert [one.is_expired for one in store.attempts.running("by-hand")] == [True]


def test_a_renewed_lease_is_not_over(store):
    attempt = claim(store)
    let_the_lease_run_out(store, attempt)
    assert store.attempts.renew([attempt.id]) == {attempt.id}
    [one] = store.attempts.running("by-hand")
    assert (one.is_expired, one.renewals) == (False, 1)


def test_the_lease_of_an_expired_attempt_cannot_be_renewed(store):
    attempt = claim(store)
    store.attempts.end(attempt.id, "given_up", cause="because")
    assert store.attempts.renew([attempt.id]) == set()


# -- losses ----------------------------------------------------------------------------------------


def lose(store, times):
    for _ in range(times):
        store.attempts.end(claim(store).id, "lost", cause="the device is gone")


def test_a_trial_that_the_machine_ended_is_retried_but_not_for_ever(store):
    lose(store, MAX_RETRIES + 1)
    assert claim(store) is None


def test_a_trial_that_failed_says_how_often_and_why(store):
    lose(store, 2)
    record = the_trial(store)
    assert (record.is_finished, record.message) == (
        False,
        "lost 2 times, not by its own fault: the device is gone",
    )


def test_losses_can_be_forgiven(store):
    lose(store, MAX_RETRIES + 1)
    store.attempts.forgive_losses("by-hand")
    assert claim(store).ordinal == MAX_RETRIES + 2


def test_a_forgiven_failure_is_not_an_expired_attempt(store):
    attempt = claim(store)
    store.attempts.end(attempt.id, "lost", cause="the device is gone")
    store.attempts.forgive_losses("by-hand")
    assert (row_of(store, attempt).state, row_of(store, attempt).cause) == (
        "forgiven",
        "the device is gone",
    )


def test_attempts_are_told_apart_by_how_they_ended(store):
    for cause, state in enumerate(("given_up", "given_back", "lost", "given_up")):
        store.attempts.end(claim(store).id, state, cause=str(cause))
    claim(store, 1)
    assert store.attempts.causes("by-hand", [0, 1], "given_up") == {0: ["0", "3"]}
    assert store.attempts.causes("by-hand", [0, 1], "lost") == {0: ["2"]}


def test_released_attempts_do_not_count_as_failures(store):
    for _ in range(MAX_RETRIES + 1):
        store.attempts.end(claim(store).id, "given_back", cause="stopped")
    assert claim(store) is not None


# -- what has changed ------------------------------------------------------------------------------


def test_changes_come_in_the_order_of_their_results(store):
    attempts = [claim(store, number) for number in range(3)]
    known = store.changes("by-hand", since=-1).revision
    for attempt in reversed(attempts):
        store.attempts.finish(attempt.id, measured(), seconds=1.0)
    assert [record.number for record in store.changes("by-hand", since=known).records] == [2, 1, 0]


def test_known_trials_are_not_read_again(store):
    keep(store, config(0), measured())
    known = store.changes("by-hand", since=-1).revision
    keep(store, config(1), measured())
    assert [record.number for record in store.changes("by-hand", since=known).records] == [1]


def test_without_changes_no_trials_are_returned(store):
    keep(store, config(0), measured())
    known = store.changes("by-hand", since=-1).revision
    assert store.changes("by-hand", since=known).records == ()
