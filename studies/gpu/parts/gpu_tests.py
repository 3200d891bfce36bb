"""Part 2: tests that need a GPU and are not slow, in one process, each result stored at once."""

import importlib.util
import json
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from studies.gpu.items import Item, Missing, Part, Place, Settings, TimeIsUp
from studies.gpu.outcomes import finished
from studies.gpu.processes import ROOT, CommandFailed, Ended, run

NEEDED = ("pytest", "hypothesis")
LEAST_SECONDS = 45.0
LATEST_TEST_SECONDS = 30.0
"""No test begins when less is left."""
TESTS = ROOT / "tests"
STAND_IN = "stand_in_gpu"
"""Tests of what only a stand-in can do: several devices, an intruder, a lost device."""


def items(settings: Settings) -> list[Item]:
    return [Item(name="tests", work=_run_tests, least_seconds=LEAST_SECONDS)]


def files() -> list[Path]:
    """Those that have a test for a GPU: the others need not be imported."""
    found = [
        file
        for file in sorted(TESTS.rglob("test_*.py"))
        if "mark.gpu" in file.read_text(encoding="utf-8")
    ]
    return [file for file in found if STAND_IN not in file.parts]


def _run_tests(place: Place) -> Mapping[str, Any]:
    place.needs_cuda()
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        raise Missing(f"needs {' and '.join(missing)}")
    kept = place.folder / "tests.jsonl"
    while True:
        before = len(result_of(kept)["open"])
        ended = _run_pytest(place, kept)
        result = result_of(kept)
        if not result["tests"]:
            raise CommandFailed(
                f"pytest ended with {ended.code}: {ended.output[-2000:]} {ended.log}"
            )
        if not result["open"]:
            return result
        has_time = place.clock.left() > LEAST_SECONDS
        if not has_time or (before and len(result["open"]) == before):
            raise TimeIsUp(result)
        # A test has ended the whole process: the others run in another one.


def _run_pytest(place: Place, kept: Path) -> Ended:
    until = time.time() + place.clock.left() - LATEST_TEST_SECONDS
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu and not slow",
        "-p",
        "studies.gpu.programs.kept_tests",
        "-p",
        "no:cacheprovider",
    ]
    words += [
        "--continue-on-collection-errors",
        f"--rootdir={ROOT}",
        "-c",
        str(ROOT / "pyproject.toml"),
        *map(str, files()),
    ]
    extra = {"KEPT_TESTS_FILE": str(kept), "KEPT_TESTS_UNTIL": str(until)}
    ended = run(words, place=place, log_name="pytest", folder=ROOT, extra=extra)
    (place.folder / "logs" / "pytest-output.log").write_text(ended.output)
    return ended


def result_of(kept: Path) -> dict[str, Any]:
    ended = finished(kept)
    collected_file = kept.with_suffix(".collected.json")
    collected = json.loads(collected_file.read_text()) if collected_file.exists() else []
    return {
        "tests": len(collected),
        "open": [test for test in collected if test not in ended],
        "results": {test: line for test, line in ended.items() if line["outcome"] != "passed"},
        "passed": [test for test, line in ended.items() if line["outcome"] == "passed"],
    }


def summary(results: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    found = results.get("tests")
    if not found:
        return
    outcomes = [line["outcome"] for line in found["results"].values()]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in sorted(set(outcomes)))
    yield (
        f"{found['tests']} tests: {len(found['passed'])} passed, {counts or 'no other'}, "
        f"{len(found['open'])} open"
    )
    for test, line in found["results"].items():
        if line["outcome"] != "skipped":
            last = line["message"].strip().splitlines()[-1:] or [""]
            yield f"{line['outcome']}: {test}: {last[0][:200]}"


PART = Part(
    name="tests",
    minutes=6.0,
    about="tests that need a GPU, not the slow ones",
    items=items,
    summary=summary,
)
