"""Kills workers, trial servers and trials at random moments, then counts the results.

    python studies/reliability/kills.py --kills 500 --workers 4 --storage sqlite > sqlite.json

Every worker that ends is replaced by a new one, which recovers the work of the dead one and may be
killed meanwhile as well. The database is checked all the time (`watch.py`). Prints a JSON object
whose `violations` must be empty. `--storage` is sqlite, postgresql (a new server, with every commit
synced) or a URL.
"""

import argparse
import json
import os
import platform
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from studies.reliability import nursery
from studies.reliability.processes import Family, family, wait_until_gone
from studies.reliability.watch import Snapshot, Watch, snapshot, violations_at_the_end

STUDY = "kills"
MORE_TRIALS = 60
"""Are wanted whenever the study is nearly complete and kills are left."""
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_COMPLETE = 900.0
YOUNG_SECONDS = 1.0
"""A worker of less than this age opens the study and takes over what dead ones left."""
WEIGHTS = {"worker": 5, "young worker": 3, "trial server": 3, "trial": 3}


@dataclass(kw_only=True)
class Run:
    """Workers on one study, and who of them was killed."""

    url: str
    folder: Path
    workers: int
    places: int
    beside: int
    """How many predictions run at a time beside a trial; 0: nothing is predicted."""
    chance: random.Random
    started: dict[int, float] = field(default_factory=dict)
    """Process id of each worker to when it began."""
    kills: Counter[str] = field(default_factory=Counter)
    exits: Counter[str] = field(default_factory=Counter)
    watch: Watch = field(default_factory=Watch)
    more_trials: int = MORE_TRIALS
    trials_wanted: int = MORE_TRIALS
    looked_at: float = 0.0

    def keep_going(self) -> None:
        """Replaces workers that ended, and checks the database from time to time."""
        self._reap()
        while len(self.started) < self.workers:
            self._start()
        if time.monotonic() - self.looked_at > SECONDS_BETWEEN_LOOKS:
            now = self.look()
            if now is not None and now.finished > self.trials_wanted - self.more_trials // 2:
                self.trials_wanted += self.more_trials

    def look(self) -> Snapshot | None:
        now = snapshot(self.url, STUDY)
        if now is not None:
            self.watch.look(now)
        self.looked_at = time.monotonic()
        return now

    def kill(self, kind: str) -> bool:
        """False where there is nobody of that kind just now."""
        victim = self._victim(kind, family(self.folder))
        if victim is None:
            return False
        try:
            (os.killpg if kind == "trial" else os.kill)(victim, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.kills[kind] += 1
        return True

    def _victim(self, kind: str, alive: Family) -> int | None:
        now = time.monotonic()
        old = [pid for pid in alive.workers if now - self.started.get(pid, now) >= YOUNG_SECONDS]
        young = [pid for pid in alive.workers if pid not in old]
        # A trial that leads no group of its own yet would take its server with it.
        trials = [pid for pid in alive.trials if _group(pid) == pid]
        who = {
            "worker": old,
            "young worker": young,
            "trial server": list(alive.servers),
            "trial": trials,
        }[kind]
        return self.chance.choice(who) if who else None

    def _start(self) -> None:
        words = ["--name", STUDY, "--storage", self.url, "--trials", str(self.trials_wanted)]
        words += ["--places", str(self.places), "--events"]
        if self.beside:
            words += ["--sampler", "ehvi", "--beside", str(self.beside)]
        start = nursery.start_command if self.chance.random() < 0.05 else nursery.start_forked
        environment = {"STAND_IN_SECONDS": "0.05"}
        self.started[start(words, folder=self.folder, environment=environment)] = time.monotonic()

    def _reap(self) -> None:
        for pid in list(self.started):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.started[pid]
                self.exits[str(os.waitstatus_to_exitcode(status))] += 1

    def complete(self) -> None:
        """Lets workers work in peace until the study has all its trials, and ends."""
        end = time.monotonic() + SECONDS_TO_COMPLETE
        self.workers_end(end)
        for _ in range(self.workers):
            self._start()
        self.workers_end(end)
        self.look()

    def workers_end(self, end: float) -> None:
        while self.started:
            self._reap()
            if time.monotonic() > end:
                self.watch.violations.append(f"workers {list(self.started)} do not end")
                return
            time.sleep(0.05)


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def carry_out(run: Run, *, kills: int, kinds: list[str], seconds_between: float) -> dict[str, Any]:
    began = time.monotonic()
    while sum(run.kills.values()) < kills:
        pause_until = time.monotonic() + run.chance.expovariate(1 / seconds_between)
        while time.monotonic() < pause_until:
            run.keep_going()
            time.sleep(0.01)
        [kind] = run.chance.choices(kinds, weights=[WEIGHTS[kind] for kind in kinds])
        for _ in range(200):  # a trial lives for a twentieth of a second
            if run.kill(kind):
                break
            run.keep_going()
            time.sleep(0.005)
    seconds = time.monotonic() - began
    run.complete()
    left = wait_until_gone(run.folder)
    os.chdir(run.folder)
    last = run.watch.last
    found = [*run.watch.violations, *(f"process {pid} is left" for pid in left)]
    found += violations_at_the_end(run.url, STUDY, trials_wanted=run.trials_wanted)
    return {
        "kills": sum(run.kills.values()),
        "kills_by_kind": dict(run.kills),
        "worker_exits": dict(run.exits),
        "trials": len(last.trials) if last else 0,
        "attempts": len(last.attempts) if last else 0,
        "attempts_by_state": dict(last.states) if last else {},
        "retries": last.retries if last else 0,
        "late_results": last.states["late"] if last else 0,
        "looks_at_the_database": run.watch.looks,
        "seconds_of_killing": round(seconds, 1),
        "seconds": round(time.monotonic() - began, 1),
        "violations": found,
    }


@contextmanager
def storage_of(kind: str, folder: Path) -> Iterator[str]:
    if kind == "sqlite":
        yield f"sqlite:///{folder}/kills.db"
    elif kind == "postgresql":
        from tests.building.postgres import PostgresServer

        with PostgresServer(durable=True) as server:
            yield server.create_database("kills")
    else:
        yield kind


def about_this_machine() -> dict[str, Any]:
    arguments = " ".join(sys.argv[1:])
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python studies/reliability/{Path(sys.argv[0]).name} {arguments}".strip(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": {
            "python": platform.python_version(),
            "sqlite": sqlite3.sqlite_version,
            **{name: version(name) for name in ("optuna", "sqlalchemy", "torch")},
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--places", type=int, default=2, help="trials at a time on the device")
    parser.add_argument(
        "--beside", type=int, default=0, help="predictions at a time beside each trial"
    )
    parser.add_argument("--storage", default="sqlite")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds-between", type=float, default=0.5, help="between two kills, on average"
    )
    parser.add_argument(
        "--kill-trials", action="store_true", help="also the process groups of trials"
    )
    parser.add_argument(
        "--folder", type=Path, default=None, help="keep everything there; it must not exist"
    )
    arguments = parser.parse_args()
    said = about_this_machine()
    kinds = [kind for kind in WEIGHTS if kind != "trial" or arguments.kill_trials]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary) / "run").resolve()
        folder.mkdir(parents=True)
        with storage_of(arguments.storage, folder) as url:
            run = Run(
                url=url,
                folder=folder,
                workers=arguments.workers,
                places=arguments.places,
                beside=arguments.beside,
                chance=random.Random(arguments.seed),
            )
            said |= {
                "storage": arguments.storage,
                "workers": arguments.workers,
                "seed": arguments.seed,
            }
            said |= carry_out(
                run, kills=arguments.kills, kinds=kinds, seconds_between=arguments.seconds_between
            )
        os.chdir("/")
    print(json.dumps(said, indent=2))
    return 1 if said["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
