"""Moves the clock by an hour, forward and back, during a search of three workers on SQLite.

    python studies/reliability/clock.py > studies/reliability/clock.json

Only the workers see the moved clock (`moved_clock.c`, preloaded into them and all that they start),
not the machine; for SQLite it is the clock of the database as well. One worker runs a trial of
minutes meanwhile. In the end it is killed and its lock file removed, so that only its lease shows
that it is dead, as on another machine.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from studies.reliability.quick_study import QuickStudy, quick_study, report, say

HOUR = 3600
SECONDS_A_PHASE = 50.0
PHASES = (
    ("all an hour forward", (HOUR, HOUR, HOUR)),
    ("all an hour back", (-HOUR, -HOUR, -HOUR)),
    ("one an hour forward, one an hour back", (0, HOUR, -HOUR)),
    ("all as they were", (0, 0, 0)),
)


def main() -> int:
    found: list[str] = []
    seen = {
        "while_it_lives": _study(found, phases=PHASES, then="kept"),
        "killed_then_forward": _study(
            found, phases=(("all an hour forward", (0, HOUR, HOUR)),), then="killed before"
        ),
        "killed_then_back": _study(
            found, phases=(("all an hour back", (0, -HOUR, -HOUR)),), then="killed before"
        ),
    }
    return report(seen, found)


def _study(
    found: list[str], *, phases: tuple[tuple[str, tuple[int, ...]], ...], then: str
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with quick_study(trials=120, places=3) as study:
        library = study.folder / "moved_clock.so"
        source = Path(__file__).with_name("moved_clock.c")
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True
        )
        clocks = [study.folder / f"clock-{number}" for number in range(3)]
        _move(clocks, (0, 0, 0))
        gate = study.folder / "gate"
        moved = [{"LD_PRELOAD": str(library), "MOVED_CLOCK": str(clock)} for clock in clocks]
        long = study.start("--events", "--time-limit", "3000", STAND_IN_GATE=str(gate), **moved[0])
        study.wait_until(lambda: study.running() == 1, what="the long trial")
        for environment in moved[1:]:
            study.start("--events", seconds=2.0, **environment)
        study.wait_for_results(4)
        if then == "killed before":
            _kill_as_elsewhere(study, long.pid)
        for what, seconds in phases:
            before = study.results()
            _move(clocks, seconds)
            say(what)
            if then == "killed before":
                began = time.monotonic()
                study.wait_until(
                    lambda: study.attempts().get("given_up", 0) == 1,
                    what="it to be given up",
                    seconds=400,
                )
                rows.append(
                    {"clock": what, "seconds_to_given_up": round(time.monotonic() - began, 1)}
                )
            else:
                time.sleep(SECONDS_A_PHASE)
                rows.append(
                    {
                        "clock": what,
                        "results": study.results() - before,
                        "attempts": study.attempts(),
                    }
                )
            say(str(rows[-1]))
        gate.touch()
        codes = study.exit_codes()
        found += study.violations()
        if then == "kept" and set(study.attempts()) != {"finished"}:
            found.append(f"a living worker's attempt was given up: {study.attempts()}")
        if any(code not in (0, -signal.SIGKILL) for code in codes):
            found.append(f"exit codes {codes}: {study.last_words()}")
        rows.append({"exit_codes": codes, "attempts": study.attempts()})
    return rows


def _move(clocks: list[Path], seconds: tuple[int, ...]) -> None:
    for clock, moved in zip(clocks, seconds, strict=True):
        unfinished = clock.with_suffix(".new")
        unfinished.write_text(str(moved))
        unfinished.rename(clock)


def _kill_as_elsewhere(study: QuickStudy, pid: int) -> None:
    locks = {file for file in study.folder.glob("work/*/quick/workers/*.lock") if _is_of(file, pid)}
    for file in locks:
        file.unlink()
    os.kill(pid, signal.SIGKILL)


def _is_of(file: Path, pid: int) -> bool:
    opened = (descriptor.resolve() for descriptor in Path(f"/proc/{pid}/fd").iterdir())
    return file.resolve() in opened


if __name__ == "__main__":
    sys.exit(main())
