"""Says who holds a lock that somebody waits for: process, user, and since when the process runs."""

import os
import pwd
import time
from collections.abc import Sequence
from pathlib import Path


def describe_process(pid: int, user: int) -> str:
    """Returns `process 17 of user ada, which runs since 2026-01-31 14:05`.

    `pid` is 0 for a process of another pid namespace, and the time is left out where it is not
    known.
    """
    process = f"process {pid}" if pid else "a process"
    return f"{process} of user {_user_name(user)}{_since(pid)}"


def holder_of(files: Sequence[Path]) -> str:
    """Returns which other process has one of the files locked; empty where unknown.

    By `flock`, or for writing by `fcntl`, as SQLite does with the file itself or with its `-shm`
    file. Only Linux lists such locks.
    """
    wanted = set()
    for file in files:
        try:
            status = file.stat()
        except OSError:
            continue
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        wanted.add(f"{device}:{status.st_ino}")
    try:
        # 1: POSIX  ADVISORY  WRITE 4711 fe:00:1836 120 120
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
        for line in lines:
            words = line.split()
            is_held = len(words) == 8 and (words[1] == "FLOCK" or words[3] == "WRITE")
            if is_held and words[5] in wanted and int(words[4]) not in (0, os.getpid()):
                pid = int(words[4])
                return describe_process(pid, Path(f"/proc/{pid}").stat().st_uid)
    except (OSError, ValueError):
        pass  # not Linux, or the holder has just ended
    return ""


def _since(pid: int) -> str:
    """Returns when a process began, in local time; empty where it is not known."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        kernel = Path("/proc/stat").read_text(encoding="utf-8")
        # The name of the program, in parentheses, may hold anything; the begin is field 22 of all.
        ticks = int(status.rpartition(")")[2].split()[19])
        booted = int(kernel.partition("\nbtime ")[2].split()[0])
    except (OSError, ValueError, IndexError):
        return ""  # no /proc, or a process that has ended or is not visible here
    began = time.localtime(booted + ticks / os.sysconf("SC_CLK_TCK"))
    return f", which runs since {time.strftime('%Y-%m-%d %H:%M', began)}"


def _user_name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
