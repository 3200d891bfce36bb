"""The outbox of results: on disk before the database, delivered once, never silently dropped."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.spec.attempt import FinishedTrial
from autotune.spec.provenance import TrialReference
from autotune.study.workers.outbox import Outbox, OutboxConfirmation, OutboxResult
from tests.building.studies import measured
from tests.building.whole_study import CONFIRMATIONS


def result(number=0, *, attempt_id="a" * 32, **changes):
    finished = FinishedTrial(measurement=measured(**changes), seconds=2.5)
    return OutboxResult(attempt_id=attempt_id, number=number, finished=finished)


@pytest.fixture
def outbox(tmp_path):
    return Outbox(tmp_path / "spool")


def test_a_result_comes_back_as_it_was_put(outbox):
    outbox.put(result(perplexity=17.125))
    assert list(outbox.waiting()) == [result(perplexity=17.125)]


def confirmed(confirmation):
    return OutboxConfirmation(
        id="c" * 32, study_begun="2026-11-23T00:00:00.000000", confirmation=confirmation
    )


@pytest.mark.parametrize("confirmation", CONFIRMATIONS, ids=lambda one: one.kind)
def test_a_confirmation_comes_back_as_it_was_put(outbox, confirmation):
    outbox.put(confirmed(confirmation))
    assert list(outbox.waiting()) == [confirmed(confirmation)]


@pytest.mark.parametrize(
    "change",
    [
        {"confirmation": {}},
        {"confirmation": {"kind": "repeated_speed", "config": {"precision": "fp77"}}},
        {"study_begun": 0},
        {"id": "d" * 32},
        {"number": 0},
    ],
    ids=str,
)
def test_a_confirmation_with_values_of_another_kind_is_none(outbox, tmp_path, change):
    outbox.put(confirmed(CONFIRMATIONS[0]))
    (file,) = (tmp_path / "spool").iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert (list(outbox.waiting()), len(outbox.left_over())) == ([], 1)


def test_a_file_of_an_earlier_version_is_a_result(outbox, tmp_path):
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / f"{'b' * 32}.json").write_text(
        '{"attempt_id": "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb", "number": 3, "measurement": '
        '{"outcome": "ok", "peak_memory_bytes": 41943040, "device_bytes": null, '
        '"tokens_per_second": 1000.0, "perplexity": 20.0}, "seconds": 2.5}'
    )
    (waiting,) = outbox.waiting()
    assert (waiting.number, waiting.finished.seconds) == (3, 2.5)
    assert waiting.finished.measurement.peak_memory_bytes == 41943040


def test_an_earlier_version_can_read_a_file(outbox, tmp_path):
    outbox.put(result())
    (file,) = (tmp_path / "spool").iterdir()
    assert list(json.loads(file.read_text())) == ["attempt_id", "number", "measurement", "seconds"]


def test_a_result_of_the_time_of_sentences_is_set_aside(outbox, tmp_path):
    outbox.put(result(reused_from=TrialReference(number=4, study="x")))
    file = tmp_path / "spool" / f"{'a' * 32}.json"
    stored = json.loads(file.read_text())
    stored["measurement"]["reused_from"] = "trial 4 of study 'x'"
    file.write_text(json.dumps(stored))
    assert list(outbox.waiting()) == []
    assert len(outbox.left_over()) == 1


def test_a_result_that_was_removed_waits_no_more(outbox):
    outbox.put(result())
    outbox.settle("a" * 32, "stored")
    assert list(outbox.waiting()) == []


def test_results_are_delivered_in_the_order_they_were_put(outbox):
    for number, letter in enumerate("cab"):
        outbox.put(result(number, attempt_id=letter * 32))
    delivered = []
    outbox.deliver(lambda one: delivered.append(one.number) or "stored")
    assert delivered == [0, 1, 2]


@pytest.mark.parametrize("delivery", ["stored", "known", "late"])
def test_a_delivered_result_is_removed_from_the_outbox(outbox, delivery):
    outbox.put(result())
    outbox.deliver(lambda _: delivery)
    assert (list(outbox.waiting()), outbox.left_over()) == ([], [])


def test_a_result_that_could_not_be_delivered_waits_on(outbox):
    def away(_):
        raise ConnectionError

    outbox.put(result())
    with pytest.raises(ConnectionError):
        outbox.deliver(away)
    assert list(outbox.waiting()) == [result()]


def test_a_result_whose_attempt_the_database_does_not_know_is_set_aside(outbox):
    outbox.put(result())
    outbox.deliver(lambda _: "unknown")
    assert (list(outbox.waiting()), len(outbox.left_over())) == ([], 1)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"attempt_id": "x"}',
        '{"attempt_id": "x", "number": 0, "measurement": 3, "seconds": 1}',
    ],
)
def test_a_file_that_is_not_a_result_is_set_aside_and_hides_no_other(outbox, tmp_path, content):
    outbox.put(result())
    (tmp_path / "spool" / f"{'b' * 32}.json").write_text(content)
    assert list(outbox.waiting()) == [result()]
    assert len(outbox.left_over()) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": "long"},
        {"number": "0"},
        {"attempt_id": "c" * 32},
        {"measurement": {"outcome": "ok", "peak_memory_bytes": "many"}},
        {"measurement": {"outcome": "splendid"}},
    ],
    ids=str,
)
def test_a_result_with_values_of_another_kind_is_none(outbox, tmp_path, change):
    outbox.put(result())
    (file,) = (tmp_path / "spool").iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert (list(outbox.waiting()), len(outbox.left_over())) == ([], 1)


def test_a_file_nested_too_deeply_is_no_result(outbox, tmp_path):
    outbox.put(result())
    (file,) = (tmp_path / "spool").iterdir()
    file.write_text("[" * 100_000)
    assert (list(outbox.waiting()), len(outbox.left_over())) == ([], 1)


def test_a_result_is_there_after_a_sigkill_right_after_it_was_put(tmp_path):
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.study.workers.test_outbox import Outbox, result\n"
        "Outbox(Path(sys.argv[1])).put(result())\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    paths = str(Path(__file__).parents[3])
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "spool")],
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    assert list(Outbox(tmp_path / "spool").waiting()) == [result()]


def test_a_result_that_was_only_half_written_does_not_wait(outbox, tmp_path):
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / f"{'b' * 32}.unfinished").write_text('{"attempt_id"')
    assert list(outbox.waiting()) == []


def test_a_file_that_another_worker_delivers_meanwhile_is_passed_over(outbox):
    for number, letter in enumerate("ab"):
        outbox.put(result(number, attempt_id=letter * 32))
    waiting = outbox.waiting()
    assert next(waiting).number == 0
    outbox.settle("b" * 32, "stored")
    assert list(waiting) == []


def test_two_workers_may_put_the_same_result_aside(outbox):
    outbox.put(result())

    def unknown_to_another_too(_):
        outbox.deliver(lambda _: "unknown")
        return "unknown"

    outbox.deliver(unknown_to_another_too)
    assert len(outbox.left_over()) == 1


def test_what_was_half_written_is_swept_for_the_attempts_named(outbox, tmp_path):
    (tmp_path / "spool").mkdir()
    for letter in "ab":
        (tmp_path / "spool" / f"{letter * 32}.unfinished").touch()
    outbox.sweep({"a" * 32})
    assert outbox.half_written() == {"b" * 32}
