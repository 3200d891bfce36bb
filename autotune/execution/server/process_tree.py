"""Finds every process that a trial has started, wherever it went, and ends it.

Reads Linux's /proc; elsewhere nothing.

A process can leave its group and its session, and lose its parent. It cannot leave its ancestors:
each trial is the reaper of its own orphans, and the server that of a trial which has ended. Nor can
it forget the environment that the server was started with, which finds it when the server itself is
gone.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

_PASS_SECONDS = 0.005


def descendants(pid: int, *, except_of: Iterable[int] = ()) -> list[int]:
    """Children of `pid`, their children and so on, but for `except_of` and theirs; the dead not counted."""
    left_out, found, looked_at = set(except_of), [], [pid]
    children = _children_by_parent()
    while looked_at:
        of_one = [child for child in children.get(looked_at.pop(), ()) if child not in left_out]
        found += of_one
        looked_at += of_one
    return found


def _children_by_parent() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for pid in _pids():
        if (parent := _parent_of(pid)) is not None:
            children.setdefault(parent, []).append(pid)
    return children


def _parent_of(pid: int) -> int | None:
    """None for a process that has ended, whether or not somebody has noticed."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:2]
    except OSError:
        return None
    return None if state in (b"Z", b"X") else int(parent)


def started_under(mark: str) -> list[int]:
    """Every process of this user whose first environment, its own or its ancestor's, holds `mark`."""
    found = []
    for pid in _pids():
        try:
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
        except OSError:
            continue  # another user's, or it has just ended
    return found


def _pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def send(pids: Iterable[int], *signals: signal.Signals) -> None:
    for pid in pids:
        for number in signals:
            _send(os.kill, pid, number)


def send_to_group(pid: int, *signals: signal.Signals) -> None:
    """To the process group that `pid` leads, and to `pid` itself, which may not have become its leader yet."""
    for number in signals:
        _send(os.killpg, pid, number)
        _send(os.kill, pid, number)


def kill_all(
    find: Callable[[], Sequence[int]], *, within_seconds: float, between: Callable[[], object]
) -> None:
    """Kills what `find` finds until it finds nothing, for new ones may be forked meanwhile; `between` reaps the dead.

    Waits until they are gone: one that is on its way out still holds memory of the device. What
    cannot be killed, as it waits in the kernel or belongs to another user, is left behind in the
    end.
    """
    end = time.monotonic() + within_seconds
    killed: set[int] = set()
    while (pids := find()) or any(_parent_of(pid) is not None for pid in killed):
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
