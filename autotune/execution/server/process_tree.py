"""Finds and ends every process that a trial has started, also in another session.

Reads /proc of Linux; on other systems it finds nothing. A process can leave its group and its
session, and lose its parent, but it stays a descendant: each trial is the reaper of its orphans,
and the server is the reaper of the orphans of an ended trial. Its environment also contains a
variable of the server, by which it is found after the server has died.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

_PASS_SECONDS = 0.005
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with(parent_pid: int) -> None:
    """Has the kernel kill this process when its parent dies, such as the server."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def become_reaper() -> None:
    """Makes orphaned descendants children of this process, so that it can wait for them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    """Calls Linux's prctl; does nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def descendants(pid: int, *, except_of: Iterable[int] = ()) -> list[int]:
    """Returns the living descendants of `pid`, without those in `except_of` and below."""
    excluded = set(except_of)
    found = []
    to_visit = [pid]
    children = _children_by_parent()
    while to_visit:
        parent = to_visit.pop()
        for child in children.get(parent, ()):
            if child not in excluded:
                found.append(child)
                to_visit.append(child)
    return found


def _children_by_parent() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for pid in _pids():
        parent = _parent_pid(pid)
        if parent is not None:
            children.setdefault(parent, []).append(pid)
    return children


def _parent_pid(pid: int) -> int | None:
    """Returns the parent's pid; None for a process that has ended, reaped or not."""
    try:
        content = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command, in parentheses, may contain spaces and parentheses itself.
    state, parent = content.rpartition(b")")[2].split()[:2]
    if state in (b"Z", b"X"):
        return None
    return int(parent)


def started_under(mark: str) -> list[int]:
    """Returns every process of this user whose initial environment contains `mark`."""
    found = []
    for pid in _pids():
        try:
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
        except OSError:
            continue  # a process of another user, or one that has just ended
    return found


def _pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def send(pids: Iterable[int], *signals: signal.Signals) -> None:
    """Sends the signals to each process that still exists."""
    for pid in pids:
        for number in signals:
            _send(os.kill, pid, number)


def send_to_group(pid: int, *signals: signal.Signals) -> None:
    """Sends the signals to the process group of `pid`, and to `pid`, which may not lead it yet."""
    for number in signals:
        _send(os.killpg, pid, number)
        _send(os.kill, pid, number)


def kill_all(
    find: Callable[[], Sequence[int]], *, within_seconds: float, between: Callable[[], object]
) -> None:
    """Kills what `find` returns until it returns nothing, as processes may fork in the meantime.

    Waits until they have ended: a process that is exiting still holds memory of the device. Calls
    `between` in each round, to reap the dead. A process that cannot be killed, because it hangs in
    the kernel or belongs to another user, is left behind after `within_seconds`.
    """
    end = time.monotonic() + within_seconds
    killed: set[int] = set()
    while True:
        pids = find()
        if not pids and all(_parent_pid(pid) is None for pid in killed):
            return
        send(pids, signal.SIGKILL)
        killed.update(pids)
        time.sleep(_PASS_SECONDS)
        between()
        if time.monotonic() > end:
            return


def _send(kill: Callable[[int, int], None], pid: int, number: signal.Signals) -> None:
    try:
        kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass
