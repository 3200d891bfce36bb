"""What is kept of tests: a file with one JSON object a line, `begun` before each test and its outcome after."""

import json
from pathlib import Path
from typing import Any

MOST_BEGINNINGS = 2
"""A test that was begun so often and has no outcome ends the process, or never ends itself."""


def lines_of(file: Path) -> list[dict[str, Any]]:
    """All that is kept; half a line, of a process that was killed, is none."""
    found = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def finished(file: Path) -> dict[str, dict[str, Any]]:
    """{test: its result}; one that was begun twice and has none is `lost`."""
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
