"""`studies check`: what it finds in a database and next to it, and that it changes nothing."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import update

from autotune.errors import UnknownStudy
from autotune.spec.attempt import FinishedTrial
from autotune.storage.tables import ATTEMPTS
from autotune.study.check import check_studies
from autotune.study.workers.outbox import OUTBOX_FOLDER, Outbox, OutboxConfirmation, OutboxResult
from tests.building.studies import config, definition, keep, measured, open_store
from tests.building.whole_study import CONFIRMATIONS, TRIALS, run_command, write_whole_study


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A database with a study of everything; nobody has it open."""
    file = tmp_path_factory.mktemp("whole") / "autotune.db"
    write_whole_study(f"sqlite:///{file}")
    return file


@pytest.fixture
def file(whole, tmp_path):
    return Path(shutil.copy(whole, tmp_path / "autotune.db"))


def change(file, *statements):
    """By hand, as with SQLite's shell, which does not enforce foreign keys."""
    with closing(sqlite3.connect(file)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def findings(file, *, faults=True):
    found = check_studies(f"sqlite:///{file}").findings
    return [f"{one.where}: {one.what}" for one in found if one.is_fault is faults]


# -- whole -----------------------------------------------------------------------------------------


def test_a_study_with_one_of_everything_is_whole(store_url):
    write_whole_study(store_url)
    checked = check_studies(store_url)
    assert (checked.studies, checked.trials, checked.faults) == (("by-hand",), TRIALS, 0)


def test_looking_changes_no_file(file):
    before = {path.name: path.read_bytes() for path in file.parent.iterdir()}
    check_studies(f"sqlite:///{file}")
    assert {path.name: path.read_bytes() for path in file.parent.iterdir()} == before


def test_looking_writes_nothing_while_a_search_has_the_database_open(file):
    with open_store(f"sqlite:///{file}") as store:
        keep(store, config(6), measured())
        log = file.with_name("autotune.db-wal")
        before = file.read_bytes(), log.read_bytes()
        assert check_studies(f"sqlite:///{file}").trials == TRIALS + 1
        assert (file.read_bytes(), log.read_bytes()) == before


def test_a_study_that_is_called_by_a_path_is_found_and_nothing_is_looked_at_there(file):
    waiting = file.parent / "outside" / OUTBOX_FOLDER / "secret.json"
    waiting.parent.mkdir(parents=True)
    waiting.write_text("{")
    (file.parent / "work" / "autotune").mkdir(parents=True)
    change(file, "UPDATE autotune_studies SET name = '../../outside'")
    found = findings(file)
    assert [one for one in found if "'../../outside' cannot be a study's name" in one]
    assert [one for one in found if "secret" in one] == []


def test_a_study_that_is_not_there_cannot_be_looked_at(file):
    with pytest.raises(UnknownStudy, match="no study 'nope'"):
        check_studies(f"sqlite:///{file}", ["nope"])


def test_only_the_studies_that_were_named_are_looked_at(file):
    with open_store(f"sqlite:///{file}") as store:
        store.create_study(definition("other"), trials_wanted=1)
    assert check_studies(f"sqlite:///{file}", ["other"]).studies == ("other",)


# -- the database ----------------------------------------------------------------------------------

RESULTS = [
    ("result = '[1]' WHERE ordinal = 1", "confirmation 1 cannot be read: confirmation is [1]"),
    (
        "result = json_set(result, '$.kind', 'guess') WHERE ordinal = 1",
        "confirmation 1 cannot be read: there is no kind 'guess' of confirmation",
    ),
    (
        "result = json_remove(result, '$.kind') WHERE ordinal = 1",
        "there is no kind None of confirmation",
    ),
    ("result = json_remove(result, '$.seconds') WHERE ordinal = 1", "'seconds'"),
    ("result = json_set(result, '$.colour', 'red') WHERE ordinal = 1", "'colour'"),
    ("result = json_set(result, '$.rounds', 'many') WHERE ordinal = 1", "rounds is 'many'"),
    (
        "result = json_set(result, '$.schedule', 'at once') WHERE ordinal = 1",
        "schedule is 'at once'",
    ),
    ("result = json_set(result, '$.config.precision', 'fp77') WHERE ordinal = 1", "'fp77'"),
    ("result = json_set(result, '$.partner', json('[1]')) WHERE ordinal = 1", "confirmation 1"),
    (
        "result = json_set(result, '$.speed_ratio', -1.5) WHERE ordinal = 1",
        "confirmation 1 cannot be read: speed_ratio is -1.5",
    ),
    (
        "result = replace(result, '990.0', 'Infinity') WHERE ordinal = 1",
        "partner_tokens_per_second is inf",
    ),
    ("result = replace(result, '21.5', 'NaN') WHERE ordinal = 4", "perplexity is nan"),
    ("result = json_set(result, '$.seconds', -1) WHERE ordinal = 3", "seconds is -1"),
    (
        "result = json_set(result, '$.measurement', 3) WHERE ordinal = 6",
        "confirmation 6 cannot be read: measurement is 3",
    ),
    (
        "result = json_set(result, '$.measurement.outcome', 'splendid') WHERE ordinal = 6",
        "outcome is 'splendid'",
    ),
]
"""Changes to a confirmation, and what a check says."""


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        (
            "DELETE FROM autotune_studies",
            "autotune_trials has 6 rows that refer to missing rows of autotune_studies",
        ),
        (
            "DELETE FROM autotune_studies",
            "autotune_confirmations has 6 rows that refer to missing rows of autotune_studies",
        ),
        (
            "DELETE FROM autotune_trials WHERE number = 1",
            "autotune_attempts has 2 rows that refer to missing rows of",
        ),
        (
            "DELETE FROM autotune_trials WHERE number = 1",
            "study 'by-hand': has 5 trials, but not one for every",
        ),
        ("UPDATE autotune_trials SET number = 77 WHERE number = 3", "but not one for every number"),
        (
            "UPDATE autotune_attempts SET state = 'idle' WHERE trial_id = 5",
            "attempt 1 cannot be read: there is no state 'idle'",
        ),
        (
            "UPDATE autotune_attempts SET measurement = '[]' WHERE state = 'late'",
            "attempt 1 cannot be read: measurement is []",
        ),
        (
            "UPDATE autotune_trials SET fingerprint = 'abcdefabcdef' WHERE number = 0",
            "not abcdefabcdef",
        ),
        (
            "UPDATE autotune_trials SET config = '{\"a\"' WHERE number = 0",
            "study 'by-hand': trial 0 cannot be read: its config is not JSON",
        ),
        ("UPDATE autotune_trials SET config = '[]' WHERE number = 0", "trial 0"),
        (
            "UPDATE autotune_trials SET measurement = '{}' WHERE number = 0",
            "it has no 'perplexity'",
        ),
        (
            "UPDATE autotune_trials SET started_at = 'noon' WHERE number = 0",
            "study 'by-hand': trial 0 cannot be read: its started_at is not a date",
        ),
        (
            "UPDATE autotune_predictions SET prediction = '{}' WHERE id = 1",
            "study 'by-hand': prediction",
        ),
        (
            "UPDATE autotune_studies SET space = '{}'",
            "study 'by-hand' cannot be read: it has no 'space.name'",
        ),
        ("UPDATE autotune_studies SET sampler = 'guess'", "sampler is 'guess'"),
        ("UPDATE autotune_studies SET schema_version = 99", "has schema 99, this autotune reads 4"),
        (
            "UPDATE autotune_confirmations SET ordinal = 7 WHERE ordinal = 2",
            "study 'by-hand': has 6 confirmations, but not one for every number",
        ),
        (
            "UPDATE autotune_confirmations SET ordinal = 'first' WHERE ordinal = 1",
            "study 'by-hand': confirmation 'first' cannot be read: ordinal is 'first'",
        ),
        (
            "UPDATE autotune_confirmations SET fingerprint = 'abcdefabcdef' WHERE ordinal = 1",
            "confirmation 1 cannot be read: its configuration has fingerprint",
        ),
        (
            "UPDATE autotune_confirmations SET result = '{' WHERE ordinal = 1",
            "study 'by-hand': confirmation 1 cannot be read: its result is not JSON",
        ),
        (
            "UPDATE autotune_confirmations SET created_at = 'noon' WHERE ordinal = 1",
            "study 'by-hand': confirmation 1 cannot be read: its created_at is not a date",
        ),
        *((f"UPDATE autotune_confirmations SET {change}", found) for change, found in RESULTS),
        ("DROP TABLE autotune_trials", "no such table: autotune_trials"),
    ],
)
def test_what_was_changed_by_hand_is_found(file, statement, found):
    change(file, statement)
    said = findings(file)
    assert any(found in line for line in said), said


