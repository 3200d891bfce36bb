"""Changes places of the code one at a time and counts which changes the tests notice.

    python -m studies.mutations.run --seed 51 --count 200 --work /tmp/mutations
    python -m studies.mutations.run --seed 51 --count 200 --work /tmp/mutations --again

It goes on where it was stopped: what it knows is in `results/SEED.jsonl`, whose first line names
the commit that is changed, and in the work folder.
First every room's tests run once with a mark at each place (`marks.py`), which tells the tests that
run it, also through processes that they start. Then each change is made in a copy of the checkout
and those tests run, the quickest first, until one fails; last the other tests of their files.

With `--again` the changes that survived are made in the latest commit, and the tests of their room
that are new or changed since then run. `results/SEED.equivalent.json` has those that change
nothing, each with the reason that a reader gives.
"""

import argparse
import collections
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from studies.mutations.places import ROOMS, Place, draw

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
# Whatever hangs longer than this, and than six times what its tests took, counts as noticed.
LEAST_SECONDS = 240


def main() -> None:
    """Draw the places, find the tests that run them, and try each change that is not known yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=51)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--work", type=Path, required=True, help="folder for copies and marks")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="try the survivors again")
    arguments = parser.parse_args()
    commit, known = results(arguments.seed)
    if arguments.again:
        try_survivors_again(arguments, commit, known)
        return
    copies = [
        copy_of_commit(commit, arguments.work / f"copy-{n}") for n in range(arguments.workers)
    ]
    # Of the copy, which stays as it is while the checkout is worked on.
    places = draw(copies[0], seed=arguments.seed, count=arguments.count)
    marks = arguments.work / "marks"
    free: SimpleQueue[Path] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def with_copy(action: Callable[..., Any], *details: object) -> Any:
        copy = free.get()
        try:
            return action(copy, *details)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(arguments.workers) as pool:
        rooms = [room for room in ROOMS if not (marks / room / "done").exists()]
        list(pool.map(lambda room: with_copy(run_marked, room, places, marks), rooms))
        covering = {number: tests_of(number, place, marks) for number, place in enumerate(places)}
        # Those with few tests first: most is known soon.
        missing = sorted(covering.keys() - known.keys(), key=lambda number: len(covering[number]))
        for number, line in pool.map(
            lambda number: (number, with_copy(try_change, places[number], covering[number])),
            missing,
        ):
            line = {"place": number, **asdict(places[number]), **line}
            with (RESULTS / f"{arguments.seed}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            known[number] = line
            print(number, line["outcome"], line["file"], line["line"], line["by"], flush=True)
    print(collections.Counter(line["outcome"] for line in known.values()))


def results(seed: int) -> tuple[str, dict[int, dict[str, Any]]]:
    """Returns the commit whose places are drawn, and the last result of each place."""
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{seed}.jsonl"
    if not file.exists():
        file.write_text(json.dumps({"commit": git("rev-parse", "HEAD").strip()}) + "\n")
    first, *lines = lines_of(file)
    return first["commit"], {line["place"]: line for line in lines}


def git(*arguments: str) -> str:
    """Returns what git prints in the checkout."""
    command = ["git", *arguments]
    printed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return printed.stdout


def try_survivors_again(
    arguments: argparse.Namespace, commit: str, known: dict[int, dict[str, Any]]
) -> None:
    """Make the changes that survived in the latest commit, whose new tests may notice them."""
    now = git("rev-parse", "HEAD").strip()
    free: SimpleQueue[Path] = SimpleQueue()
    for n in range(arguments.workers):
        free.put(copy_of_commit(now, arguments.work / f"copy-{n}-of-{now[:8]}"))
    equivalent = json.loads((RESULTS / f"{arguments.seed}.equivalent.json").read_text())
    tests = {room: changed_tests(commit, room) for room in ROOMS}
    drawn = copy_of_commit(commit, arguments.work / "copy-0")
    places = draw(drawn, seed=arguments.seed, count=arguments.count)

    def try_again(number: int) -> dict[str, Any]:
        line, copy = known[number], free.get()
        try:
            place = places[number].found_in(
                (copy / line["file"]).read_bytes(), as_in=(drawn / line["file"]).read_bytes()
            )
            if place is None:
                gone = {"outcome": "gone", "by": "its line was changed", "tests": 0, "seconds": 0.0}
                return {**line, **gone, "again": now}
            return {**line, **try_change(copy, place, tests[place.room]), "again": now}
        finally:
            free.put(copy)

    survivors = [
        number
        for number, line in sorted(known.items())
        if line["outcome"] == "survived" and str(number) not in equivalent
    ]
    with ThreadPoolExecutor(arguments.workers) as pool:
        for line in pool.map(try_again, survivors):
            with (RESULTS / f"{arguments.seed}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            known[line["place"]] = line
            print(
                line["place"], line["outcome"], line["file"], line["line"], line["by"], flush=True
            )
    counts = collections.Counter(line["outcome"] for line in known.values())
    counts["survived"] -= len(equivalent)
    noticed = counts["noticed"] / (counts["noticed"] + counts["survived"])
    print(f"{dict(counts)}, {len(equivalent)} equivalent; {noticed:.0%} of the others are noticed")


def changed_tests(commit: str, room: str) -> list[str]:
    """Returns the tests of a room that are new or changed since a commit."""
    found: list[str] = []
    file = ""
    for line in git("diff", "--unified=0", commit, "HEAD", "--", f"tests/{room}").splitlines():
        if line.startswith("+++ b/"):
            file = line.removeprefix("+++ b/")
        # The name after @@ is that of the function in which a change begins.
        elif name := re.match(r"(?:\+|@@.*@@ )def (test_\w+)", line):
            found.append(f"{file}::{name[1]}")
    there = [test for test in found if f"def {test.partition('::')[2]}(" in text_of(test)]
    return list(dict.fromkeys(there))


def text_of(test: str) -> str:
    """Returns the file of a test as it is in the latest commit."""
    return (ROOT / test.partition("::")[0]).read_text()


def copy_of_commit(commit: str, folder: Path) -> Path:
    """Returns a copy of a commit, in which a change harms nobody."""
    if not folder.exists():
        folder.mkdir(parents=True)
        archive = subprocess.run(
            ["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "x"], cwd=folder, check=True, input=archive.stdout)
    return folder


def run_marked(copy: Path, room: str, places: list[Place], marks: Path) -> None:
    """Run the tests of a room with a mark at each of its places."""
    folder = marks / room
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    by_file = collections.defaultdict(list)
    for number, place in enumerate(places):
        if place.room == room:
            by_file[place.file].append((number, place))
    plain = {file: (copy / file).read_bytes() for file in by_file}
    for file, found in by_file.items():
        (copy / file).write_bytes(marked(plain[file], found))
    run_pytest(copy, [f"tests/{room}"], seconds=7200, marks=folder)
    for file, source in plain.items():
        (copy / file).write_bytes(source)
    failed = {line["test"] for line in lines_of(folder / "tests.jsonl") if is_failed(line)}
    _, output = run_pytest(copy, sorted(failed), seconds=3600) if failed else (0, "")
    failing = [line.split(" - ")[0] for line in output.splitlines()]
    (folder / "done").write_text("\n".join(failing))


def marked(source: bytes, found: list[tuple[int, Place]]) -> bytes:
    """Returns a file's source with a mark at each place; one inside another shares its mark."""
    outermost: list[tuple[list[int], Place]] = []
    for number, place in sorted(found, key=lambda one: (one[1].begin, [-n for n in one[1].end])):
        if outermost and place.end <= outermost[-1][1].end:
            outermost[-1][0].append(number)
        else:
            outermost.append(([number], place))
    for numbers, place in reversed(outermost):  # the last first: columns before it stay right
        call = f"__import__('studies.mutations.marks').mutations.marks.mark({numbers})"
        source = place.replaced(source, f"({call} or ({place.text(source)}))")
    return source


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def is_failed(phase: dict[str, Any]) -> bool:
    return phase["outcome"] == "failed"


