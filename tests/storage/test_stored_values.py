"""What a database or an outbox says is compared with the range of its field."""

import json
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.errors import StorageUnavailable
from autotune.spec.attempt import FinishedTrial
from autotune.spec.config import LegalityContext
from autotune.spec.result import TrialRecord
from autotune.spec.search_space import bind_space
from autotune.storage.rows import DamagedRow, measurement_values, record_from_row, trial_row
from autotune.storage.stored_columns import Unreadable, decode
from autotune.storage.transfer import read_studies
from autotune.study.check import check_studies
from autotune.study.workers.outbox import Outbox, OutboxResult, parse_result, read_result
from tests.building.studies import SPACE, config, keep, measured, open_store, write_study
from tests.building.whole_study import run_command, write_whole_study

BRACKETS = "[" * 100_000
DIGITS = "1" * 5000


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A database with a study of everything, and another study."""
    file = tmp_path_factory.mktemp("whole") / "autotune.db"
    write_whole_study(f"sqlite:///{file}", running=False)
    write_study(f"sqlite:///{file}", [measured(), measured()], name="other")
    return file


@pytest.fixture
def file(whole, tmp_path):
    return Path(shutil.copy(whole, tmp_path / "autotune.db"))


def change(file, statement, *values):
    with closing(sqlite3.connect(file)) as connection, connection:
        assert connection.execute(statement, values).rowcount > 0


def faults(file):
    return [f"{one.where}: {one.what}" for one in check_studies(f"sqlite:///{file}").findings]


def record():
    return TrialRecord(**vars(measured()), number=1, config=config(1))


# -- the database ----------------------------------------------------------------------------------

OF_A_MEASUREMENT = [
    ("peak_memory_bytes", "1" + 300 * "0"),
    ("peak_memory_bytes", "-1"),
    ("peak_memory_bytes", "4611686018427387905"),
    ("device_bytes", "true"),
    ("bytes_by_kind", '{"parameters": -1}'),
    ("alloc_retries", "-1"),
    ("tokens_per_second", "0"),
    ("tokens_per_second", "1e300"),
    ("tokens_per_second", "1" + 400 * "0"),
    ("tokens_per_second_spread", "-0.5"),
    ("perplexity", "0"),
    ("perplexity", "1e305"),
    ("final_loss", "1e308"),
    ("compile_seconds", "1e308"),
    ("startup_seconds", "-1"),
    ("seconds_by_part", '{"training": 1e308}'),
    ("reused_from", '{"number": -1, "study": null}'),
    ("reused_from", '{"number": 1000000000000000000, "study": null}'),
]


@pytest.mark.parametrize(("field", "text"), OF_A_MEASUREMENT)
def test_a_measurement_out_of_range_is_damage(field, text):
    stored = json.dumps({**measurement_values(measured()), field: "HERE"})
    row = SimpleNamespace(**trial_row(record()))
    row.measurement = json.loads(stored.replace('"HERE"', text))
    with pytest.raises(DamagedRow, match=r"^trial 1 cannot be read: ") as raised:
        record_from_row(row, cap_bytes=2**30)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize("number", [-1, 10**18, "1", None])
def test_a_trial_of_no_possible_number_is_damage(number):
    row = SimpleNamespace(**trial_row(record()) | {"number": number})
    with pytest.raises(DamagedRow, match="number is"):
        record_from_row(row, cap_bytes=2**30)


def test_a_trial_that_cannot_be_read_is_named_and_hides_no_other_study(file):
    change(
        file,
        "UPDATE autotune_trials SET measurement = json_set(measurement, '$.device_bytes', -1) "
        "WHERE study_id = 1 AND number = 1",
    )
    said = "trial 1 cannot be read: device_bytes is -1"
    assert faults(file)[0] == f"study 'by-hand': {said}"
    with open_store(f"sqlite:///{file}") as store:
        with pytest.raises(StorageUnavailable, match=said):
            store.trials("by-hand")
        assert len(store.trials("other")) == 2


@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("studies", "workload"),
        ("studies", "space"),
        ("studies", "device"),
        ("studies", "unavailable"),
        ("trials", "config"),
        ("trials", "measurement"),
        ("predictions", "config"),
        ("predictions", "prediction"),
        ("confirmations", "result"),
    ],
)
def test_a_column_that_is_nested_too_deeply_is_one_finding_and_hides_no_other_study(
    file, table, column
):
    first = f"(SELECT min(rowid) FROM autotune_{table} WHERE {column} IS NOT NULL)"
    change(file, f"UPDATE autotune_{table} SET {column} = ? WHERE rowid = {first}", BRACKETS)
    assert len([one for one in faults(file) if f"its {column} is" in one]) == 1
    with open_store(f"sqlite:///{file}") as store:
        assert store.definition("other")[0].name == "other"
        assert len(store.trials("other")) == 2
        assert [entry.name for entry in store.entries()] == ["by-hand", "other"]
        assert read_studies(store.database, ["other"])


def test_a_prediction_that_the_database_cannot_decode_is_named_with_the_trials(file):
    change(file, "UPDATE autotune_predictions SET prediction = '{' WHERE id = 1")
    said = r"prediction \w{12} cannot be read: its prediction is not JSON"
    with (
        open_store(f"sqlite:///{file}") as store,
        pytest.raises(StorageUnavailable, match=said),
    ):
        store.trials("by-hand")


@pytest.mark.parametrize(
    ("table", "column"),
    [("studies", "created_at"), ("trials", "started_at"), ("trials", "finished_at")],
)
def test_a_date_that_is_none_is_one_finding_and_hides_no_other_study(file, table, column):
    change(file, f"UPDATE autotune_{table} SET {column} = 'noon' WHERE id = 1")
    assert len([one for one in faults(file) if f"its {column} is not a date: 'noon'" in one]) == 1
    with open_store(f"sqlite:///{file}") as store:
        assert [entry.name for entry in store.entries()] == ["by-hand", "other"]
        assert [summary.name for summary in store.studies()] == ["by-hand", "other"]


def test_a_study_that_cannot_be_read_is_named_after_the_list_of_the_others(
    file, monkeypatch, capsys
):
    change(file, "UPDATE autotune_studies SET created_at = 'noon' WHERE id = 1")
    storage = ["--storage", f"sqlite:///{file}"]
    code, out, said = run_command(monkeypatch, capsys, "studies", *storage)
    assert (code, [line.split()[0] for line in out.splitlines()]) == (2, ["study", "other"])
    assert said.startswith("error: study 'by-hand' cannot be listed: ")


def test_outcomes_are_counted_without_a_trial_that_cannot_be_decoded(file):
    with open_store(f"sqlite:///{file}") as store:
        before = store.outcomes()
        change(file, "UPDATE autotune_trials SET measurement = '{' WHERE id = 1")
        assert store.outcomes() == before | {"ok": before["ok"] - 1}


@pytest.mark.parametrize("text", [BRACKETS, DIGITS, "{", "", b"\xff", 3])
def test_a_text_that_cannot_be_decoded_is_one_value(text):
    assert isinstance(decode(text), Unreadable)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("cap_bytes", 2**63 - 1, "cap_bytes is 9223372036854775807"),
        ("cap_bytes", -1, "cap_bytes is -1"),
        ("seed", -1, "seed is -1"),
        ("trials_wanted", 10**18, "trials_wanted is 1000000000000000000"),
        ("trials_wanted", -1, "trials_wanted is -1"),
    ],
)
def test_a_number_of_a_study_out_of_range_is_found(file, column, value, said):
    change(file, f"UPDATE autotune_studies SET {column} = ? WHERE id = 1", value)
    assert any(one.endswith(said) for one in faults(file))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("$.device", "../../x", "'../../x' is not a device"),
        ("$.total_memory_bytes", -1, "total_memory_bytes is -1"),
        ("$.context_bytes", 2**63 - 1, "context_bytes is 9223372036854775807"),
    ],
)
def test_a_device_that_is_none_is_found(file, path, value, said):
    statement = "UPDATE autotune_studies SET device = json_set(device, ?, ?) WHERE id = 1"
    change(file, statement, path, value)
    assert any(said in one for one in faults(file))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("$.techniques.micro_batch_size", "[0]"),
        ("$.techniques.memory_budget", "[1e308]"),
        ("$.techniques.precision", '[["fp32"]]'),
        ("$.techniques.colour", '["red"]'),
        ("$.defaults.micro_batch_size", "-1"),
        ("$.conditions[0].then.checkpointing", "[[]]"),
        ("$.configurations[0].name", "3"),
        ("$.workload.model_config", "[" * 200 + "]" * 200),
    ],
)
def test_a_space_that_no_file_could_describe_is_found(file, path, value):
    statement = "UPDATE autotune_studies SET space = json_set(space, ?, json(?)) WHERE id = 1"
    change(file, statement, path, value)
    assert any(one.startswith("study 'by-hand': study 'by-hand' cannot") for one in faults(file))


def test_the_largest_batch_has_its_divisors_at_once():
    legal = bind_space(SPACE, LegalityContext(global_batch=2**31 - 1), unavailable={})
    assert legal.values["micro_batch_size"] == (2**31 - 1, 1)


@pytest.mark.parametrize(
    "change_of_row",
    ["worker = x'00ff'", "renewals = -1", "renewals = 'often'"],
)
def test_a_running_attempt_that_no_release_has_written_is_named(file, change_of_row):
    with open_store(f"sqlite:///{file}") as store:
        keep(store, config(5))
        change(file, f"UPDATE autotune_attempts SET {change_of_row} WHERE state = 'running'")
        with pytest.raises(StorageUnavailable, match="a running attempt at trial 5 cannot be read"):
            store.attempts.running("by-hand")


def test_what_could_not_be_read_again_is_not_stored(file):
    impossible = measured(
        tokens_per_second=0.0,
        tokens_per_second_spread=1e300,
        alloc_retries=-1,
        bytes_by_kind={"parameters": 4, "buffers": -4},
    )
    with open_store(f"sqlite:///{file}") as store:
        keep(store, config(7), impossible)
        record = store.trials("by-hand")[-1]
    assert (record.tokens_per_second, record.tokens_per_second_spread) == (None, None)
    assert (record.alloc_retries, record.bytes_by_kind) == (None, {"parameters": 4})


# -- an outbox -------------------------------------------------------------------------------------


@pytest.fixture
def waiting(tmp_path):
    finished = FinishedTrial(measurement=measured(), seconds=1.0)
    Outbox(tmp_path).put(OutboxResult(attempt_id="a" * 32, number=0, finished=finished))
    return tmp_path / f"{'a' * 32}.json"


def test_a_whole_result_is_read(waiting):
    assert read_result(waiting) == parse_result(waiting.read_bytes(), result_id=waiting.stem)
    assert read_result(waiting) is not None


@pytest.mark.parametrize(
    "values",
    [
        {"number": -1},
        {"number": 10**18},
        {"seconds": 1e308},
        {"seconds": -1},
        {"attempt_id": ["a"]},
        {"measurement": {**json.loads("{}"), "outcome": "ok"}},
    ],
)
def test_a_result_out_of_range_is_not_delivered(waiting, values):
    content = {**json.loads(waiting.read_text()), **values}
    assert parse_result(json.dumps(content).encode(), result_id=waiting.stem) is None


@pytest.mark.parametrize("content", [b"\xff", b"3", b"null", b"[" * 10**5, DIGITS.encode(), b""])
def test_a_file_that_is_no_result_is_not_delivered(content):
    assert parse_result(content, result_id="a" * 32) is None


def test_a_result_of_a_name_that_is_a_path_is_not_delivered(waiting):
    content = json.loads(waiting.read_text()) | {"attempt_id": ".."}
    assert parse_result(json.dumps(content).encode(), result_id="..") is None


def test_a_link_or_a_pipe_in_an_outbox_is_not_read(waiting):
    linked, pipe = (waiting.with_name(f"{letter * 32}.json") for letter in "bc")
    linked.symlink_to(waiting)
    os.mkfifo(pipe)
    assert [entry.id for entry in Outbox(waiting.parent).waiting()] == ["a" * 32]
