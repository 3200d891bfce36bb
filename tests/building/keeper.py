"""Starts commands, and ends them with everything that they have started, however its parent ends.

    python tests/building/keeper.py FOLDER    # a JSON object a line on stdin, a process id each on
                                              # stdout

It adopts the orphans of what it starts. At the end of its stdin it kills all its descendants and
removes the folder.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def children() -> dict[int, list[int]]:
    """Returns the ids of the live children of each process."""
    found: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = file.read_text(errors="replace").rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            found.setdefault(int(parent), []).append(int(file.parent.name))
    return found


def descendants(pid: int) -> list[int]:
    """Returns the ids of the live processes below a process, parents first."""
    of_each = children()
    found = list(of_each.get(pid, ()))
    for child in found:
        found += of_each.get(child, ())
    return found


def _end_all() -> None:
    while left := descendants(os.getpid()):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.01)


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the adopted ones
    for line in sys.stdin:
        wanted = json.loads(line)
        with Path(wanted["log"]).open("a") as log:
            process = subprocess.Popen(
                wanted["command"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=wanted["folder"],
                env=wanted["environment"],
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_DFL),
            )
        print(process.pid, flush=True)
    _end_all()
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