def tests_of(number: int, place: Place, marks: Path) -> list[str]:
    """Returns the tests that run a place, the quickest first, and then the files they are in.

    What ran while a fixture was set up counts for every test of the file, and what ran while the
    tests were collected for every test of the room.
    """
    folder = marks / place.room
    phases = lines_of(folder / "tests.jsonl")
    failed = {
        line.split(" ", 1)[1]
        for line in (folder / "done").read_text().splitlines()
        if line.startswith("FAILED ")
    }
    times = [line["time"] for line in lines_of(folder / "marks.jsonl") if number in line["places"]]
    if not times:
        return []
    calls = sorted(
        (line for line in phases if line["phase"] == "call" and line["test"] not in failed),
        key=lambda line: line["ended"] - line["began"],
    )
    running = [
        line for line in phases if any(line["began"] <= moment <= line["ended"] for moment in times)
    ]
    first = {line["test"] for line in running if line["phase"] == "call"}
    files = {line["test"].split("::")[0] for line in running}
    if min(times) < min(line["began"] for line in phases):
        files |= {line["test"].split("::")[0] for line in phases}
    others = [line["test"] for line in calls if line["test"].split("::")[0] in files]
    return [
        *(line["test"] for line in calls if line["test"] in first),
        *(test for test in others if test not in first),
    ]


def try_change(copy: Path, place: Place, tests: list[str]) -> dict[str, Any]:
    """Make one change, run tests until one fails, and put the file back."""
    began = time.monotonic()
    if not tests:
        return {"outcome": "survived", "by": "no test runs it", "tests": 0, "seconds": 0.0}
    file = copy / place.file
    source = file.read_bytes()
    file.write_bytes(place.replaced(source, place.after))
    try:
        ended, output = run_pytest(copy, ["-x", *tests], seconds=LEAST_SECONDS + 3 * len(tests))
    finally:
        file.write_bytes(source)
    by = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    outcome = {0: "survived", 1: "noticed", None: "noticed"}.get(ended, "noticed")
    reason = "out of time" if ended is None else by[0] if by else f"pytest ended with {ended}"
    return {
        "outcome": outcome,
        "by": "" if outcome == "survived" else reason[:200],
        "tests": len(tests),
        "seconds": round(time.monotonic() - began, 1),
    }


def run_pytest(
    copy: Path, arguments: list[str], *, seconds: float, marks: Path | None = None
) -> tuple[int | None, str]:
    """Run tests in a copy; return how pytest ended, None when out of time, and what it printed."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "OMP_NUM_THREADS": "1",
        "AUTOTUNE_LOCK_FOLDER": str(copy / ".locks"),
        "XDG_CACHE_HOME": str(copy / ".cache"),
    }
    plugin = []
    if marks is not None:
        environment["MUTATION_MARKS"] = str(marks)
        plugin = ["-p", "studies.mutations.marks"]
    (copy / ".locks").mkdir(exist_ok=True)
    listed = copy / ".tests"
    listed.write_text("\n".join(arguments))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin]
    with subprocess.Popen(
        [*command, f"@{listed}"],
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]
        return process.returncode, output


if __name__ == "__main__":
    main()
