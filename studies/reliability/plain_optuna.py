"""Does to a search with Optuna's storage what the other scripts do to autotune.

    python studies/reliability/plain_optuna.py > studies/reliability/plain_optuna.json

Ask and tell with `optuna.storages.RDBStorage` as its documentation has it: four workers that are
killed at random moments and begun again, 32 workers on one SQLite file, and a PostgreSQL server
that is gone when a result is told. Trials last 0.05 s. Every run is repeated; nothing here is part
of autotune.
"""

import argparse
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import optuna

from studies.reliability.quick_study import own_folder, report, say
from tests.building.postgres import PostgresServer

STUDY, SECONDS_A_TRIAL = "plain", 0.05
WORKERS = 4

WORKER = f"""
import sys, time, optuna
optuna.logging.set_verbosity(optuna.logging.ERROR)
url, wanted = sys.argv[1], int(sys.argv[2])
sampler = optuna.samplers.RandomSampler()
study = optuna.load_study(study_name={STUDY!r}, storage=url, sampler=sampler)
finished = optuna.trial.TrialState.COMPLETE
while sum(one.state == finished for one in study.get_trials(deepcopy=False)) < wanted:
    trial = study.ask()
    value = trial.suggest_float("x", 0.0, 1.0)
    print("asked", flush=True)
    time.sleep({SECONDS_A_TRIAL})
    study.tell(trial, value)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=180)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    seen: dict[str, list[dict[str, Any]]] = {
        "killed": [],
        "32_workers": [],
        "database_gone_at_tell": [],
    }
    for repeat in range(arguments.repeats):
        for name, run in (
            ("killed", lambda r: _killed(arguments.kills, seed=r)),
            ("32_workers", _many_workers),
        ):
            seen[name].append(run(repeat))
            say(f"{name}: {seen[name][-1]}")
    with PostgresServer(durable=True) as server:
        for repeat in range(arguments.repeats):
            seen["database_gone_at_tell"].append(_gone_at_tell(server, repeat))
            say(f"database gone: {seen['database_gone_at_tell'][-1]}")
    return report(seen, [])


def _killed(kills: int, *, seed: int) -> dict[str, Any]:
    """Kills and replaces a random one of four workers every 0 to 2 s, then lets them finish."""
    draw = random.Random(seed)
    with own_folder() as folder:
        url = _new_study(f"sqlite:///{folder / 'plain.db'}")
        workers = [_start(url, 10**6, folder) for _ in range(WORKERS)]
        for _ in range(kills):
            time.sleep(draw.uniform(0.0, 2.0))
            place = draw.randrange(WORKERS)
            workers[place].kill()
            workers[place].wait()
            workers[place] = _start(url, 10**6, folder)
        for worker in workers:
            worker.kill()
            worker.wait()
        last = [_start(url, _states(url)["COMPLETE"] + 20, folder) for _ in range(WORKERS)]
        codes = [worker.wait() for worker in last]
        states = _states(url)
        return {
            "kills": kills + WORKERS,
            "exit_codes": codes,
            "trials": dict(states),
            "running": states["RUNNING"],
        }


def _many_workers(_: int) -> dict[str, Any]:
    with own_folder() as folder:
        url = _new_study(f"sqlite:///{folder / 'plain.db'}")
        workers = [_start(url, 1000, folder) for _ in range(32)]
        failed = sum(worker.wait() != 0 for worker in workers)
        return {
            "workers_that_failed": failed,
            "trials": dict(_states(url)),
            "errors": _errors(folder),
        }


def _gone_at_tell(server: PostgresServer, repeat: int) -> dict[str, Any]:
    with own_folder() as folder:
        url = _new_study(server.create_database(f"plain_{repeat}"))
        worker = _start(url, 1, folder)
        while not any("asked" in file.read_text() for file in folder.glob("*.txt")):
            time.sleep(0.002)
        with server.stopped(mode="immediate"):
            code = worker.wait()
        return {"exit_code": code, "errors": _errors(folder), "trials": dict(_states(url))}


def _new_study(url: str) -> str:
    optuna.create_study(study_name=STUDY, storage=url)
    return url


def _states(url: str) -> Counter[str]:
    study = optuna.load_study(study_name=STUDY, storage=url)
    return Counter(trial.state.name for trial in study.get_trials(deepcopy=False))


def _start(url: str, wanted: int, folder: Path) -> subprocess.Popen[bytes]:
    said = folder / f"{time.monotonic_ns()}.txt"
    with said.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-c", WORKER, url, str(wanted)], stdout=file, stderr=file
        )


def _errors(folder: Path) -> dict[str, int]:
    """The last line of each that failed, by its first words."""
    lines = [file.read_text(errors="replace").strip().splitlines() for file in folder.glob("*.txt")]
    return dict(Counter(said[-1][:100] for said in lines if said and said[-1] != "asked"))


if __name__ == "__main__":
    sys.exit(main())
