"""Ends searches while a trial compiles, continues them, and compares them with an undisturbed one.

    python studies/reliability/compile_kills.py > studies/reliability/compile_kills.json

The trainings are real. An attack waits until a C++ compiler runs, and up to a second more. Prints a
JSON object whose `violations` must be empty: every trial ends as in the undisturbed search, with
the same peak memory, and every library in the cache of compiled code can be loaded.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from autotune.spec.result import TrialRecord
from autotune.storage.store import StudyStore
from studies.reliability.kills import about_this_machine
from studies.reliability.processes import family, processes_of, wait_until_gone

SPACE = """
[techniques]
precision = ["fp32", "bf16-mixed"]
checkpointing = ["none", "selective", "block", "sqrt"]
compile = ["none", "block"]
micro_batch_size = "divisors"

[workload]
layers = 2
width = 64
heads = 2
sequence_length = 32
global_batch = 4
steps = 8
warmup_steps = 2
evaluation_sequences = 8
"""
COMPILERS = ("cc1plus", "as", "ld", "collect2")
LOAD = "import ctypes, sys, torch; [ctypes.CDLL(name) for name in sys.argv[1:]]"


def start(folder: Path, *, trials: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "autotune", "search", "--name", "compiled"]
    command += ["--space", "small.toml", "--storage", storage(folder), "--device", "cpu"]
    command += ["--sampler", "random", "--seed", "7", "--trials", str(trials), "--quiet"]
    command += ["--no-predict", "--no-confirm", "--full-trainings"]
    with (folder / "said.txt").open("a") as said:
        return subprocess.Popen(
            command, cwd=folder, stdout=said, stderr=said, start_new_session=True
        )


def storage(folder: Path) -> str:
    return f"sqlite:///{folder}/compiled.db"


def records_in(folder: Path) -> list[TrialRecord]:
    with closing(StudyStore(storage(folder))) as store:
        return store.trials("compiled")


def compilers_in(folder: Path) -> list[int]:
    found = []
    for pid in processes_of(folder):
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() in COMPILERS:
                found.append(pid)
    return found


def kill(pids: list[int] | tuple[int, ...], number: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


ATTACKS: dict[str, Callable[[Path, subprocess.Popen[bytes]], None]] = {
    "Ctrl-C": lambda folder, search: os.killpg(search.pid, signal.SIGINT),
    "SIGTERM": lambda folder, search: search.terminate(),
    "SIGKILL of everything": lambda folder, search: kill(list(processes_of(folder))),
    "SIGKILL of the search": lambda folder, search: search.kill(),
    "SIGKILL of the trial server": lambda folder, search: kill(family(folder).servers),
    "SIGKILL of the trial": lambda folder, search: kill(family(folder).trials),
    "SIGKILL of the compiler": lambda folder, search: kill(compilers_in(folder)),
}


def undisturbed(folder: Path, *, trials: int) -> list[TrialRecord]:
    folder.mkdir()
    (folder / "small.toml").write_text(SPACE)
    if start(folder, trials=trials).wait() not in (0, 1):
        raise SystemExit((folder / "said.txt").read_text())
    return records_in(folder)


def disturbed(folder: Path, *, trials: int, attacks: int, seed: int) -> tuple[Counter[str], int]:
    """Return how often each attack was made, and how many searches were begun."""
    folder.mkdir()
    (folder / "small.toml").write_text(SPACE)
    chance = random.Random(seed)
    made: Counter[str] = Counter()
    begun = 0
    search = None
    while True:
        if search is None or search.poll() is not None:
            if search is not None and search.returncode in (0, 1, 2):
                return made, begun
            left = wait_until_gone(folder)
            if left:
                raise SystemExit(f"processes {left} outlived their search")
            search = start(folder, trials=trials)
            begun += 1
        if made.total() < attacks and compilers_in(folder):
            time.sleep(chance.random())
            name = chance.choice(list(ATTACKS))
            made[name] += 1
            ATTACKS[name](folder, search)
            with suppress(subprocess.TimeoutExpired):
                search.wait(timeout=5)
        time.sleep(0.01)


def violations(expected: list[TrialRecord], folder: Path) -> list[str]:
    found = []
    known = {record.config: record for record in expected}
    records = records_in(folder)
    if len(records) != len(expected):
        found.append(f"{len(records)} trials instead of {len(expected)}")
    for record in records:
        other = known.get(record.config)
        if other is None:
            found.append(f"trial {record.number} is another configuration than any undisturbed")
        elif record.outcome != other.outcome:
            found.append(f"trial {record.number} is {record.outcome}: {record.message}")
        elif record.peak_memory_bytes != other.peak_memory_bytes:
            found.append(
                f"trial {record.number} has a peak of {record.peak_memory_bytes} instead of "
                f"{other.peak_memory_bytes}"
            )
    for library in folder.rglob("inductor/**/*.so"):
        loading = subprocess.run([sys.executable, "-c", LOAD, library], capture_output=True)
        if loading.returncode:
            found.append(f"{library.name}: {loading.stderr.decode().splitlines()[-1]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attacks", type=int, default=30)
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        expected = undisturbed(folder / "undisturbed", trials=arguments.trials)
        made, begun = disturbed(
            folder / "disturbed",
            trials=arguments.trials,
            attacks=arguments.attacks,
            seed=arguments.seed,
        )
        report: dict[str, Any] = {
            **about_this_machine(),
            "attacks": dict(made),
            "searches": begun,
            "trials": len(expected),
            "outcomes": Counter(record.outcome for record in expected),
            "seconds": round(time.monotonic() - began, 1),
            "violations": violations(expected, folder / "disturbed"),
            "said": (folder / "disturbed" / "said.txt").read_text().splitlines()[-40:],
        }
    print(json.dumps(report, indent=2))
    return 1 if report["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
