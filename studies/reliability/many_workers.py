"""32 workers, 1,000 quick trials, one SQLite file: none dies, and every trial has its one result.

    python studies/reliability/many_workers.py > studies/reliability/many_workers.json

`longest_silence_seconds`: the longest time in which a worker that had trials to run ended none, as
its events tell; no call of it can have waited longer.
"""

import argparse
import sys
import time
from collections import Counter

from studies.reliability.quick_study import Worker, quick_study, report, say


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--trials", type=int, default=1000)
    arguments = parser.parse_args()
    with quick_study(trials=arguments.trials, places=arguments.workers) as study:
        gate = study.folder / "gate"
        for _ in range(arguments.workers):
            study.start("--events", "--time-limit", "3000", STAND_IN_GATE=str(gate))
            say(f"{len(study.workers)} started")
            study.wait_until(
                lambda: study.running() == len(study.workers), what="all to be at a trial"
            )
        gate.touch()  # all at once
        began = time.monotonic()
        silence = _Silence(study.workers)
        while any(worker.process.poll() is None for worker in study.workers):
            silence.look()
            time.sleep(0.05)
        seconds = time.monotonic() - began
        exit_codes = Counter(study.exit_codes())
        say(f"{seconds:.0f} s, exit codes {dict(exit_codes)}")
        events = Counter(
            line.split()[0] for worker in study.workers for line in worker.said if line
        )
        trials_of = sorted(
            sum("TrialBegan" in line for line in worker.said) for worker in study.workers
        )
        seen = {
            "workers": arguments.workers,
            "trials": study.results(),
            "exit_codes": exit_codes,
            "seconds_from_all_at_once_to_the_end": round(seconds, 1),
            "trials_a_second": round(study.results() / seconds, 2),
            "trials_of_a_worker": {"least": trials_of[0], "most": trials_of[-1]},
            "longest_silence_seconds": round(silence.longest, 1),
            "times_a_worker_waited_for_the_database": events["WaitingForStorage"],
            "attempts": study.attempts(),
        }
        found = study.violations()
        found += [
            f"a worker ended with {code}: {study.last_words()}" for code in exit_codes if code != 0
        ]
        return report(seen, found)


class _Silence:
    """Between two trials of a worker, seen from outside by how its file of events grows."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers
        self._last: dict[Worker, tuple[int, float]] = {}
        self.longest = 0.0

    def look(self) -> None:
        for worker in self._workers:
            count = sum(line.startswith("Trial") for line in worker.said)
            if count == 0 or worker.process.poll() is not None:
                self._last.pop(worker, None)
            elif worker not in self._last or self._last[worker][0] != count:
                self._last[worker] = (count, time.monotonic())
            elif not worker.said[-1].startswith("WaitingForOthers"):
                self.longest = max(self.longest, time.monotonic() - self._last[worker][1])


if __name__ == "__main__":
    sys.exit(main())
