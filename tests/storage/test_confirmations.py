"""Confirmations are stored beside the trials: whole, once, in order, and not counted as trials."""

import math
from dataclasses import replace
from datetime import UTC, datetime
from threading import Thread

import pytest
from sqlalchemy import update

from autotune.errors import UnknownStudy
from autotune.spec.confirmation import new_confirmation_id
from autotune.storage.tables import STUDIES
from autotune.storage.transfer import add_studies, read_studies
from tests.building.studies import config, definition, keep, measured, open_store
from tests.building.whole_study import CONFIRMATIONS

PAIRED, FAILED, REPEATED, SEED, INITIAL, VARIANT = CONFIRMATIONS


@pytest.fixture
def store(store_url):
    with open_store(store_url) as opened:
        opened.create_study(definition(), trials_wanted=30)
        yield opened


def add(store, confirmation, confirmation_id=None):
    store.add_confirmation(
        "by-hand", confirmation, confirmation_id=confirmation_id or new_confirmation_id()
    )


def test_every_kind_is_read_as_it_was_measured_and_the_oldest_is_first(store):
    for confirmation in reversed(CONFIRMATIONS):
        add(store, confirmation)
    assert store.confirmations("by-hand") == list(reversed(CONFIRMATIONS))


@pytest.mark.parametrize("perplexity", [-1.0, 0.0, math.exp(701.0), "12"])
def test_an_impossible_perplexity_before_training_is_not_stored(store, perplexity):
    with pytest.raises(ValueError, match="perplexity is"):
        add(store, replace(INITIAL, perplexity=perplexity))
    assert store.confirmations("by-hand") == []


def test_a_study_begins_with_what_it_reuses(store):
    store.create_study(definition("second"), trials_wanted=3, confirmations=[INITIAL])
    assert store.confirmations("second") == [INITIAL]


def test_a_study_has_only_its_own(store):
    store.create_study(definition("other"), trials_wanted=1)
    add(store, PAIRED)
    store.add_confirmation("other", SEED, confirmation_id=new_confirmation_id())
    assert (store.confirmations("by-hand"), store.confirmations("other")) == ([PAIRED], [SEED])


def test_what_is_given_again_is_stored_once(store):
    for confirmation_id in ("a" * 32, "b" * 32, "a" * 32):
        add(store, REPEATED, confirmation_id)
    assert store.confirmations("by-hand") == [REPEATED, REPEATED]


def test_no_trial_is_counted_and_the_next_one_gets_the_next_number(store):
    keep(store, config(0), measured())
    before = store.trials("by-hand"), store.studies()
    for confirmation in CONFIRMATIONS:
        add(store, confirmation)
    assert (store.trials("by-hand"), store.studies()) == before
    assert keep(store, VARIANT.config).number == 1


def test_another_worker_sees_that_the_study_changed_and_no_trial(store):
    keep(store, config(0), measured())
    before = store.changes("by-hand", since=-1).revision
    add(store, PAIRED)
    changes = store.changes("by-hand", since=before)
    assert (changes.revision > before, list(changes.records)) == (True, [])
    keep(store, config(1), measured())
    assert [one.number for one in store.changes("by-hand", since=changes.revision).records] == [1]


def test_several_processes_may_add_at_once(store_url, store):
    def add_some(seed):
        with open_store(store_url) as own:
            for at in range(5):
                add(own, replace(SEED, seed=seed + at))

    threads = [Thread(target=add_some, args=(seed,)) for seed in (0, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seeds = [one.seed for one in store.confirmations("by-hand")]
    assert [one for one in seeds if one < 10] == list(range(5))
    assert [one for one in seeds if one >= 10] == list(range(10, 15))


def test_a_copy_of_a_study_was_begun_when_the_study_was_and_another_study_was_not(store, tmp_path):
    begun = store.begun("by-hand")
    with open_store(f"sqlite:///{tmp_path}/copy.db") as copy:
        add_studies(copy.database, read_studies(store.database))
        assert copy.begun("by-hand") == begun
        with copy._database.writing() as connection:
            connection.execute(update(STUDIES).values(created_at=datetime(2026, 1, 1, tzinfo=UTC)))
        assert copy.begun("by-hand") == "2026-01-01T00:00:00.000000" != begun


# -- what is not stored as it was given ------------------------------------------------------------


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_stored_as_none(store, number):
    add(store, replace(SEED, perplexity=number))
    add(store, replace(VARIANT, measurement=measured(final_loss=number)))
    seed, variant = store.confirmations("by-hand")
    assert (seed.perplexity, variant.measurement.final_loss) == (None, None)


@pytest.mark.parametrize("text", ["with a zero \0 byte", "half a character \ud83d", "x" * 1000])
def test_any_text_can_be_why_there_is_no_speed(store, text):
    add(store, replace(FAILED, failure=text))
    assert store.confirmations("by-hand")[0].failure == text


@pytest.mark.parametrize(
    "impossible",
    [
        replace(PAIRED, speed_ratio=0.0),
        replace(PAIRED, partner_tokens_per_second=-1.0),
        replace(REPEATED, tokens_per_second="many"),
        replace(SEED, seed=True),
        replace(SEED, seconds=math.nan),
        replace(VARIANT, measurement=replace(measured(), outcome="splendid")),
    ],
)
def test_what_could_not_be_read_again_is_not_stored(store, impossible):
    with pytest.raises(ValueError, match=" is "):
        add(store, impossible)
    assert store.confirmations("by-hand") == []


def test_a_study_that_is_not_there_takes_none(store):
    with pytest.raises(UnknownStudy):
        store.add_confirmation("other", PAIRED, confirmation_id=new_confirmation_id())
    assert store.confirmations("by-hand") == []
