"""Runs 10,000 quick trials with one worker: memory, open files and time per trial must not grow.

    python studies/reliability/many_quick_trials.py --sampler random \\
        > studies/reliability/many_quick_trials.random.json

Every 500 trials: resident memory and open files of the search and of its trial server, the time
from the end of a trial to the beginning of the next (which holds the `ask`), and seconds a trial.
At the end how long `show --json` and `studies` take.
"""

import argparse
import random
import statistics
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import psutil
from sqlalchemy import insert, update

from autotune.spec.attempt import new_attempt_id
from autotune.spec.config import TrainingConfig
from autotune.storage.store import StudyStore
from autotune.storage.tables import ATTEMPTS, STUDIES, TRIALS
from studies.reliability.quick_study import QuickStudy, Worker, quick_study, report, say
from tests.quick_study.stand_in import measurement_of

EVERY = 500


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--sampler", default="random")
    parser.add_argument("--every", type=int, default=EVERY)
    parser.add_argument(
        "--filled", type=int, default=0, help="so many of the trials are written and not run"
    )
    parser.add_argument(
        "--cap-mib", type=int, default=80, help="under 1000 nearly all fits, and ehvi finds no end"
    )
    arguments = parser.parse_args()
    options = ("--sampler", arguments.sampler, "--cap-mib", str(arguments.cap_mib))
    with quick_study(trials=arguments.trials) as study:
        if arguments.filled:
            _fill(study, options, count=arguments.filled)
        worker = study.start("--events", *options, seconds=0.0)
        rows = _watched(study, worker, every=arguments.every)
        exit_code = worker.exit_code()
        seen = {
            "sampler": arguments.sampler,
            "trials": study.results(),
            "of_these_written_and_not_run": arguments.filled,
            "exit_code": exit_code,
            "every": rows,
            "growth_per_1000_trials": _growth(rows),
            "show_json_seconds": _timed("show", "quick", "--json", "--storage", study.storage),
            "studies_seconds": _timed("studies", "--storage", study.storage),
            "database_mib": round((study.folder / "quick.db").stat().st_size / 2**20, 1),
        }
        return report(
            seen, study.violations() + ([] if exit_code == 0 else [str(worker.said[-3:])])
        )


def _fill(study: QuickStudy, options: tuple[str, ...], *, count: int) -> None:
    """Fills the study with `count` results, each as its trial would give it; one trial is run."""
    few = QuickStudy(study.folder, trials=1)
    assert few.start(*options).exit_code() == 0
    with closing(StudyStore(study.storage)) as store:
        definition, _ = store.definition("quick")
        (first,) = store.trials("quick")
        drawn = random.Random(0).sample(list(definition.legal_space().configurations()), count)
        configs = [config for config in drawn if config != first.config][: count - 1]
        with store._database.writing() as connection:  # a transaction a result would take very long
            connection.execute(
                insert(TRIALS), [_trial(number, one) for number, one in enumerate(configs, start=1)]
            )
            connection.execute(insert(ATTEMPTS), [_attempt(number) for number in range(1, count)])
            connection.execute(update(STUDIES).values(revision=count + 10))


def _trial(number: int, config: TrainingConfig) -> dict[str, Any]:
    return {
        "id": number + 1,
        "study_id": 1,
        "number": number,
        "fingerprint": config.fingerprint,
        "config": config.to_dict(),
        "measurement": asdict(measurement_of(config)),
        "seconds": 0.1,
        "finished_at": datetime.now(UTC),
        "revision": number + 10,
    }


def _attempt(number: int) -> dict[str, Any]:
    return {
        "id": new_attempt_id(),
        "trial_id": number + 1,
        "ordinal": 1,
        "worker": "by hand",
        "state": "finished",
        "lease_until": 0.0,
        "renewals": 0,
        "cause": "",
    }


def _watched(study: QuickStudy, worker: Worker, *, every: int) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = []
    events = _Events(worker)
    process = psutil.Process(worker.pid)
    began = time.monotonic()
    while worker.process.poll() is None:
        time.sleep(0.05)
        events.look()
        if events.ended >= (len(rows) + 1) * every:
            server = next(
                child for child in process.children() if "stand_in" in " ".join(child.cmdline())
            )
            rows.append(
                {
                    "trials": events.ended,
                    "search_mib": round(process.memory_info().rss / 2**20, 1),
                    "search_files": process.num_fds(),
                    "server_mib": round(server.memory_info().rss / 2**20, 1),
                    "server_files": server.num_fds(),
                    "milliseconds_between_trials_median": round(
                        1000 * statistics.median(events.pauses), 1
                    ),
                    "milliseconds_between_trials_most": round(1000 * max(events.pauses), 1),
                    "milliseconds_a_trial": round(1000 * (time.monotonic() - began) / every, 1),
                }
            )
            say(str(rows[-1]))
            began, events.pauses = time.monotonic(), []
    return rows


class _Events:
    """The worker's events, each with the second at which it was said."""

    def __init__(self, worker: Worker) -> None:
        self._file = worker.said_in.open(errors="replace")
        self.ended, self.pauses = 0, [0.0]
        self._last_end = 0.0

    def look(self) -> None:
        for line in self._file:
            kind, _, rest = line.partition(" ")
            at = float(rest.rpartition("@")[2]) if "@" in rest else 0.0
            if kind == "TrialEnded":
                self.ended, self._last_end = self.ended + 1, at
            elif kind == "TrialBegan" and self._last_end:
                self.pauses.append(at - self._last_end)


def _growth(rows: list[dict[str, float]]) -> dict[str, float]:
    """By least squares over the second half, when what is loaded once is loaded."""
    late = rows[len(rows) // 2 :]
    if len(late) < 2:
        return {}
    names = (
        "search_mib",
        "search_files",
        "server_mib",
        "server_files",
        "milliseconds_between_trials_median",
    )
    trials = [row["trials"] for row in late]
    return {
        name: round(
            1000 * statistics.linear_regression(trials, [row[name] for row in late]).slope, 3
        )
        for name in (*names, "milliseconds_a_trial")
    }


def _timed(*arguments: str) -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "autotune", *arguments], check=True, capture_output=True)
    return round(time.monotonic() - began, 2)


if __name__ == "__main__":
    sys.exit(main())
