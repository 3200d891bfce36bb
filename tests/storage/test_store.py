"""A SQLite studies database: its trials, how it is opened, and which files are rejected."""

import importlib.util
import sqlite3
from contextlib import closing
from pathlib import Path

import optuna
import pytest

from autotune.errors import StorageUnavailable, StorageUnreachable, UnknownStudy
from autotune.spec.confirmation import InitialPerplexity
from autotune.spec.prediction import Forecast
from autotune.spec.provenance import MEASURED, FailedSeed, PerplexitySource, TrialReference
from autotune.storage.searches import Searches
from tests.building.studies import (
    CAP_BYTES,
    config,
    definition,
    keep,
    measured,
    open_store,
    write_study,
)


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "studies" / "autotune.db"


@pytest.fixture
def url(file) -> str:
    return f"sqlite:///{file}"


@pytest.fixture
def store(url):
    """A store with one study and no trial."""
    with open_store(url) as opened:
        opened.create_study(definition(), trials_wanted=30)
        yield opened


OF_A_STUDY = {
    "definition": lambda store: store.definition("gone"),
    "begun": lambda store: store.begun("gone"),
    "add_script_files": lambda store: store.add_script_files("gone", {"a.py": "0" * 64}),
    "add_confirmation": lambda store: store.add_confirmation(
        "gone",
        InitialPerplexity(config=config(0), perplexity=9.0, seconds=1.0),
        confirmation_id="c",
    ),
    "claim": lambda store: store.attempts.claim(
        "gone", config(0), worker="w", attempt_id="a", most_trials=9
    ),
    "forgive_losses": lambda store: store.attempts.forgive_losses("gone"),
}
"""What needs the row of a study, which somebody may delete or rename meanwhile."""


@pytest.mark.parametrize("call", OF_A_STUDY.values(), ids=OF_A_STUDY)
def test_a_study_that_is_gone_is_unknown_and_no_damage(store_url, call):
    with open_store(store_url) as store:
        store.create_study(definition(), trials_wanted=30)
        with pytest.raises(UnknownStudy, match="there is no study 'gone' in") as raised:
            call(store)
    assert raised.value.hint == "there is by-hand"


def test_an_attempt_whose_study_is_gone_is_none_to_finish_or_to_end(store_url):
    with open_store(store_url) as store:
        store.create_study(definition(), trials_wanted=30)
        attempt = keep(store, config(0))
        Searches(store.database).delete_study("by-hand")
        assert store.attempts.finish(attempt.id, measured(), seconds=1.0) == "unknown"
        assert not store.attempts.release(attempt.id, cause="stopped")


def error_of(url, *, create=False):
    """What opening `url` and listing its studies raises."""
    with (
        pytest.raises((StorageUnavailable, UnknownStudy)) as raised,
        open_store(url, create=create) as store,
    ):
        store.studies()
    return raised.value


def test_the_version_of_a_study_changes_with_a_prediction_of_its_own_only(store):
    store.create_study(definition("other"), trials_wanted=30)
    before = {entry.name: entry.version for entry in store.entries()}
    store.store_forecast("other", Forecast(config=config(0), error="no fake form"))
    after = {entry.name: entry.version for entry in store.entries()}
    assert after["by-hand"] == before["by-hand"]
    assert after["other"] != before["other"]
    assert (before["other"].forecasts, after["other"].forecasts) == (0, 1)


# -- what is told of a trial -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measurement", "feasible"),
    [
        (measured(device_bytes=CAP_BYTES), True),
        (measured(device_bytes=CAP_BYTES + 1), False),
        (measured(device_bytes=CAP_BYTES, peak_memory_bytes=CAP_BYTES + 1), True),
        (measured(device_bytes=CAP_BYTES + 1, peak_memory_bytes=1), False),
        (measured(device_bytes=None), False),
        (measured(outcome="over_cap"), False),
        (measured(outcome="diverged"), False),
        (measured(outcome="timeout"), False),
    ],
)
def test_feasible_is_decided_by_the_outcome_and_by_what_the_device_must_have(
    store, measurement, feasible
):
    keep(store, config(0), measurement)
    assert store.trials("by-hand")[0].feasible is feasible


SOURCES = [
    MEASURED,
    PerplexitySource(
        kind="measured", seeds=2, failed_seeds=(FailedSeed(seed=5, reason="it ended"),)
    ),
    PerplexitySource.shared_with(TrialReference(number=3)),
    PerplexitySource.shared_with(TrialReference(number=3, study="x")),
    PerplexitySource(kind="evaluation", step=20),
    PerplexitySource(kind="unchecked_evaluation", step=20),
    PerplexitySource(kind="training_loss", last_steps=5, unused_evaluation="unseen"),
]


def test_where_a_result_comes_from_is_read_as_it_was_stored(store_url):
    origin = TrialReference(number=4, study="earlier")
    measurements = [measured(perplexity_source=one, reused_from=origin) for one in SOURCES]
    write_study(store_url, measurements)
    with open_store(store_url) as store:
        records = store.trials("by-hand")
    assert [record.perplexity_source for record in records] == SOURCES
    assert {record.reused_from for record in records} == {origin}


