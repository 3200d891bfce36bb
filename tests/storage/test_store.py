"""The studies database: what is put in comes out, whatever happens in between; what is no database is refused."""

import dataclasses
import importlib.util
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import optuna
import pytest
from sqlalchemy.exc import IntegrityError
from study_building import CAP_BYTES, MIB, config, definition, measured, open_store, write_study

from autotune.errors import StorageUnavailable, StudyMismatch, UnknownStudy
from autotune.result import Measurement

EVERYTHING_MEASURED = Measurement(
    outcome="over_cap",
    message="needs more than the cap",
    peak_memory_bytes=5 * 2**40,
    peak_reserved_bytes=6 * 2**40,
    device_bytes=7 * 2**40,
    context_bytes=500 * MIB,
    alloc_retries=3,
    peak_phase="backward",
    bytes_by_kind={"parameters": 12, "optimizer state": 24},
    peak_bytes_by_category={"parameters": 12, "gradients": 8},
    requested_bytes=123,
    tokens_per_second=1234.5,
    tokens_per_second_spread=6.75,
    perplexity_source="measured",
    perplexity=17.125,
    perplexity_spread=0.25,
    parity="same",
    parity_message="at most, the loss of step 2 is 0.001 % off",
    bits_per_byte=4.0981,
    final_loss=2.84,
    compile_seconds=31.5,
    compile_cache="partial",
    startup_seconds=0.25,
    device_startup_seconds=0.5,
    seconds_by_part={"startup": 0.25, "training": 2.5},
    reused_from="trial 3 of study 'earlier'",
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


def refusal(url, *, create=False):
    """What opening `url` and listing its studies raises."""
    with pytest.raises((StorageUnavailable, UnknownStudy)) as raised, open_store(url, create=create) as store:
        store.studies()
    return raised.value


# -- what is kept ------------------------------------------------------------------------------------------------


def test_a_definition_comes_back_equal(store):
    assert store.definition("by-hand") == (definition(), 30)


def test_the_definition_that_comes_back_has_the_same_legal_space(store):
    assert store.definition("by-hand")[0].legal_space() == definition().legal_space()


def test_the_measurement_of_the_next_test_sets_every_field():
    unmeasured = Measurement(outcome="ok")
    for field in dataclasses.fields(Measurement):
        assert getattr(EVERYTHING_MEASURED, field.name) != getattr(unmeasured, field.name), field.name


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Measurement)])
def test_every_field_of_a_measurement_comes_back(store, field):
    store.begin_trial("by-hand", 0, config(0), name=None)
    store.finish_trial("by-hand", 0, EVERYTHING_MEASURED, seconds=2.5)
    assert getattr(store.trials("by-hand")[0], field) == getattr(EVERYTHING_MEASURED, field)


def test_a_trial_comes_back_with_its_number_configuration_name_and_seconds(store):
    store.begin_trial("by-hand", 5, config(3), name="[bold]by hand[/bold]")
    store.finish_trial("by-hand", 5, measured(), seconds=2.5)
    [record] = store.trials("by-hand")
    assert (record.number, record.config, record.name, record.seconds) == (5, config(3), "[bold]by hand[/bold]", 2.5)


def test_trials_come_in_the_order_of_their_numbers(store):
    for number in (2, 0, 1):
        store.begin_trial("by-hand", number, config(number), name=None)
    assert [record.number for record in store.trials("by-hand")] == [0, 1, 2]


def test_trials_of_another_study_are_not_among_ours(store, url):
    write_study(url, [measured()], name="another")
    assert store.trials("by-hand") == []


def test_a_trial_that_was_begun_and_not_finished_reads_as_interrupted(store):
    store.begin_trial("by-hand", 0, config(0), name=None)
    [record] = store.trials("by-hand")
    assert (record.outcome, record.feasible, record.is_finished) == ("interrupted", False, False)


