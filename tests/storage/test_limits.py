"""What one kind of database takes and the other does not: both are given the same, and keep it."""

import math

import pytest
from sqlalchemy import event

from autotune.errors import InvalidInput, StorageUnreachable
from autotune.spec.prediction import Forecast
from autotune.study.request import SearchRequest
from tests.building.studies import config, definition, keep, measured, open_store


@pytest.fixture
def store(store_url):
    with open_store(store_url) as opened:
        opened.create_study(definition(), trials_wanted=30)
        yield opened


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_stored_as_none(store, number):
    keep(store, config(0), measured(final_loss=number, perplexity=number), seconds=number)
    (record,) = store.trials("by-hand")
    assert (record.final_loss, record.perplexity, record.seconds) == (None, None, None)
    assert (record.tokens_per_second, record.feasible) == (1000.0, False)


def test_a_part_whose_seconds_are_not_finite_is_left_out(store):
    keep(store, config(0), measured(seconds_by_part={"startup": math.nan, "training": 2.0}))
    assert store.trials("by-hand")[0].seconds_by_part == {"training": 2.0}


def test_a_late_result_that_is_not_finite_is_stored_too(store):
    attempt = keep(store, config(0))
    store.attempts.end(attempt.id, "given_up", cause="because")
    assert store.attempts.finish(attempt.id, measured(perplexity=math.nan), seconds=1.0) == "late"


@pytest.mark.parametrize(
    "text", ["with a zero \0 byte", "half a character \ud83d", "x" * 1000, "whole: é😀"]
)
def test_any_text_can_be_a_name_a_message_a_cause_or_a_reason(store, text):
    attempt = keep(store, config(0), name=text)
    store.attempts.end(attempt.id, "lost", cause=text)
    store.store_forecast("by-hand", Forecast(config=config(0), error=text))
    keep(store, config(0), measured(message=text))
    (record,) = store.trials("by-hand")
    assert record.message == text
    kept = text.replace("\0", "\N{REPLACEMENT CHARACTER}").replace("\ud83d", "?")
    assert record.name == (kept if len(kept) <= 200 else "x" * 199 + "…")
    assert store.forecasts("by-hand")[config(0).fingerprint].error == (
        kept if len(kept) <= 500 else "x" * 499 + "…"
    )


def test_the_error_for_too_many_trials_has_the_largest_possible_number():
    with pytest.raises(InvalidInput, match="Invalid trials: 2147483648") as raised:
        SearchRequest(trials=2**31)
    assert "to 1000000" in raised.value.hint


def test_a_full_disk_is_reported_and_stored_results_stay(tmp_path):
    """SQLite's limit of pages fails like a full disk, with the same message."""
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    with open_store(url) as store:
        store.create_study(definition(), trials_wanted=8)
        store._database.engine.dispose()
        event.listen(
            store._database.engine,
            "connect",
            lambda one, _: one.execute("PRAGMA max_page_count = 40"),
        )
        keep(store, config(0), measured(message="short"))
        with pytest.raises(
            StorageUnreachable, match=r"^the disk of sqlite:.*studies\.db is full"
        ) as raised:
            keep(store, config(1), measured(message="x" * 40 * 4096))
        assert raised.value.hint == "free some space"
    with open_store(url) as store:
        before, _ = store.trials("by-hand")
        assert (before.message, before.is_finished) == ("short", True)