# -- durable ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pragma", "value"),
    [("journal_mode", "wal"), ("synchronous", 2), ("busy_timeout", 60_000), ("foreign_keys", 1)],
)
def test_a_connection_is_set_to_be_durable_and_patient(store, pragma, value):
    with store._database.engine.connect() as connection:
        assert connection.exec_driver_sql(f"PRAGMA {pragma}").scalar() == value


def test_optunas_storage_lives_in_the_same_file(store, url):
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.RDBStorage(url)
    theirs = optuna.create_study(study_name="by-hand", storage=storage)
    keep(store, config(0))
    theirs.add_trial(optuna.trial.create_trial(value=1.0))
    assert len(optuna.load_study(study_name="by-hand", storage=url).trials) == 1
    assert len(store.trials("by-hand")) == 1
    storage.engine.dispose()


# -- what is no database ---------------------------------------------------------------------------


def test_the_error_for_a_file_that_is_not_a_database_names_it(tmp_path):
    (tmp_path / "notes.db").write_text("these are my notes\n" * 100)
    error = error_of(url := f"sqlite:///{tmp_path}/notes.db")
    assert url in error.message
    assert error.hint


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("kept", ["100 bytes", "half"])
def test_the_error_for_a_truncated_database_names_it(file, url, kept, create):
    write_study(url, [measured() for _ in range(8)])
    whole = file.read_bytes()
    file.write_bytes(whole[: {"100 bytes": 100, "half": len(whole) // 2}[kept]])
    error = error_of(url, create=create)
    assert url in error.message
    assert error.hint


@pytest.mark.parametrize("create", [False, True])
def test_the_error_for_a_directory_names_it(tmp_path, create):
    error = error_of(f"sqlite:///{tmp_path}", create=create)
    assert str(tmp_path) in error.message
    assert error.hint


def test_the_error_for_a_missing_file_names_it(tmp_path):
    error = error_of(f"sqlite:///{tmp_path}/missing.db")
    assert f"{tmp_path}/missing.db" in error.message
    assert error.hint


def test_a_missing_file_is_not_made_by_looking_for_it(tmp_path):
    error_of(f"sqlite:///{tmp_path}/missing.db")
    assert not (tmp_path / "missing.db").exists()


def test_a_database_without_our_tables_has_no_studies(tmp_path):
    with closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        connection.execute("CREATE TABLE other (id INTEGER)")
    error = error_of(url := f"sqlite:///{tmp_path}/other.db")
    assert isinstance(error, UnknownStudy)
    assert url in error.message


@pytest.mark.parametrize(
    "url",
    [
        "nonsense",
        "",
        "nonesuch://localhost/studies",
        "mysql+nonesuch://localhost/studies",
    ],
)
def test_the_error_for_an_unusable_url_names_it(url):
    error = error_of(url, create=True)
    assert isinstance(error, StorageUnavailable)
    assert (url or "''") in error.message
    assert error.hint


def test_the_error_for_a_folder_that_cannot_be_created_names_it(tmp_path):
    (tmp_path / "file").touch()
    error = error_of(url := f"sqlite:///{tmp_path}/file/autotune.db", create=True)
    assert url in error.message
    assert error.hint


@pytest.mark.parametrize("driver", ["psycopg2", "pg8000"])
def test_the_error_for_a_missing_driver_says_what_to_install(driver):
    if importlib.util.find_spec(driver) is not None:
        pytest.skip(f"{driver} is installed")
    error = error_of(url := f"postgresql+{driver}://localhost/studies", create=True)
    assert url in error.message
    assert f"pip install {driver}" in error.hint.replace('"', "")


def test_an_error_does_not_contain_the_password():
    error = error_of("mysql+nonesuch://me:open-sesame@localhost/studies", create=True)
    assert "open-sesame" not in error.message + error.hint


def test_the_error_for_a_study_of_another_schema_has_both_numbers(store, file):
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE autotune_studies SET schema_version = 99")
    with pytest.raises(StorageUnavailable, match=r"schema 99, this autotune reads 4") as raised:
        store.definition("by-hand")
    assert raised.value.hint


def test_a_study_from_before_devices_had_notes_is_read(store, file):
    later = ("is_known_to_nvml", "compute_capability", "compute_mode", "context_bytes", "notes")
    paths = ", ".join(f"'$.{name}'" for name in later)
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(f"UPDATE autotune_studies SET device = json_remove(device, {paths})")
    assert store.definition("by-hand")[0] == definition()


def test_the_error_for_a_database_that_disappears_while_open_names_it(store, file, url):
    store._database.engine.dispose()
    for part in file.parent.glob("autotune.db*"):
        part.unlink()
    with pytest.raises(StorageUnavailable) as raised:
        keep(store, config(0))
    assert url in raised.value.message


def test_a_file_that_is_moved_away_while_in_use_takes_nothing_until_it_is_back(store, file):
    folder = file.parent
    store.create_study(definition("before"), trials_wanted=1)
    folder.rename(folder.with_name("away"))
    with pytest.raises(StorageUnreachable, match="was removed or replaced while it was in use"):
        store.create_study(definition("lost"), trials_wanted=1)
    folder.with_name("away").rename(folder)
    store.create_study(definition("after"), trials_wanted=1)
    assert {"before", "after"} < {study.name for study in store.studies()}
