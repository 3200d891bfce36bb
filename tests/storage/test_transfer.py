"""Studies as files: export is complete, import is atomic, on SQLite and PostgreSQL."""

import io
import json
import math
import os
import shutil
import sqlite3
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from sqlalchemy import update

from autotune.errors import InvalidInput, StorageUnavailable, StudyMismatch, UnknownStudy
from autotune.storage.tables import STUDIES
from autotune.storage.tables import TRIALS as TRIALS_TABLE
from autotune.storage.transfer import add_studies, read_file, read_studies, write_file
from tests.building.old_databases import DATA
from tests.building.studies import config, definition, keep, measured, open_store
from tests.building.whole_study import CONFIRMATIONS, TRIALS, run_command, write_whole_study


def rows_of(store, *names):
    return read_studies(store.database, names or None)


def without_ids(studies):
    """Returns the studies without the ids of attempts and confirmations, which a copy has anew."""
    return [
        replace(
            study,
            attempts=[(number, {**row, "id": ""}) for number, row in study.attempts],
            confirmations=[{**row, "id": ""} for row in study.confirmations],
        )
        for study in studies
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The exported file of a study without a running attempt."""
    folder = tmp_path_factory.mktemp("whole")
    url = f"sqlite:///{folder}/autotune.db"
    write_whole_study(url, running=False)
    with open_store(url) as store:
        written = io.BytesIO()
        write_file(rows_of(store), written)
    (folder / "study.db").write_bytes(written.getvalue())
    return folder / "study.db"


@pytest.fixture
def file(whole, tmp_path):
    return Path(shutil.copy(whole, tmp_path / "study.db"))


@pytest.fixture
def other(tmp_path):
    with open_store(f"sqlite:///{tmp_path}/other.db") as store:
        yield store


@pytest.fixture
def several(other, whole):
    """A store with three studies."""
    for name in ("one", "two", "three"):
        add_studies(other.database, read_file(whole), new_name=name)
    return other


def change(file, statement, *values):
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(statement, values)


# -- out -------------------------------------------------------------------------------------------


def test_every_row_of_a_study_is_read(store_url):
    write_whole_study(store_url)
    with open_store(store_url) as store:
        (study,) = rows_of(store)
    assert [row["number"] for row in study.trials] == list(range(TRIALS))
    assert len(study.predictions) == 4
    assert len(study.attempts) == 8
    assert len(study.confirmations) == len(CONFIRMATIONS)


def test_only_the_studies_that_were_named_come_out(several):
    assert [study.name for study in rows_of(several, "three", "one")] == ["three", "one"]


def test_the_error_for_a_missing_study_lists_the_existing_ones(other):
    other.create_study(definition("there"), trials_wanted=1)
    with pytest.raises(UnknownStudy, match="no study 'elsewhere'") as raised:
        rows_of(other, "elsewhere")
    assert "there" in raised.value.hint


def test_a_number_that_is_not_finite_comes_out_as_null(other):
    other.create_study(definition(), trials_wanted=1)
    keep(other, config(0), measured())
    with other.database.writing() as connection:
        odd = {**asdict(measured()), "perplexity": math.nan}
        connection.execute(update(TRIALS_TABLE).values(measurement=odd))
    (study,) = rows_of(other)
    assert study.trials[0]["measurement"]["perplexity"] is None


def test_a_text_that_is_too_long_for_other_databases_comes_out_cut(file):
    change(file, "UPDATE autotune_trials SET name = ? WHERE number = 0", "x" * 201 + "\0")
    (study,) = read_file(file)
    assert study.trials[0]["name"] == "x" * 199 + "…"


def test_a_study_that_was_written_by_a_later_autotune_does_not_come_out(other):
    other.create_study(definition(), trials_wanted=1)
    with other.database.writing() as connection:
        connection.execute(update(STUDIES).values(schema_version=99))
    with pytest.raises(StorageUnavailable, match="schema 99"):
        rows_of(other)


# -- there and back --------------------------------------------------------------------------------


def test_a_file_is_itself_a_database_of_the_study(file):
    with open_store(f"sqlite:///{file}", create=False) as store:
        assert store.names() == ["by-hand"]
        assert len(store.trials("by-hand")) == TRIALS - 1


def test_a_study_goes_to_postgresql_and_back_unchanged(tmp_path, file, postgres_url):
    copies = []
    for number, url in enumerate((postgres_url, f"sqlite:///{tmp_path}/last.db")):
        with open_store(url) as store:
            add_studies(store.database, read_file(file))
            copies.append(without_ids(rows_of(store)))
            file = tmp_path / f"{number}.db"
            with file.open("wb") as written:
                write_file(rows_of(store), written)
    assert copies[0] == copies[1] == without_ids(read_file(tmp_path / "study.db"))


def test_what_is_read_of_a_copy_is_what_was_read_of_the_study(file, store_url):
    with (
        open_store(f"sqlite:///{file}") as old,
        open_store(store_url) as new,
    ):
        add_studies(new.database, rows_of(old))
        assert new.trials("by-hand") == old.trials("by-hand")
        assert new.definition("by-hand") == old.definition("by-hand")
        assert new.forecasts("by-hand") == old.forecasts("by-hand")
        assert new.confirmations("by-hand") == old.confirmations("by-hand")


def test_results_keep_the_order_in_which_they_came(file, other):
    add_studies(other.database, read_file(file))
    with open_store(f"sqlite:///{file}") as first:
        numbers = [
            [one.number for one in store.changes("by-hand", since=-1).records]
            for store in (first, other)
        ]
    assert numbers[0] == numbers[1] != sorted(numbers[0])


def test_a_running_attempt_is_expired_after_the_import(store_url, other):
    write_whole_study(store_url)
    with open_store(store_url) as store:
        add_studies(other.database, rows_of(store))
        assert len(store.attempts.running("by-hand")) == 1
    assert other.attempts.running("by-hand") == []
    assert keep(other, config(5)).ordinal == 2


def test_a_study_can_be_imported_into_its_own_database_under_another_name(store_url, whole):
    with open_store(store_url) as store:
        add_studies(store.database, read_file(whole))
        add_studies(store.database, read_file(whole), new_name="copy")
        assert store.names() == ["by-hand", "copy"]
        assert store.trials("copy") == store.trials("by-hand")
        assert store.confirmations("copy") == store.confirmations("by-hand")


def test_a_database_of_an_earlier_release_is_imported_and_stays_as_it_was(other, caplog):
    """Nothing is said of its temporary copy, which no user can find."""
    before = (DATA / "schema-3.db").read_bytes()
    add_studies(other.database, read_file(DATA / "schema-3.db"))
    assert (DATA / "schema-3.db").read_bytes() == before
    assert other.names() == ["before-confirmations"]
    assert caplog.messages == []


# -- refused ---------------------------------------------------------------------------------------


def test_the_error_for_an_existing_name_has_the_option_for_another(other, whole):
    add_studies(other.database, read_file(whole))
    with pytest.raises(StudyMismatch, match="has a study 'by-hand' already") as raised:
        add_studies(other.database, read_file(whole))
    assert "--name NEW" in raised.value.hint
    assert len(other.trials("by-hand")) == TRIALS - 1


def test_where_one_study_exists_none_is_added(several, tmp_path):
    with open_store(f"sqlite:///{tmp_path}/new.db") as new:
        add_studies(new.database, rows_of(several, "two"))
        with pytest.raises(StudyMismatch, match="has a study 'two' already"):
            add_studies(new.database, rows_of(several))
        assert new.names() == ["two"]


def test_a_new_name_is_for_one_study(several, tmp_path):
    with (
        open_store(f"sqlite:///{tmp_path}/new.db") as new,
        pytest.raises(InvalidInput, match="one, two, three"),
    ):
        add_studies(new.database, rows_of(several), new_name="new")


def error_of(file):
    """Returns what reading the file raises, which begins with its name."""
    with pytest.raises(InvalidInput) as raised:
        read_file(file)
    assert raised.value.hint
    assert raised.value.message.startswith(f"{file} ")
    return raised.value.message.removeprefix(f"{file} ")


@pytest.mark.parametrize("content", [b"", b"name,value\n", b'{"kind": "studies"}\n', b"SQLite"])
def test_what_is_no_database_is_no_file_of_studies(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    assert error_of(tmp_path / "x") == "is not a file of exported studies"


def test_a_truncated_file_is_rejected_wherever_it_ends(file):
    content = file.read_bytes()
    for kept in (16, 100, 4096, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:kept])
        assert error_of(file).startswith(("is damaged", "cannot be imported"))


def test_overwritten_pages_are_noticed(file):
    content = bytearray(file.read_bytes())
    for first in range(4096, len(content), 8 * 4096):
        content[first : first + 512] = bytes(512)
    file.write_bytes(content)
    assert error_of(file).startswith("is damaged: ")


def test_a_database_of_another_program_is_rejected(tmp_path):
    change(tmp_path / "x", "CREATE TABLE music (title)")
    assert "cannot be imported" in error_of(tmp_path / "x")


def test_a_database_without_studies_is_rejected(other, tmp_path):
    other.close()
    assert error_of(tmp_path / "other.db") == "has no studies"


def test_a_database_of_a_later_release_is_rejected(file):
    change(file, "UPDATE autotune_alembic_version SET version_num = '9999'")
    assert "has schema 9999, this autotune knows them up to" in error_of(file)


def test_a_database_in_use_is_not_read_without_its_log(file):
    file.with_name("study.db-wal").touch()
    assert error_of(file) == "is in use: a part of it is in study.db-wal"


@pytest.mark.parametrize(
    "program",
    [
        "CREATE TRIGGER t AFTER INSERT ON autotune_trials BEGIN DELETE FROM autotune_studies; END",
        "CREATE VIEW v AS SELECT 1",
    ],
)
def test_a_file_with_a_stored_program_is_rejected(file, program):
    change(file, program)
    assert "which autotune has not created" in error_of(file)


STUDY, TRIAL, ATTEMPT = ("autotune_studies", "autotune_trials", "autotune_attempts")
PREDICTION, CONFIRMATION = ("autotune_predictions", "autotune_confirmations")


@pytest.mark.parametrize(
    ("table", "column", "value", "named"),
    [
        (STUDY, "name", "../../up", "'../../up' cannot be a study's name"),
        (STUDY, "workload", "{}", "study 'by-hand' cannot be read"),
        (STUDY, "sampler", "nonesuch", "sampler is 'nonesuch'"),
        (STUDY, "cap_bytes", 2**63 - 1, "cap_bytes is 9223372036854775807"),
        (STUDY, "trials_wanted", 2**31, "trials_wanted is 2147483648"),
        (STUDY, "revision", 2**31, "revision is 2147483648"),
        (STUDY, "revision", "often", "revision is 'often'"),
        (STUDY, "created_at", "yesterday", "created_at is not a date"),
        (STUDY, "created_at", "0001-01-01 00:00:00.000000", "created_at is "),
        (STUDY, "created_at", "9999-12-31 23:59:59.999999", "created_at is "),
        (TRIAL, "config", '{"precision": "fp77"}', "'fp77'"),
        (TRIAL, "config", '{"precision": "fp32"}', "has fingerprint"),
        (TRIAL, "name", b"\xff", "name is"),
        (TRIAL, "number", 10**18, "trial 0 of study 'by-hand' is missing"),
        (TRIAL, "measurement", '{"outcome": "splendid"}', "trial 0 cannot be read"),
        (TRIAL, "measurement", '"text"', "measurement is 'text'"),
        (TRIAL, "measurement", "[" * 100_000, "is nested too deeply"),
        (TRIAL, "measurement", None, "a date without a result"),
        (TRIAL, "seconds", 1e308, "seconds is 1e+308"),
        (TRIAL, "seconds", -1, "seconds is -1"),
        (TRIAL, "revision", 1000, "trial 0 is younger than its study's last change"),
        (PREDICTION, "prediction", "{}", "prediction"),
        (ATTEMPT, "state", "idle", "there is no state 'idle'"),
        (ATTEMPT, "ordinal", -1, "ordinal is -1"),
        (ATTEMPT, "lease_until", 1e308, "lease_until is 1e+308"),
        (ATTEMPT, "renewals", -1, "renewals is -1"),
        (ATTEMPT, "seconds", 1e99, "seconds is 1e+99"),
        (ATTEMPT, "measurement", "[]", "measurement is []"),
        (CONFIRMATION, "ordinal", 10**18, "confirmation 1 of study 'by-hand' is missing"),
        (CONFIRMATION, "id", b"\xff", "id is"),
        (CONFIRMATION, "result", "[1]", "confirmation is [1]"),
        (CONFIRMATION, "result", '{"kind": "guess"}', "there is no kind 'guess' of confirmation"),
        (CONFIRMATION, "fingerprint", "abcdefabcdef", "has fingerprint"),
        (CONFIRMATION, "created_at", "yesterday", "created_at is not a date"),
    ],
)
def test_impossible_content_is_named(file, table, column, value, named):
    first = f"(SELECT min(rowid) FROM {table})"
    change(file, f"UPDATE {table} SET {column} = ? WHERE rowid = {first}", value)
    assert named in error_of(file)


def test_a_missing_row_is_named(file):
    change(file, "DELETE FROM autotune_attempts")
    change(file, "DELETE FROM autotune_trials WHERE number = 2")
    assert "trial 2 of study 'by-hand' is missing: the next is 3" in error_of(file)


# -- the commands ----------------------------------------------------------------------------------


@pytest.fixture
def run(whole, tmp_path, monkeypatch, capsysbinary):
    """run(...) is `autotune studies ...` with a database of the study; stdout is bytes."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(whole, "autotune.db")
    storage = ["--storage", "sqlite:///autotune.db"]
    return lambda *arguments: run_command(
        monkeypatch, capsysbinary, "studies", *arguments, *storage
    )


def test_a_file_is_exported_whole_and_comes_back(run):
    assert run("export", "by-hand", "--out", "there/study.db")[0] == 0
    assert os.listdir("there") == ["study.db"]
    assert run("import", "there/study.db", "--name", "again")[:2] == (
        0,
        b"imported again: 5 trials\n",
    )


def test_without_a_file_the_database_goes_to_stdout(run):
    Path("study.db").write_bytes(run("export", "by-hand")[1])
    assert [study.name for study in read_file(Path("study.db"))] == ["by-hand"]


def test_an_export_that_fails_leaves_the_old_file_as_it_was(run):
    Path("study").write_text("the old one")
    change("autotune.db", "UPDATE autotune_trials SET config = '[]' WHERE number = 3")
    code, _, said = run("export", "by-hand", "--out", "study")
    assert (code, Path("study").read_text()) == (2, "the old one")
    assert b"trial 3" in said
    assert sorted(os.listdir()) == ["autotune.db", "study"]


def test_no_database_is_written_over_by_an_export(run):
    before = Path("autotune.db").read_bytes()
    code, _, said = run("export", "by-hand", "--out", "autotune.db")
    assert (code, Path("autotune.db").read_bytes()) == (2, before)
    assert b"autotune.db is a database" in said


def test_an_export_can_go_to_what_is_no_file(run):
    assert run("export", "by-hand", "--out", os.devnull)[0] == 0
    assert not Path(os.devnull).is_file()


def test_a_file_that_cannot_be_imported_makes_no_database(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("bad.db").write_text(json.dumps({"kind": "trial"}))
    arguments = ("studies", "import", "bad.db", "--storage", "sqlite:///new.db")
    code, _, said = run_command(monkeypatch, capsys, *arguments)
    assert code == 2
    assert "bad.db is not a file of exported studies" in said
    assert not Path("new.db").exists()
