"""Runs every mistake of the table (`tests/cli/mistakes.py`) as a command and measures its time.

    python studies/reliability/bad_input.py > studies/reliability/bad_input.jsonl

Prints one JSON line per mistake: arguments, exit code, seconds, error and hint. `kind` decides its
time limit: 1 second for an argument, 3 where data is read, none where torch is needed. The last
line is the summary, which also names every mistake that was not rejected properly: with exit code
2, one error, one hint, nothing else and no files left.
"""

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from studies.reliability.quick_study import provenance
from tests.cli.mistaken_files import write_files
from tests.cli.mistakes import LATE, all_mistakes, mistakes

LIMIT_SECONDS = {"argument": 1.0, "data": 3.0}
SHOWN = 120
PREPARING = "Finding out what this device can do ..."


def cases() -> Iterator[tuple[str, list[str]]]:
    for arguments in all_mistakes():
        yield "data" if {"--dataset", "--tokenizer"} & set(arguments) else "argument", arguments
    for arguments in mistakes(LATE):
        yield "late", arguments


def run(kind: str, arguments: list[str], folder: Path) -> dict[str, object]:
    before = content_of(folder)
    begun, used = time.perf_counter(), processor_seconds()
    ended = subprocess.run(
        [sys.executable, "-m", "autotune", *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="backslashreplace",
        timeout=300,
        check=False,
    )
    seconds = time.perf_counter() - begun
    said = ended.stderr.replace(str(folder), ".")
    lines = [line for line in said.splitlines() if line != PREPARING]
    left = sorted(content_of(folder) - before)
    heads = [line.partition(": ")[0] for line in lines]
    return {
        "arguments": [ascii(word[:SHOWN])[1:-1] for word in arguments],
        "kind": kind,
        "exit_code": ended.returncode,
        "seconds": round(seconds, 3),
        "processor_seconds": round(processor_seconds() - used, 3),
        "error": next((line[:300] for line in lines if line.startswith("error: ")), ""),
        "hint": next((line[:300] for line in lines if line.startswith("hint: ")), ""),
        "left_behind": left,
        "is_refused": (ended.returncode, ended.stdout, heads, left)
        == (2, "", ["error", "hint"], []),
    }


def processor_seconds() -> float:
    """Of all commands that have ended: what they take however busy the machine is."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def content_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def summary(results: list[dict[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {**provenance(), "cases": len(results)}
    for kind in ("argument", "data", "late"):
        seconds = sorted(float(str(one["seconds"])) for one in results if one["kind"] == kind)
        used = sorted(
            float(str(one["processor_seconds"])) for one in results if one["kind"] == kind
        )
        limit = LIMIT_SECONDS.get(kind)
        found[kind] = {
            "cases": len(seconds),
            "median_seconds": round(statistics.median(seconds), 3),
            "longest_seconds": seconds[-1],
            "median_processor_seconds": round(statistics.median(used), 3),
            "longest_processor_seconds": used[-1],
            **(
                {}
                if limit is None
                else {"limit_seconds": limit, "over": sum(one > limit for one in seconds)}
            ),
        }
    found["not_refused"] = [one["arguments"] for one in results if not one["is_refused"]]
    slowest = sorted(results, key=lambda one: -float(str(one["seconds"])))[:10]
    found["slowest"] = [[one["seconds"], " ".join(map(str, one["arguments"]))] for one in slowest]
    return found


def main() -> None:
    results = []
    with TemporaryDirectory() as name:
        write_files(Path(name))
        for kind, arguments in cases():
            results.append(run(kind, arguments, Path(name)))
            print(json.dumps(results[-1]), flush=True)
    print(json.dumps(summary(results)))


main()
