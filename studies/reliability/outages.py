"""Stops PostgreSQL for 5, 30 and 120 s during a search of four workers, once for too long.

    python studies/reliability/outages.py > studies/reliability/outages.json

Too long means longer than the workers retry. Also covers a worker with a long trial while the
database is unreachable for longer than a lease.
"""

import argparse
import sys
import time
from typing import Any

from autotune.spec.attempt import LEASE_SECONDS
from autotune.storage.tables import ATTEMPTS, TRIALS
from studies.reliability.quick_study import quick_study, report, say
from tests.building.postgres import PostgresServer

WORKERS = 4
TRIALS_WANTED = 400


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, nargs="*", default=[5.0, 30.0, 120.0])
    arguments = parser.parse_args()
    found: list[str] = []
    with PostgresServer(durable=True) as server:
        seen = {
            "outages": _outages(server, arguments.seconds, found),
            "longer_than_the_wait": _longer_than_the_wait(server, found),
            "longer_than_a_lease": _longer_than_a_lease(server, found),
        }
    return report(seen, found)


def _outages(
    server: PostgresServer, lengths: list[float], found: list[str]
) -> list[dict[str, Any]]:
    """One study, its workers and one outage after the other; they go on by themselves."""
    rows: list[dict[str, Any]] = []
    with quick_study(
        storage=server.create_database("outages"), trials=TRIALS_WANTED, places=WORKERS
    ) as study:
        workers = [study.start("--events", seconds=1.0) for _ in range(WORKERS)]
        study.wait_until(lambda: study.running() == WORKERS, what="all to be at a trial")
        for seconds in lengths:
            for mode in ("immediate", "fast"):
                before = study.results()
                server.stop(mode=mode)
                say(f"stopped ({mode}) for {seconds:g} s at {before} results")
                time.sleep(seconds)
                alive = sum(worker.process.poll() is None for worker in workers)
                spooled = len(list(study.folder.glob("studies/work/*/quick/spool/*.json")))
                server.start()
                back = time.monotonic()
                study.wait_for_results(min(TRIALS_WANTED, before + WORKERS + 1))
                rows.append(
                    {
                        "mode": mode,
                        "seconds": seconds,
                        "results_before": before,
                        "workers_alive_at_the_end_of_it": alive,
                        "results_that_waited_on_disk": spooled,
                        "seconds_from_its_end_to_new_results": round(time.monotonic() - back, 1),
                    }
                )
                say(str(rows[-1]))
        codes = study.exit_codes()
        rows.append({"exit_codes": codes, "attempts": study.attempts()})
        found += study.violations()
        found += [
            f"a worker ended with {code}: {study.last_words()}" for code in codes if code != 0
        ]
        if study.attempts() != {"finished": TRIALS_WANTED}:
            found.append(f"attempts were not each finished: {study.attempts()}")
    return rows


def _longer_than_the_wait(server: PostgresServer, found: list[str]) -> dict[str, Any]:
    with quick_study(storage=server.create_database("wait"), trials=60, places=2) as study:
        first = [study.start("--database-wait", "10", seconds=1.0) for _ in range(2)]
        study.wait_for_results(10)
        server.stop(mode="immediate")
        began = time.monotonic()
        codes = [worker.exit_code() for worker in first]
        ended = time.monotonic() - began
        time.sleep(max(0.0, 30 - ended))
        server.start()
        spooled = len(list(study.folder.glob("studies/work/*/quick/spool/*.json")))
        said = [worker.said for worker in first]
        again = [study.start("--database-wait", "10", seconds=0.2) for _ in range(2)]
        again_codes = [worker.exit_code() for worker in again]
        found += study.violations()
        for code, lines in zip(codes, said, strict=True):
            kinds = [line.split(":")[0] for line in lines]
            if code != 75 or kinds != ["error", "hint"]:
                found.append(
                    f"after 10 s without the database a worker ended with {code} and said {lines}"
                )
        found += [
            f"the same command then ended with {code}: {study.last_words()}"
            for code in again_codes
            if code
        ]
        if set(study.attempts()) != {"finished"}:
            found.append(f"results were measured twice: {study.attempts()}")
        return {
            "exit_codes": codes,
            "seconds_to_the_exit": round(ended, 1),
            "said": said[0],
            "results_that_waited_on_disk": spooled,
            "exit_codes_of_the_same_command": again_codes,
            "attempts": study.attempts(),
        }


def _longer_than_a_lease(server: PostgresServer, found: list[str]) -> dict[str, Any]:
    """One worker runs a trial of minutes while others see its lease expire."""
    seconds = LEASE_SECONDS + 30
    with quick_study(storage=server.create_database("lease"), trials=60, places=3) as study:
        gate = study.folder / "gate"
        long = study.start("--events", "--time-limit", "1000", STAND_IN_GATE=str(gate))
        study.wait_until(lambda: study.running() == 1, what="the long trial")
        others = [study.start("--events", "--time-limit", "1000", seconds=1.0) for _ in range(2)]
        study.wait_for_results(4)
        server.stop(mode="immediate")
        say(f"stopped for {seconds:g} s")
        time.sleep(seconds)
        server.start()
        before = study.results()
        study.wait_for_results(min(55, before + 20))
        time.sleep(15)
        attempts = study.attempts()
        gate.touch()
        codes = study.exit_codes()
        row = study.rows(
            TRIALS.c.number, ATTEMPTS.c.ordinal, ATTEMPTS.c.state, ATTEMPTS.c.renewals
        )[0]
        found += study.violations()
        if set(study.attempts()) != {"finished"}:
            found.append(f"an attempt of a living worker was given up: {study.attempts()}")
        found += [f"a worker ended with {code}: {study.last_words()}" for code in codes if code]
        return {
            "seconds": seconds,
            "attempts_when_the_database_was_back": attempts,
            "attempts_in_the_end": study.attempts(),
            "the_long_trial": dict(
                zip(("number", "ordinal", "state", "renewals"), row, strict=True)
            ),
            "exit_codes": [long.exit_code(), *(worker.exit_code() for worker in others)],
        }


if __name__ == "__main__":
    sys.exit(main())
