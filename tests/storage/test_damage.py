"""Damaged databases: every command reports one clear sentence, or is not affected.

What a command prints of a damaged database is what it prints of the whole one: nothing else is ever
loaded in silence.
"""

import os
import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest

import autotune
from autotune.errors import AutotuneError, StorageUnavailable, StorageUnreachable, UnknownStudy
from autotune.storage.database import Database
from autotune.storage.error_translation import StorageBusy
from autotune.storage.identity import find_work_folder
from autotune.storage.store import StudyStore
from autotune.storage.transfer import read_studies
from autotune.study.check import check_studies
from tests.building.studies import CAP_BYTES, config, definition, keep, measured, open_store
from tests.building.whole_study import run_command, write_whole_study

COMMANDS = {
    "show": ("show", "by-hand"),
    "studies": ("studies",),
    "search": ("search", "--name", "by-hand", "--device", "cpu"),
    "export": ("studies", "export", "by-hand"),
    "check": ("studies", "check"),
}
PAGE_BYTES = 4096


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A database with a study of everything; nobody has it open."""
    file = tmp_path_factory.mktemp("whole") / "autotune.db"
    write_whole_study(f"sqlite:///{file}", running=False)
    return file


@pytest.fixture
def file(whole, tmp_path):
    return Path(shutil.copy(whole, tmp_path / "autotune.db"))


@pytest.fixture
def run(file, monkeypatch, capsys):
    """run("show") is (exit code, stdout, stderr) of that command on `file`."""
    monkeypatch.chdir(file.parent)
    monkeypatch.setenv("COLUMNS", "200")
    storage = ("--storage", f"sqlite:///{file.name}")
    return lambda command: run_command(monkeypatch, capsys, *COMMANDS[command], *storage)


def by_hand(*statements):
    """As with SQLite's shell, which does not enforce foreign keys."""

    def change(file):
        with closing(sqlite3.connect(file)) as connection, connection:
            for statement in statements:
                connection.execute(statement)

    return change


def cut(kept_bytes):
    return lambda file: file.write_bytes(file.read_bytes()[:kept_bytes])


def replaced(content):
    return lambda file: file.write_bytes(content)


def of_another_program(file):
    file.unlink()
    by_hand("CREATE TABLE bookmarks (id INTEGER, address TEXT)")(file)


def set_json(column, value, *, table="trials", where="id = 1"):
    return by_hand(f"UPDATE autotune_{table} SET {column} = '{value}' WHERE {where}")


def set_field(column, field, value, *, table="trials", where="id = 1"):
    return by_hand(
        f"UPDATE autotune_{table} "
        f"SET {column} = json_set({column}, '$.{field}', {value}) WHERE {where}"
    )


ALL = tuple(COMMANDS)
SOME = ("show", "export")
"""Of a row that cannot be read; the others read it as `show` does, and test_check.py has what a
check says."""

