"""Reads how much of the host's memory this process can still allocate.

The limit is what the machine has left or, if less, what the control groups of the process have
left. The kernel kills a process that exceeds it; in a container often the whole search, however
much the machine has left. Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, section
Memory; man proc_meminfo
"""

import re
import resource
from collections.abc import Iterator
from pathlib import Path

_UNLIMITED_BYTES = 2**60
"""Control groups of version 1 express "no limit" as a number close to the largest integer."""


_share: tuple[int, int] | None = None
"""The bytes that this process may take, as one of so many that share what the host has left."""


class HostMemoryExceeded(MemoryError):
    """A trial was about to allocate more memory of the host than is available.

    The message has the sizes and what to change.
    """


def available_bytes(
    *, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Returns the bytes that can be allocated without swapping or killing; None where unknown."""
    sizes = [*_left_on_the_machine(proc), *_left_in_the_groups(proc, groups)]
    if _share is not None:
        sizes.append(_share[0])
    return max(0, min(sizes)) if sizes else None


def share_with_others(available: int | None, *, processes: int) -> None:
    """Lets this process take an equal part of the `available` bytes, and of its own limit.

    Must be called once, in each of as many processes, before they take any. What they were told
    alone would let all of them together take several times what the host has.
    """
    global _share
    if available is not None:
        _share = (available // processes, processes)
    limit, most = resource.getrlimit(resource.RLIMIT_DATA)
    taken = re.search(r"^VmData:\s+(\d+) kB$", _read(Path("/proc/self/status")), re.MULTILINE)
    if limit != resource.RLIM_INFINITY and taken:
        taken_bytes = int(taken[1]) * 1024
        part = taken_bytes + max(0, limit - taken_bytes) // processes
        resource.setrlimit(resource.RLIMIT_DATA, (part, most))


def when_it_was_left() -> str:
    """Returns the words for `available_bytes` in a message."""
    each = f" for each of {_share[1]} devices" if _share is not None else ""
    return f"that the host had left{each} when the trial began"


def _left_on_the_machine(proc: Path) -> Iterator[int]:
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(proc / "meminfo"), re.MULTILINE)
    if found:
        yield int(found[1]) * 1024


def _left_in_the_groups(proc: Path, groups: Path) -> Iterator[int]:
    """Yields the bytes left in the group of the process and in each parent group.

    Reads both versions of control groups.
    """
    for line in _read(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            top, names = groups, ("memory.max", "memory.current", "inactive_file", "active_file")
        elif "memory" in controllers.split(","):
            names = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
                "total_active_file",
            )
            top = groups / "memory"
        else:
            continue
        group_of_process = top / path.lstrip("/")
        parents = [group for group in group_of_process.parents if group.is_relative_to(top)]
        for group in (group_of_process, *parents):
            yield from _left_in_group(group, *names)


def _left_in_group(group: Path, limit: str, usage: str, *cached_files: str) -> Iterator[int]:
    """Yields the limit of a group minus its usage, nothing for a group without a limit.

    Cached files count as free, as in MemAvailable: the kernel drops them when it needs memory.
    """
    limit_text = _read(group / limit).strip()
    usage_text = _read(group / usage).strip()
    if not limit_text.isdecimal() or not usage_text.isdecimal():
        return
    if int(limit_text) > _UNLIMITED_BYTES:
        return
    lines = _read(group / "memory.stat").splitlines()
    statistics = dict(line.split(" ", 1) for line in lines if " " in line)
    cached_bytes = sum(int(statistics.get(name, 0)) for name in cached_files)
    yield int(limit_text) - int(usage_text) + cached_bytes


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="surrogateescape")
    except OSError:
        return ""
