"""Results of tests: a file of JSON lines, `begun` before each test and its outcome after it."""

import json
from pathlib import Path
from typing import Any

MOST_BEGINNINGS = 2
"""A test that began so often without an outcome kills the process or hangs."""


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Returns all entries, without incomplete lines of a process that was killed."""
    found = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def finished(file: Path) -> dict[str, dict[str, Any]]:
    """Returns {test: result}; a test that began twice without a result is `lost`."""
    results: dict[str, dict[str, Any]] = {}
    begun: dict[str, int] = {}
    for line in lines_of(file):
        if line["outcome"] == "begun":
            begun[line["test"]] = begun.get(line["test"], 0) + 1
        else:
            results[line["test"]] = line
    for test, times in begun.items():
        if test not in results and times >= MOST_BEGINNINGS:
            results[test] = {
                "test": test,
                "outcome": "lost",
                "message": f"begun {times} times and never ended",
            }
    return results
