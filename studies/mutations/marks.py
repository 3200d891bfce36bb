"""Notes which test runs which place: `mark` stands at each place, a plugin of pytest notes times.

A place may run in a process that a test forked or started; so a mark is attributed to the test in
whose time it was written. One test runs at a time.
"""

import json
import os
import time
from collections.abc import Generator
from typing import Any

import pytest

_SEEN: set[tuple[int, int, str]] = set()


def mark(places: list[int]) -> None:
    """Note that places have run, once for each process and phase of a test."""
    key = (places[0], os.getpid(), os.environ.get("PYTEST_CURRENT_TEST", ""))
    if key in _SEEN:
        return
    _SEEN.add(key)
    _write("marks", {"places": places, "time": time.monotonic()})


def _write(kind: str, line: dict[str, object]) -> None:
    folder = os.environ.get("MUTATION_MARKS")
    if folder is None:
        return
    with open(os.path.join(folder, f"{kind}.jsonl"), "a") as file:
        file.write(json.dumps(line) + "\n")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, None]:
    """Note when each phase of a test began and ended."""
    outcome = yield
    _write(
        "tests",
        {
            "test": item.nodeid,
            "phase": call.when,
            "outcome": outcome.get_result().outcome,
            "began": time.monotonic() - call.duration,
            "ended": time.monotonic(),
        },
    )