CASES = {
    "empty": (replaced(b""), SOME, "there are no studies"),
    "one page": (cut(PAGE_BYTES), ALL, "malformed"),
    "all but a byte": (cut(-1), ("show", "check"), ""),
    "not SQLite": (replaced(b"these are my notes\n" * 1000), ALL, "not a database"),
    "zeros": (replaced(bytes(50_000)), ALL, "not a database"),
    "the header alone is SQLite's": (replaced(b"SQLite format 3\0" + b"\xff" * 9000), ALL, ""),
    "of another program": (of_another_program, ALL, ""),
    "a later schema": (
        by_hand("UPDATE autotune_alembic_version SET version_num = '0099'"),
        ALL,
        "has schema 0099",
    ),
    "a strange schema": (
        by_hand("UPDATE autotune_alembic_version SET version_num = 'x'"),
        ALL,
        "has schema x",
    ),
    "a later study": (
        by_hand("UPDATE autotune_studies SET schema_version = 99"),
        ALL,
        "has schema 99",
    ),
    "no studies table": (by_hand("DROP TABLE autotune_studies"), SOME, "autotune_studies"),
    "no trials table": (by_hand("DROP TABLE autotune_trials"), ALL, "autotune_trials"),
    "no attempts table": (by_hand("DROP TABLE autotune_attempts"), ("check",), ""),
    "no predictions table": (by_hand("DROP TABLE autotune_predictions"), ("check",), ""),
    "no confirmations table": (by_hand("DROP TABLE autotune_confirmations"), ("check",), ""),
    "a column less": (by_hand("ALTER TABLE autotune_trials DROP COLUMN seconds"), ALL, "seconds"),
    "no studies": (
        by_hand("DELETE FROM autotune_studies"),
        ALL,
        "that refer to missing rows of autotune_studies",
    ),
    "a trial less": (
        by_hand("DELETE FROM autotune_trials WHERE number = 1"),
        ALL,
        "autotune_attempts",
    ),
    "a trial and its attempts less": (
        by_hand(
            "DELETE FROM autotune_attempts WHERE trial_id = 2",
            "DELETE FROM autotune_trials WHERE id = 2",
        ),
        ALL,
        "",
    ),
    "config: no JSON": (set_json("config", '{"precision": "fp'), SOME, ""),
    "config: another": (set_field("config", "precision", "'bf16-true'"), SOME, "has fingerprint"),
    "config: unknown value": (set_field("config", "precision", "'fp77'"), SOME, "'fp77'"),
    "config: unknown field": (set_field("config", "colour", "'red'"), SOME, "colour"),
    "config: a list": (set_json("config", "[1]"), SOME, "trial 0"),
    "measurement: no JSON": (set_json("measurement", "nonsense"), SOME, ""),
    "measurement: a number": (set_json("measurement", "3"), SOME, "trial 0"),
    "measurement: nothing in it": (set_json("measurement", "{}"), SOME, "perplexity"),
    "measurement: unknown outcome": (
        set_field("measurement", "outcome", "'splendid'"),
        SOME,
        "outcome is 'splendid'",
    ),
    "measurement: a text for a size": (
        set_field("measurement", "peak_memory_bytes", "'much'"),
        SOME,
        "peak_memory_bytes is 'much'",
    ),
    "measurement: a list for a speed": (
        set_field("measurement", "tokens_per_second", "json('[1]')"),
        SOME,
        "[1]",
    ),
    "measurement: unknown field": (set_field("measurement", "colour", "'red'"), SOME, "colour"),
    "measurement: no field that decides": (
        by_hand(
            "UPDATE autotune_trials "
            "SET measurement = json_remove(measurement, '$.device_bytes') WHERE id = 1"
        ),
        SOME,
        "has no 'device_bytes'",
    ),
    "measurement: bytes that are no text": (
        by_hand("UPDATE autotune_trials SET measurement = CAST(x'fffefd' AS TEXT) WHERE id = 1"),
        SOME,
        "",
    ),
    "number: a text": (
        by_hand("UPDATE autotune_trials SET number = 'first' WHERE id = 1"),
        SOME,
        "",
    ),
    "seconds: a text": (
        by_hand("UPDATE autotune_trials SET seconds = 'long' WHERE id = 1"),
        SOME,
        "seconds is 'long'",
    ),
    "finished_at: a word": (
        by_hand("UPDATE autotune_trials SET finished_at = 'noon' WHERE id = 1"),
        SOME,
        "noon",
    ),
    "workload: no JSON": (set_json("workload", "{", table="studies"), SOME, ""),
    "workload: impossible": (
        set_field("workload", "layers", "-1", table="studies"),
        SOME,
        "layers",
    ),
    "space: a list": (set_json("space", "[]", table="studies"), SOME, "study 'by-hand'"),
    "device: nothing in it": (set_json("device", "{}", table="studies"), SOME, "study 'by-hand'"),
    "device: a number for a note": (
        set_field("device", "notes", "json('[1]')", table="studies"),
        SOME,
        "device.notes.0 is 1",
    ),
    "device: a list for a name": (
        set_field("device", "name", "json('[]')", table="studies"),
        SOME,
        "name is []",
    ),
    "cap: a word": (by_hand("UPDATE autotune_studies SET cap_bytes = 'much'"), SOME, ""),
    "trials wanted: a word": (
        by_hand("UPDATE autotune_studies SET trials_wanted = 'all'"),
        SOME,
        "'all'",
    ),
    "begun: a word": (by_hand("UPDATE autotune_studies SET created_at = 'today'"), SOME, "today"),
    "prediction: no JSON": (set_json("prediction", "{", table="predictions"), ALL, ""),
    "prediction: nothing in it": (
        set_json("prediction", "{}", table="predictions"),
        ("export", "check"),
        "prediction",
    ),
    "prediction: another": (
        set_field("config", "precision", "'bf16-true'", table="predictions"),
        ("export", "check"),
        "has fingerprint",
    ),
    "confirmation: no JSON": (
        set_json("result", "{", table="confirmations", where="ordinal = 1"),
        ("export", "check"),
        "",
    ),
    "confirmation: nothing in it": (
        set_json("result", "{}", table="confirmations", where="ordinal = 1"),
        ("export", "check"),
        "confirmation 1",
    ),
    "confirmation: one less": (
        by_hand("DELETE FROM autotune_confirmations WHERE ordinal = 2"),
        ("export", "check"),
        "confirmation 2 of study 'by-hand' is missing",
    ),
}


