"""What a study of ten thousand trials costs: one JSON line a command, a choice and a reading.

`python studies/reliability/many_trials.py [--trials 10000] [--only show]`

Makes the study of `tests/building/made_study.py` in a folder of its own, runs each command as its
own process (wall-clock seconds, its largest resident memory, bytes written) and times, in this
process, the choice of the next trial by expected gain, both where one is found at once and where
the search has converged, and what the commands are made of.
"""

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from autotune.analysis.front import pareto_front
from autotune.analysis.tolerance import Tolerance
from autotune.storage.store import StudyStore
from autotune.study.sampler import ehvi_sampler
from autotune.study.search import result_of, view_of
from studies.reliability.quick_study import provenance
from tests.building import made_study

STUDY, COPY = "many", "many-again"
FIGURES = ("pareto", "parallel", "importance", "ladder", "memory", "history", "predicted")
RECORDS = (100, 1_000, 3_000, 10_000)
CHOICES = 5


def commands() -> Iterator[list[str]]:
    yield ["studies"]
    yield ["show", STUDY]
    for form in ("--json", "--csv", "--markdown"):
        yield ["show", STUDY, form]
    for kind in FIGURES:
        yield ["plot", STUDY, kind, "--out", f"{kind}.html"]
    yield ["plot", STUDY, "--3d", "--out", "space.html"]
    yield ["report", STUDY, "--out", "report.html"]
    yield ["compare", STUDY, COPY, "--out", "compare.html"]
    yield ["compare", STUDY, COPY, "--no-worse", "--out", "compare.html"]
    yield ["export", STUDY, "--to", "pytorch", "--out", "exported"]


def run(command: Sequence[str], *, folder: Path) -> dict[str, Any]:
    began = time.perf_counter()
    printed = folder / "printed.txt"
    with printed.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "autotune", *command, "--storage", "sqlite:///autotune.db"],
            cwd=folder,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    out = folder / command[command.index("--out") + 1] if "--out" in command else printed
    return {
        "command": " ".join(command),
        "exit_code": os.waitstatus_to_exitcode(status),
        "seconds": round(seconds, 2),
        "processor_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_resident_bytes": used.ru_maxrss * 1024,
        "written_bytes": out.stat().st_size if out.is_file() else None,
    }


# -- in this process -------------------------------------------------------------------------------


def choices(trials: int) -> Iterator[dict[str, Any]]:
    """`ranking.Ranking.choose`, and what this process holds after each number of records."""
    study = made_study.definition(STUDY)
    made = made_study.make(study, trials=trials)
    for has_converged in (False, True):
        # A search that has converged looks at as many configurations as it may before it says so.
        converged = math.inf if has_converged else ehvi_sampler.CONVERGED_IMPROVEMENT
        for count in sorted({min(count, trials) for count in RECORDS}):
            records, forecasts = made.records[:count], made.forecasts[:count]
            chooser = ehvi_sampler.EhviSampler(study.legal_space(), cap_bytes=study.cap_bytes)
            tried = {record.config for record in records}
            took = []
            with patch.object(ehvi_sampler, "CONVERGED_IMPROVEMENT", converged):
                for seed in range(CHOICES):
                    began = time.perf_counter()
                    chooser.choose(records, forecasts, excluded=tried, seed=seed)
                    took.append(round(time.perf_counter() - began, 3))
            yield {
                "choose_after": count,
                "has_converged": has_converged,
                "first_seconds": took[0],
                "best_seconds": min(took[1:]),
                "worst_seconds": max(took[1:]),
                "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }


def readings(folder: Path) -> Iterator[dict[str, Any]]:
    store = StudyStore(f"sqlite:///{folder / 'autotune.db'}")
    try:
        records = store.trials(STUDY)
        parts: dict[str, Callable[[], object]] = {
            "store.trials": lambda: store.trials(STUDY),
            "store.forecasts": lambda: store.forecasts(STUDY),
            "result_of": lambda: result_of(store, STUDY),
            "view_of": lambda: view_of(store, STUDY),
            "pareto_front": lambda: pareto_front(records, tolerance=Tolerance()),
            "pareto_front without tolerance": lambda: pareto_front(
                records, tolerance=Tolerance(speed=0, perplexity=0)
            ),
        }
        for name, part in parts.items():
            took = []
            for _ in range(3):
                began = time.perf_counter()
                part()
                took.append(time.perf_counter() - began)
            yield {
                "part": name,
                "best_seconds": round(min(took), 3),
                "worst_seconds": round(max(took), 3),
            }
    finally:
        store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--only", help="a word of the command, or `choose` or `read`")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="many-trials-"))
    try:
        study = made_study.definition(STUDY)
        made = made_study.make(study, trials=asked.trials)
        made_study.write(f"sqlite:///{folder / 'autotune.db'}", study, made)
        # A second one beside it, to compare with, in the same database; `studies` reads both.
        made_study.write(f"sqlite:///{folder / 'autotune.db'}", made_study.definition(COPY), made)
        database_bytes = (folder / "autotune.db").stat().st_size
        print(
            json.dumps({**provenance(), "trials": asked.trials, "database_bytes": database_bytes})
        )
        for command in commands():
            if asked.only in (None, *command):
                print(json.dumps(run(command, folder=folder)), flush=True)
        for name, rows in (("read", readings(folder)), ("choose", choices(asked.trials))):
            for row in rows if asked.only in (None, name) else ():
                print(json.dumps(row), flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
