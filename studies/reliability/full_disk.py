"""Fills the disk with the studies folder during a search and frees some of it again.

    python studies/reliability/full_disk.py > studies/reliability/full_disk.json

Needs root, because it mounts a tmpfs. The space is freed once before the workers stop retrying and
once after.
"""

import errno
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from studies.reliability.quick_study import QuickStudy, quick_study, report, say

TRIALS = 150
DISK_MIB = 24


def main() -> int:
    found: list[str] = []
    try:
        with _small_disk():
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        return report({"skipped": f"a small disk cannot be mounted here: {error}"}, [])
    seen = {
        "freed_in_time": _full(found, wait="300", seconds=20.0),
        "freed_after_the_wait": _full(found, wait="5", seconds=20.0),
    }
    return report(seen, found)


def _full(found: list[str], *, wait: str, seconds: float) -> dict[str, Any]:
    with (
        _small_disk() as disk,
        quick_study(storage=f"sqlite:///{disk}/quick.db", trials=TRIALS, places=2) as study,
    ):
        workers = [study.start("--events", "--database-wait", wait, seconds=0.3) for _ in range(2)]
        study.wait_for_results(10)
        filler = disk / "filler"
        _fill(filler)
        at_full = study.results()
        say(f"full at {at_full} results")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            _fill(filler)  # what a log or a checkpoint gives back is taken too
            time.sleep(0.2)
        alive = sum(worker.process.poll() is None for worker in workers)
        spooled = len(list(disk.glob("work/*/quick/spool/*.json")))
        during = study.results()
        at_start_said = _begun_on_a_full_disk(study) if alive == 0 else []
        filler.unlink()
        say(f"freed at {during} results, {alive} workers alive")
        codes = [worker.exit_code() for worker in workers]
        again = (
            [study.start("--database-wait", wait, seconds=0.1) for _ in range(2)]
            if any(codes)
            else []
        )
        again_codes = [worker.exit_code() for worker in again]
        said = [[line for line in one.said if not line.startswith("Trial")][-4:] for one in workers]
        found += study.violations()
        if wait == "300" and any(codes):
            found.append(f"a worker did not wait: {codes} {said}")
        if wait == "5" and (codes != [75, 75] or any(again_codes)):
            found.append(f"exit codes {codes}, then {again_codes}: {said}")
        return {
            "database_wait_seconds": float(wait),
            "seconds_full": seconds,
            "results_when_it_was_full": at_full,
            "results_when_it_was_freed": during,
            "workers_alive_then": alive,
            "results_that_waited_on_disk": spooled,
            "exit_codes": codes,
            "said_last": said,
            "said_by_a_search_begun_meanwhile": at_start_said,
            "exit_codes_of_the_same_command": again_codes,
            "attempts": study.attempts(),
        }


def _begun_on_a_full_disk(study: QuickStudy) -> list[Any]:
    worker = study.start("--database-wait", "5")
    code = worker.exit_code()
    study.workers.remove(worker)
    return [code, worker.said[-3:]]


@contextmanager
def _small_disk() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="autotune-disk-") as folder:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", folder], check=True
        )
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def _fill(file: Path) -> None:
    """By ever smaller pieces, to the last byte."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for piece in (2**20, 2**12, 1):
            try:
                while True:
                    os.write(descriptor, bytes(piece))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