@pytest.mark.parametrize(
    ("damage", "command"), [(one, command) for one in CASES for command in CASES[one][1]]
)
def test_the_error_for_damage_names_the_file_and_what_to_do(file, run, damage, command):
    change, _, named = CASES[damage]
    change(file)
    code, out, said = run(command)
    lines = said.splitlines()
    assert (code, [line.partition(": ")[0] for line in lines]) == (2, ["error", "hint"]), said
    assert file.name in lines[0]
    if command != "check" and named:
        assert named in lines[0]
    if out:
        assert command in (
            "check",
            "export",
        )  # what was found; lines without an end, which no import takes
        assert '"kind": "end"' not in out


@pytest.mark.parametrize("name", ["../../outside", "/any/project", "..", ".waiting-1", "a b"])
def test_a_study_name_that_cannot_name_a_folder_is_rejected(file, name):
    by_hand(f"UPDATE autotune_studies SET name = '{name}'")(file)
    with (
        open_store(f"sqlite:///{file}", create=False) as store,
        pytest.raises(StorageUnavailable) as refused,
    ):
        store.definition(name)
    assert (
        f"study {name!r} cannot be read: {name!r} cannot be a study's name" in refused.value.message
    )


@pytest.fixture(scope="module")
def said_of_the_whole(whole):
    return seen(whole)


def seen(file):
    """Everything that is read of the study."""
    url = f"sqlite:///{file}"
    view = autotune.api.view("by-hand", storage=url)
    with open_store(url, create=False) as store:
        rows = read_studies(store.database, ["by-hand"])
        confirmations = store.confirmations("by-hand")
    result = view.result
    return result.trials, result.front, view.definition, view.forecasts, confirmations, rows


def seen_or_refused(file, see=seen):
    try:
        return see(file)
    except (StorageUnavailable, UnknownStudy) as error:
        return error


PAGES = range(1, 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    "content", [bytes(PAGE_BYTES), b"\xa5" * PAGE_BYTES], ids=["zeros", "garbage"]
)
@pytest.mark.parametrize("page", PAGES)
def test_an_overwritten_page_is_rejected_or_contained_nothing_that_is_read(
    file, said_of_the_whole, page, content
):
    text = file.read_bytes()
    assert len(text) > page * PAGE_BYTES
    file.write_bytes(text[: page * PAGE_BYTES] + content + text[(page + 1) * PAGE_BYTES :])
    found = seen_or_refused(file)
    if isinstance(found, AutotuneError):
        assert found.hint
        assert file.name in found.message
    else:
        assert found == said_of_the_whole