def test_a_trial_begun_twice_keeps_one_row(store):
    store.begin_trial("by-hand", 0, config(0), name="first")
    store.begin_trial("by-hand", 0, config(0), name="second")
    assert [record.name for record in store.trials("by-hand")] == ["first"]


def test_a_trial_begun_again_keeps_its_result(store):
    store.begin_trial("by-hand", 0, config(0), name=None)
    store.finish_trial("by-hand", 0, measured(), seconds=1.0)
    store.begin_trial("by-hand", 0, config(0), name=None)
    assert store.trials("by-hand")[0].outcome == "ok"


def test_one_configuration_cannot_have_two_numbers(store):
    store.begin_trial("by-hand", 0, config(0), name=None)
    with pytest.raises(IntegrityError):
        store.begin_trial("by-hand", 1, config(0), name=None)
    assert [record.number for record in store.trials("by-hand")] == [0]


def test_one_number_cannot_have_two_configurations(store, file):
    store.begin_trial("by-hand", 0, config(0), name=None)
    copy = (
        "INSERT INTO autotune_trials (study_id, number, fingerprint, config) "
        "SELECT study_id, number, 'another', config FROM autotune_trials"
    )
    with closing(sqlite3.connect(file)) as connection, pytest.raises(sqlite3.IntegrityError, match="number"):
        connection.execute(copy)


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
def test_feasible_is_decided_by_the_outcome_and_by_what_the_device_must_have(store, measurement, feasible):
    store.begin_trial("by-hand", 0, config(0), name=None)
    store.finish_trial("by-hand", 0, measurement, seconds=1.0)
    assert store.trials("by-hand")[0].feasible is feasible


@pytest.mark.parametrize(("perplexity", "source"), [(20.0, "measured"), (None, None)])
def test_a_perplexity_says_where_it_comes_from(store, perplexity, source):
    store.begin_trial("by-hand", 0, config(0), name=None)
    store.finish_trial("by-hand", 0, measured(perplexity=perplexity), seconds=1.0)
    assert store.trials("by-hand")[0].perplexity_source == source


def test_the_list_of_studies_counts_finished_and_feasible_trials(url):
    write_study(url, [measured(), measured(outcome="over_cap"), None])
    with open_store(url) as store:
        [summary] = store.studies()
    assert (summary.name, summary.trials, summary.trials_wanted, summary.ok) == ("by-hand", 2, 3, 1)


def test_the_number_of_trials_wanted_can_be_raised(store):
    store.set_trials_wanted("by-hand", 60)
    assert store.definition("by-hand")[1] == 60


def test_a_second_study_of_the_same_name_is_refused(store):
    with pytest.raises(StudyMismatch, match="by-hand"):
        store.create_study(definition(), trials_wanted=1)


def test_an_unknown_study_is_refused_with_the_names_of_the_known_ones(store):
    with pytest.raises(UnknownStudy, match="nope") as raised:
        store.definition("nope")
    assert "by-hand" in raised.value.hint


# -- durable and shared ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pragma", "value"), [("journal_mode", "wal"), ("synchronous", 2), ("busy_timeout", 60_000), ("foreign_keys", 1)]
)
def test_a_connection_is_set_to_be_durable_and_patient(store, pragma, value):
    with store._engine.connect() as connection:
        assert connection.exec_driver_sql(f"PRAGMA {pragma}").scalar() == value


def test_two_stores_on_one_file_see_each_others_writes(store, url):
    with open_store(url, create=False) as other:
        store.begin_trial("by-hand", 0, config(0), name=None)
        other.finish_trial("by-hand", 0, measured(), seconds=1.0)
        assert store.trials("by-hand") == other.trials("by-hand")
        assert store.trials("by-hand")[0].outcome == "ok"