def test_a_row_that_cannot_be_read_hides_no_other(file):
    change(file, "UPDATE autotune_trials SET config = 'x' WHERE number IN (1, 3)")
    said = findings(file)
    reason = "cannot be read: its config is not JSON: Expecting value: line 1 column 1 (char 0)"
    assert said == [f"study 'by-hand': trial {number} {reason}" for number in (1, 3)]


def test_damage_is_found_on_postgresql_too(postgres_url):
    write_whole_study(postgres_url)
    with open_store(postgres_url) as store, store._database.writing() as connection:
        connection.execute(
            update(ATTEMPTS).where(ATTEMPTS.c.state == "finished").values(state="idle")
        )
    assert check_studies(postgres_url).faults == 4


# -- beside it -------------------------------------------------------------------------------------


@pytest.fixture
def work(file):
    return file.parent / "work" / "autotune" / "by-hand"


def waiting(work):
    outbox = Outbox(work / OUTBOX_FOLDER)
    for letter in "ab":
        finished = FinishedTrial(measurement=measured(), seconds=1.0)
        outbox.put(OutboxResult(attempt_id=letter * 32, number=0, finished=finished))


def test_waiting_results_are_reported_with_who_delivers_them_and_stay(file, work):
    waiting(work)
    found = [one for one in check_studies(f"sqlite:///{file}").findings if "wait in" in one.what]
    assert [(one.what.split()[0], one.is_fault) for one in found] == [("2", False)]
    assert found[0].to_do == "the next autotune search --name by-hand delivers them"
    assert len(list((work / OUTBOX_FOLDER).glob("*.json"))) == 2