@pytest.mark.parametrize("page", PAGES[::3])
def test_a_page_of_zeros_is_found_by_a_check(file, page):
    text = file.read_bytes()
    file.write_bytes(
        text[: page * PAGE_BYTES] + bytes(PAGE_BYTES) + text[(page + 1) * PAGE_BYTES :]
    )
    found = seen_or_refused(file, lambda file: check_studies(f"sqlite:///{file}").faults)
    assert file.name in found.message if isinstance(found, AutotuneError) else found > 0


def test_a_log_that_is_none_changes_nothing(file, said_of_the_whole):
    file.with_name("autotune.db-wal").write_bytes(b"these are my notes\n" * 1000)
    assert seen(file) == said_of_the_whole


def test_a_log_that_was_cut_loses_no_more_than_what_was_cut_off(file, said_of_the_whole):
    log = file.with_name("autotune.db-wal")
    with open_store(f"sqlite:///{file}") as store:
        keep(store, config(6), measured(device_bytes=CAP_BYTES))
        content = log.read_bytes()
        whole = file.read_bytes()
    file.write_bytes(whole)
    log.write_bytes(content[: len(content) // 3])
    trials, *_ = seen(file)
    assert trials[: len(said_of_the_whole[0])] == said_of_the_whole[0]


def test_a_new_study_never_gets_the_trials_of_a_deleted_one(file):
    by_hand("DELETE FROM autotune_studies")(file)
    error_of = pytest.raises(
        StorageUnavailable, match="that refer to missing rows of autotune_studies"
    )
    with error_of as raised, open_store(f"sqlite:///{file}"):
        pass
    assert "autotune studies check" in raised.value.hint


def test_two_that_make_a_database_at_once_make_one(tmp_path):
    url = f"sqlite:///{tmp_path}/new/autotune.db"
    with open_store(url) as one, open_store(url) as two:
        one.create_study(definition(), trials_wanted=1)
        assert two.names() == ["by-hand"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["autotune.db"]


def test_a_database_behind_a_link_is_the_one_it_leads_to(tmp_path):
    (tmp_path / "link.db").symlink_to(tmp_path / "real.db")
    with open_store(f"sqlite:///{tmp_path}/real.db") as store:
        store.create_study(definition(), trials_wanted=3)
        assert check_studies(f"sqlite:///{tmp_path}/link.db").studies == ("by-hand",)
    assert find_work_folder(f"sqlite:///{tmp_path}/link.db") == find_work_folder(
        f"sqlite:///{tmp_path}/real.db"
    )


def test_a_database_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.db")
    with pytest.raises(StorageUnavailable, match="is not a regular file"):
        Database(f"sqlite:///{tmp_path / 'pipe.db'}")


@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-journal"])
def test_nothing_is_written_behind_a_link_next_to_a_database(suffix, file):
    theirs = file.with_name("theirs")
    theirs.write_bytes(b"theirs" * 1000)
    Path(f"{file}{suffix}").symlink_to(theirs)
    with suppress(StorageUnavailable), open_store(f"sqlite:///{file}") as store:
        keep(store, config(6), measured())
    assert theirs.read_bytes() == b"theirs" * 1000


def test_databases_whose_names_differ_have_different_work_folders():
    assert (
        len(
            {
                find_work_folder(f"sqlite:///studies/{name}")
                for name in ("a", "a.sqlite", "a.sqlite3", "b.db")
            }
        )
        == 4
    )


def test_a_database_that_another_process_has_locked_is_there_and_worth_waiting_for(tmp_path):
    url = f"sqlite:///{tmp_path}/autotune.db"
    Database(url, create=True).close()
    with closing(sqlite3.connect(tmp_path / "autotune.db")) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StorageBusy):
            StudyStore(url, create=True, busy_timeout_seconds=0.1)


def test_a_database_that_was_reached_before_is_away_and_another_is_unavailable(postgres_url):
    url = f"{postgres_url.rsplit('/', 1)[0]}/not-there"
    for was_reached in (False, True):
        with pytest.raises(StorageUnavailable) as raised:
            StudyStore(url, create=True, was_reached=was_reached)
        assert isinstance(raised.value, StorageUnreachable) is was_reached
