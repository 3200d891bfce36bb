"""Ends searches while a trial compiles, continues them, and compares them with an undisturbed one.

    python studies/reliability/compile_kills.py > studies/reliability/compile_kills.json

The trainings are real, and so is the compiler, but that it takes 1.5 seconds more to write a
library, in which the attacks come. Prints a JSON object whose `violations` must be empty: every
trial ends as in the undisturbed search, with the same peak memory, and every library in the cache
of compiled code can be loaded.
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
from collections.abc import Callable, Sequence
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
COMPILER = "slow-c++"
SLOW = """\
#!/bin/sh
for word; do last=$output; output=$word; [ "$last" = -o ] && break; done
case "$output" in *.main.so*) ;; *) exec g++ "$@" ;; esac
g++ "$@" && mv "$output" "$output.whole" && head -c 4096 "$output.whole" >"$output" &&
sleep 1.5 && mv "$output.whole" "$output"
"""
"""g++, but while it writes the library of a kernel a half-written one is there for 1.5 seconds."""
LOAD = "import ctypes, sys, torch; [ctypes.CDLL(name) for name in sys.argv[1:]]"


def start(folder: Path, *, trials: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "autotune", "search", "--name", "compiled"]
    command += ["--space", "small.toml", "--storage", storage(folder), "--device", "cpu"]
    command += ["--sampler", "grid", "--trials", str(trials), "--quiet"]
    command += ["--no-predict", "--no-confirm", "--full-trainings"]
    environment = {**os.environ, "CXX": str(folder.parent / COMPILER)}
    with (folder / "said.txt").open("a") as said:
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdout=said, stderr=said, start_new_session=True
        )


def storage(folder: Path) -> str:
    return f"sqlite:///{folder}/compiled.db"


def records_in(folder: Path) -> list[TrialRecord]:
    with closing(StudyStore(storage(folder))) as store:
        return store.trials("compiled")


def compilers_in(folder: Path) -> list[int]:
    """Return the processes of the compiler whose library is there, half-written."""
    found = []
    for pid in processes_of(folder):
        with suppress(OSError, ValueError):  # it has ended, or only says its version
            if Path(f"/proc/{pid}/comm").read_text().strip() != COMPILER:
                continue
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            library = Path(os.fsdecode(words[words.index(b"-o") + 1]))
            if library.with_name(library.name + ".whole").exists():
                found.append(pid)
    return found


Target = Callable[[Path, int], Sequence[int]]

ATTACKS: dict[str, tuple[signal.Signals, Target]] = {
    "SIGINT of the search": (signal.SIGINT, lambda folder, search: [search]),
    "SIGTERM of the search": (signal.SIGTERM, lambda folder, search: [search]),
    "SIGKILL of the search": (signal.SIGKILL, lambda folder, search: [search]),
    "SIGKILL of everything": (signal.SIGKILL, lambda folder, search: list(processes_of(folder))),
    "SIGKILL of the trial server": (signal.SIGKILL, lambda folder, search: family(folder).servers),
    "SIGKILL of the trial": (signal.SIGKILL, lambda folder, search: family(folder).trials),
    "SIGKILL of the compiler": (signal.SIGKILL, lambda folder, search: compilers_in(folder)),
}
"""{name: signal, and the processes in a folder that get it, given the search}."""


def attack(name: str, folder: Path, search: int) -> bool:
    """Return whether there was a process to attack."""
    number, target = ATTACKS[name]
    pids = target(folder, search)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return bool(pids)


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
            name = chance.choice(list(ATTACKS))
            if attack(name, folder, search.pid):
                made[name] += 1
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
    for library in folder.rglob("*.main.so"):
        loading = subprocess.run([sys.executable, "-c", LOAD, library], capture_output=True)
        if loading.returncode:
            said = loading.stderr.decode().splitlines() or [f"ended with {loading.returncode}"]
            found.append(f"{library.name}: {said[-1]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attacks", type=int, default=30)
    parser.add_argument("--trials", type=int, default=16, help="of 16 configurations")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        (folder / COMPILER).write_text(SLOW)
        (folder / COMPILER).chmod(0o755)
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
