"""Ten ways to hang, all at once: each is ended by its limit, and none leaves a process behind."""

import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[3] / "studies" / "reliability" / "hangs.py"
WORDS = {
    "trial": "no result within 3 s",
    "compile": "compilation took more than 1 s",
    "step": "no step ended within 1 s",
}
SECONDS = {"trial": 3.0, "compile": 1.0, "step": 1.0}


def _study():
    spec = importlib.util.spec_from_file_location("reliability_hangs", FILE)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


study = _study()


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """{kind: what was seen of it}, of all that were run together."""
    with study.runner(tmp_path_factory.mktemp("hangs")) as run:
        futures = {hang: run.submit(hang, seconds=SECONDS[hang.limit]) for hang in study.HANGS}
        for future in futures.values():
            future.result()
        return {
            hang.kind: run.seen(hang, future, limit_seconds=SECONDS[hang.limit])
            for hang, future in futures.items()
        }


def test_there_are_ten_kinds():
    assert len({hang.kind for hang in study.HANGS}) == 10


@pytest.mark.slow
@pytest.mark.parametrize("hang", study.HANGS, ids=lambda hang: hang.kind)
def test_a_trial_that_hangs_is_ended_by_the_limit_it_meets(hang, seen):
    assert seen[hang.kind].outcome == "timeout"
    assert seen[hang.kind].message.startswith(WORDS[hang.limit])
    assert seen[hang.kind].message.endswith(".log")


def test_nothing_is_left_of_them(seen):
    assert {kind: one.processes_left for kind, one in seen.items()} == dict.fromkeys(seen, 0)
