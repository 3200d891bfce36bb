"""Results on their way to the database: on disk before it is asked, delivered once, never silently dropped."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from study_building import measured

from autotune.study.workers.outbox import Spool, SpooledResult


def result(number=0, *, attempt_id="a" * 32, **changes):
    return SpooledResult(
        attempt_id=attempt_id, number=number, measurement=measured(**changes), seconds=2.5
    )


@pytest.fixture
def spool(tmp_path):
    return Spool(tmp_path / "spool")


def test_a_result_comes_back_as_it_was_put(spool):
    spool.put(result(perplexity=17.125))
    assert list(spool.waiting()) == [result(perplexity=17.125)]


def test_a_result_that_was_removed_waits_no_more(spool):
    spool.put(result())
    spool.settle("a" * 32, "kept")
    assert list(spool.waiting()) == []


def test_results_are_delivered_in_the_order_they_were_put(spool):
    for number, letter in enumerate("cab"):
        spool.put(result(number, attempt_id=letter * 32))
    delivered = []
    spool.deliver(lambda one: delivered.append(one.number) or "kept")
    assert delivered == [0, 1, 2]


@pytest.mark.parametrize("delivery", ["kept", "known", "late"])
def test_a_delivered_result_is_gone_from_the_spool(spool, delivery):
    spool.put(result())
    assert spool.deliver(lambda _: delivery) == {0: delivery}
    assert (list(spool.waiting()), spool.left_over()) == ([], [])


def test_a_result_that_could_not_be_delivered_waits_on(spool):
    def away(_):
        raise ConnectionError

    spool.put(result())
    with pytest.raises(ConnectionError):
        spool.deliver(away)
    assert list(spool.waiting()) == [result()]


def test_a_result_whose_attempt_the_database_does_not_know_is_kept_aside(spool):
    spool.put(result())
    spool.deliver(lambda _: "unknown")
    assert (list(spool.waiting()), len(spool.left_over())) == ([], 1)


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
def test_a_file_that_is_no_result_is_kept_aside_and_hides_no_other(spool, tmp_path, content):
    spool.put(result())
    (tmp_path / "spool" / f"{'b' * 32}.json").write_text(content)
    assert list(spool.waiting()) == [result()]
    assert len(spool.left_over()) == 1


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
def test_a_result_with_values_of_another_kind_is_none(spool, tmp_path, change):
    spool.put(result())
    (file,) = (tmp_path / "spool").iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert (list(spool.waiting()), len(spool.left_over())) == ([], 1)


def test_a_file_nested_too_deeply_is_no_result(spool, tmp_path):
    spool.put(result())
    (file,) = (tmp_path / "spool").iterdir()
    file.write_text("[" * 100_000)
    assert (list(spool.waiting()), len(spool.left_over())) == ([], 1)


def test_a_result_is_there_after_a_sigkill_right_after_it_was_put(tmp_path):
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from test_outbox import Spool, result\n"
        "Spool(Path(sys.argv[1])).put(result())\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    paths = os.pathsep.join(map(str, (Path(__file__).parent, Path(__file__).parents[2])))
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "spool")],
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    assert list(Spool(tmp_path / "spool").waiting()) == [result()]


def test_a_result_that_was_only_half_written_does_not_wait(spool, tmp_path):
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / f"{'b' * 32}.unfinished").write_text('{"attempt_id"')
    assert list(spool.waiting()) == []


def test_a_file_that_another_worker_delivers_meanwhile_is_passed_over(spool):
    for number, letter in enumerate("ab"):
        spool.put(result(number, attempt_id=letter * 32))
    waiting = spool.waiting()
    assert next(waiting).number == 0
    spool.settle("b" * 32, "kept")
    assert list(waiting) == []


def test_two_workers_may_put_the_same_result_aside(spool):
    spool.put(result())

    def unknown_to_another_too(_):
        assert spool.deliver(lambda _: "unknown") == {0: "unknown"}
        return "unknown"

    spool.deliver(unknown_to_another_too)
    assert len(spool.left_over()) == 1


def test_what_was_half_written_is_swept_for_the_attempts_named(spool, tmp_path):
    (tmp_path / "spool").mkdir()
    for letter in "ab":
        (tmp_path / "spool" / f"{letter * 32}.unfinished").touch()
    spool.sweep({"a" * 32})
    assert spool.half_written() == {"b" * 32}
