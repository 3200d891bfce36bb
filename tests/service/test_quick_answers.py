"""Answers to quick questions come from processes that run a user's model, which writes anything."""

import asyncio
import json
from pathlib import Path

import pytest

from autotune.errors import InvalidInput, PreparationFailed
from autotune.service import quick
from autotune.service.quick import MalformedAnswer, QuickAnswers, read_answer


def test_an_answer_is_returned():
    assert read_answer(b'{"answer": {"peak": 3}}') == {"peak": 3}


def test_an_error_is_raised_as_what_it_was():
    error = {"error": "no such model", "hint": "choose another", "kind": "InvalidInput"}
    with pytest.raises(InvalidInput, match="no such model"):
        read_answer(json.dumps(error).encode())


def test_an_error_of_an_unknown_kind_is_one_all_the_same():
    with pytest.raises(PreparationFailed, match="x"):
        read_answer(b'{"error": "x", "hint": "", "kind": "SystemExit"}')


@pytest.mark.parametrize(
    "output",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"answer": null}',
        b'{"answer": [1]}',
        b'{"answer": {"x": NaN}}',
        b'{"answer": {"x": "\\ud800"}}',
        b'{"error": null}',
        b'{"error": "x"}',
        b'{"error": "x", "hint": 3, "kind": []}',
        b'hello {"answer": {}}',
        b"\xff",
        b"[" * 10**6,
        b'{"answer": ' + b"9" * 9999 + b"}",
        b" " * (quick._LONGEST_ANSWER_BYTES + 1),
    ],
    ids=lambda output: repr(output[:40]),
)
def test_anything_else_is_malformed(output):
    with pytest.raises(MalformedAnswer):
        read_answer(output)


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """ask("print(3)") is what the service makes of a process that does so."""

    def answer(program, *, seconds=60.0):
        (tmp_path / "quick_program.py").write_text(f"import os, sys, time\n{program}\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return asyncio.run(_asked(QuickAnswers(tmp_path, seconds=seconds, module="quick_program")))

    return answer


async def _asked(answers):
    try:
        return await answers.ask("predict", {})
    finally:
        await asyncio.sleep(0.1)  # the loop sees that the pipes of killed processes are closed


def test_output_without_end_ends_its_process_and_is_no_answer(ask):
    with pytest.raises(PreparationFailed, match="longer than"):
        ask("while True: os.write(1, b' ' * 65536)")


def test_a_process_that_writes_null_is_no_answer(ask):
    with pytest.raises(PreparationFailed, match="without an answer"):
        ask("print('null')")


def test_a_process_that_is_killed_leaves_no_temporary_file(ask, tmp_path):
    with pytest.raises(PreparationFailed, match="longer than"):
        ask(f"""import tempfile
open({str(tmp_path / "made")!r}, "w").write(tempfile.mkdtemp())
while True: os.write(1, b' ' * 65536)""")
    made = Path((tmp_path / "made").read_text())
    assert tmp_path in made.parents
    assert not made.exists()
    assert not [*tmp_path.glob(".*")]


@pytest.mark.slow
def test_a_process_that_leaves_its_pipe_to_another_is_no_answer(ask):
    with pytest.raises(PreparationFailed, match="took longer"):
        ask("if os.fork() == 0: time.sleep(600)", seconds=2.0)
