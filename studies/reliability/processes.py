"""Finds the processes of one run by their folder: workers, their trial servers and trials."""

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Family:
    workers: tuple[int, ...]
    servers: tuple[int, ...]
    trials: tuple[int, ...]


def processes_of(folder: Path) -> dict[int, int]:
    """Process id to parent, of every other live process that works in `folder` or below it."""
    found = {}
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if link.parent.name == str(os.getpid()) or not Path(os.readlink(link)).is_relative_to(
                folder
            ):
                continue
            state, parent = (link.parent / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                found[int(link.parent.name)] = int(parent)
        except OSError:
            continue
    return found


def family(folder: Path, workers: Collection[int] | None = None) -> Family:
    """Workers, by default the children of this process, their children, and theirs."""
    parents = processes_of(folder)

    def children(of: Collection[int]) -> tuple[int, ...]:
        return tuple(pid for pid, parent in parents.items() if parent in of)

    if workers is None:
        workers = children({os.getpid()})
    servers = children(workers)
    return Family(workers=tuple(workers), servers=servers, trials=children(servers))


def wait_until_gone(folder: Path, *, seconds: float = 30.0) -> list[int]:
    """Who is still there after so long."""
    end = time.monotonic() + seconds
    while (left := list(processes_of(folder))) and time.monotonic() < end:
        time.sleep(0.05)
    return left