def test_a_result_survives_a_sigkill_right_after_it_was_kept(store, url):
    program = (
        "import os, signal, sys\n"
        "from study_building import config, measured, open_store\n"
        "with open_store(sys.argv[1]) as store:\n"
        "    store.begin_trial('by-hand', 0, config(0), name=None)\n"
        "    store.finish_trial('by-hand', 0, measured(), seconds=1.0)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    ended = subprocess.run([sys.executable, "-c", program, url], env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert store.trials("by-hand")[0].outcome == "ok"


def test_optunas_storage_lives_in_the_same_file(store, url):
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.RDBStorage(url)
    theirs = optuna.create_study(study_name="by-hand", storage=storage)
    store.begin_trial("by-hand", 0, config(0), name=None)
    theirs.add_trial(optuna.trial.create_trial(value=1.0))
    assert len(optuna.load_study(study_name="by-hand", storage=url).trials) == 1
    assert len(store.trials("by-hand")) == 1
    storage.engine.dispose()


# -- what is no database -----------------------------------------------------------------------------------------


def test_a_file_that_is_not_a_database_is_refused_by_name(tmp_path):
    (tmp_path / "notes.db").write_text("these are my notes\n" * 100)
    error = refusal(url := f"sqlite:///{tmp_path}/notes.db")
    assert url in error.message
    assert error.hint


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("kept", ["100 bytes", "half", "all but a byte"])
def test_a_truncated_database_is_refused_by_name(file, url, kept, create):
    write_study(url, [measured() for _ in range(8)])
    whole = file.read_bytes()
    file.write_bytes(whole[: {"100 bytes": 100, "half": len(whole) // 2, "all but a byte": -1}[kept]])
    error = refusal(url, create=create)
    assert url in error.message
    assert error.hint


@pytest.mark.parametrize("create", [False, True])
def test_a_directory_is_refused_by_name(tmp_path, create):
    error = refusal(f"sqlite:///{tmp_path}", create=create)
    assert str(tmp_path) in error.message
    assert error.hint


def test_a_missing_file_is_refused_by_name(tmp_path):
    error = refusal(f"sqlite:///{tmp_path}/missing.db")
    assert f"{tmp_path}/missing.db" in error.message
    assert error.hint


def test_a_missing_file_is_not_made_by_looking_for_it(tmp_path):
    refusal(f"sqlite:///{tmp_path}/missing.db")
    assert not (tmp_path / "missing.db").exists()


def test_a_database_without_our_tables_has_no_studies(tmp_path):
    with closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        connection.execute("CREATE TABLE other (id INTEGER)")
    error = refusal(url := f"sqlite:///{tmp_path}/other.db")
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
def test_a_url_that_cannot_be_used_is_refused_by_name(url):
    error = refusal(url, create=True)
    assert isinstance(error, StorageUnavailable)
    assert (url or "''") in error.message
    assert error.hint


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path):
    (tmp_path / "file").touch()
    error = refusal(url := f"sqlite:///{tmp_path}/file/autotune.db", create=True)
    assert url in error.message
    assert error.hint


@pytest.mark.parametrize("driver", ["psycopg", "pg8000"])
def test_a_missing_driver_is_refused_with_what_to_install(driver):
    if importlib.util.find_spec(driver) is not None:
        pytest.skip(f"{driver} is installed")
    error = refusal(url := f"postgresql+{driver}://localhost/studies", create=True)
    assert url in error.message
    assert f"pip install {driver}" in error.hint.replace('"', "")


def test_a_password_is_not_repeated_in_a_refusal():
    error = refusal("mysql+nonesuch://me:open-sesame@localhost/studies", create=True)
    assert "open-sesame" not in error.message + error.hint


def test_a_study_of_another_schema_is_refused_with_both_numbers(store, file):
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE autotune_studies SET schema_version = 99")
    with pytest.raises(StorageUnavailable, match=r"schema 99, this autotune reads 1") as raised:
        store.definition("by-hand")
    assert raised.value.hint


def test_a_database_that_is_lost_while_it_is_open_is_refused_by_name(store, file, url):
    store._engine.dispose()
    for part in file.parent.glob("autotune.db*"):
        part.unlink()
    with pytest.raises(StorageUnavailable) as raised:
        store.begin_trial("by-hand", 0, config(0), name=None)
    assert url in raised.value.message
