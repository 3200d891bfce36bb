"""Stops a worker (SIGSTOP) past its lease and continues it: its stale result is stored separately.

    python studies/reliability/stopped_worker.py > studies/reliability/stopped_worker.json

Uses more than one device slot: a stopped worker does not lose its slot, because its trial may still
be on the device. If it were the only slot, the others would wait until the worker is continued or
killed.
"""

import os
import signal
import sys
import time

from autotune.storage.tables import ATTEMPTS, TRIALS
from studies.reliability.quick_study import quick_study, report, say


def main() -> int:
    found: list[str] = []
    with quick_study(trials=400, places=3) as study:
        gate = study.folder / "gate"
        stopped = study.start("--events", "--time-limit", "1000", STAND_IN_GATE=str(gate))
        study.wait_until(lambda: study.running() == 1, what="its trial")
        others = [study.start("--events", seconds=1.0) for _ in range(2)]
        study.wait_for_results(4)
        os.kill(stopped.pid, signal.SIGSTOP)  # its trial runs on, in a process of its own
        began = time.monotonic()
        study.wait_until(
            lambda: study.attempts().get("given_up", 0) == 1, what="its attempt to be given up"
        )
        given_up = time.monotonic() - began
        say(f"given up after {given_up:.0f} s")
        study.wait_until(
            lambda: (0, "finished") in {(row.number, row.state) for row in study.rows(*_COLUMNS)},
            what="the retry",
        )
        gate.touch()
        time.sleep(1)  # its trial ends, and nobody is there to hear it
        os.kill(stopped.pid, signal.SIGCONT)
        codes = study.exit_codes()
        say(f"exit codes {codes}")
        of_trial = [row for row in study.rows(*_COLUMNS) if row.number == 0]
        went_on = sum("TrialBegan" in line for line in stopped.said) - 1
        found += study.violations()
        if [row.state for row in of_trial] not in (["late", "finished"], ["given_up", "finished"]):
            found.append(f"the attempts at its trial are {of_trial}")
        if of_trial[0].state == "late" and of_trial[0].measurement is None:
            found.append("the late result was not kept")
        if went_on < 1:
            found.append("the worker did not go on")
        if any(codes):
            found.append(f"exit codes {codes}: {study.last_words()}")
        seen = {
            "seconds_from_the_stop_to_given_up": round(given_up, 1),
            "attempts_at_its_trial": [row.state for row in of_trial],
            "the_late_result_was_kept": of_trial[0].measurement is not None,
            "it_said": [line for line in stopped.said if "ResultRejected" in line],
            "trials_it_ran_after_that": went_on,
            "exit_codes": codes,
            "attempts": study.attempts(),
            "others": len(others),
        }
        return report(seen, found)


_COLUMNS = (TRIALS.c.number, ATTEMPTS.c.ordinal, ATTEMPTS.c.state, ATTEMPTS.c.measurement)


if __name__ == "__main__":
    sys.exit(main())