def test_a_confirmation_that_waits_is_reported_as_a_finished_result(file, work):
    confirmation = OutboxConfirmation(id="c" * 32, study_begun="", confirmation=CONFIRMATIONS[0])
    Outbox(work / OUTBOX_FOLDER).put(confirmation)
    (found,) = [one for one in findings(file, faults=False) if "wait" in one]
    waiting_file = work / OUTBOX_FOLDER / f"{confirmation.id}.json"
    assert found.endswith(f"the finished result {waiting_file} waits")


def test_a_file_in_the_outbox_that_is_not_a_result_is_reported_and_unchanged(file, work):
    waiting(work)
    broken = work / OUTBOX_FOLDER / f"{'c' * 32}.json"
    broken.write_text("{")
    assert findings(file) == [f"study 'by-hand': {broken} is not a complete result"]
    assert broken.exists()


def test_a_result_that_no_database_accepted_is_reported(file, work):
    waiting(work)
    Outbox(work / OUTBOX_FOLDER).deliver(lambda _: "unknown")
    assert len([line for line in findings(file, faults=False) if ".unknown" in line]) == 2


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def run(file, monkeypatch, capsys):
    monkeypatch.chdir(file.parent)
    storage = ["--storage", "sqlite:///autotune.db"]
    return lambda *arguments: run_command(monkeypatch, capsys, "studies", *arguments, *storage)


def test_a_whole_database_ends_with_its_size(run):
    code, out, said = run("check")
    assert (code, out.splitlines()[-1], said) == (0, "1 study, 6 trials: no faults", "")


def test_a_damaged_database_ends_with_an_error_after_what_was_found(run, file):
    change(file, "UPDATE autotune_trials SET config = '[]' WHERE number = 0")
    code, out, said = run("check", "by-hand")
    assert code == 2
    assert "trial 0" in out.splitlines()[0]
    assert (
        said.splitlines()[0]
        == "error: the studies database sqlite:///autotune.db has a fault (1 study, 6 trials)"
    )
    assert said.splitlines()[1].startswith("hint: ")


def test_the_storage_option_may_come_before_the_command(file, monkeypatch, capsys):
    monkeypatch.chdir("/")
    code, out, _ = run_command(
        monkeypatch, capsys, "studies", "--storage", f"sqlite:///{file}", "check"
    )
    assert (code, out.splitlines()[-1]) == (0, "1 study, 6 trials: no faults")
