"""How much of the host's memory this process can still take: what the machine has left, and its control group.

The kernel kills who takes more. In a container that is often the whole search, whatever the machine
has left. Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, section Memory; man
proc_meminfo
"""

import re
from collections.abc import Iterator
from pathlib import Path

_UNLIMITED_BYTES = 2**60
"""Version 1 of control groups states no limit as a number near the largest one."""


class HostMemoryExceeded(MemoryError):
    """A trial was about to take more of the host's memory than there was; says how much, and the way out."""


def available_bytes(
    *, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Returns the bytes that can be taken without anything being killed or swapped out; None where nothing says so."""
    sizes = [*_left_on_the_machine(proc), *_left_in_the_groups(proc, groups)]
    return max(0, min(sizes)) if sizes else None


def _left_on_the_machine(proc: Path) -> Iterator[int]:
    if found := re.search(r"^MemAvailable:\s+(\d+) kB$", _read(proc / "meminfo"), re.MULTILINE):
        yield int(found[1]) * 1024


def _left_in_the_groups(proc: Path, groups: Path) -> Iterator[int]:
    """Of the process's own group and of each one around it, in either version of control groups."""
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
        own = top / path.lstrip("/")
        for group in (own, *(parent for parent in own.parents if parent.is_relative_to(top))):
            yield from _left_in_group(group, *names)


def _left_in_group(group: Path, limit: str, usage: str, *cached_files: str) -> Iterator[int]:
    """The limit less what is in use, of which the kernel takes cached files back by itself, as MemAvailable counts."""
    limit_text, usage_text = _read(group / limit).strip(), _read(group / usage).strip()
    if (
        not limit_text.isdecimal()
        or not usage_text.isdecimal()
        or int(limit_text) > _UNLIMITED_BYTES
    ):
        return
    statistics = dict(
        line.split(" ", 1) for line in _read(group / "memory.stat").splitlines() if " " in line
    )
    cached_bytes = sum(int(statistics.get(name, 0)) for name in cached_files)
    yield int(limit_text) - int(usage_text) + cached_bytes


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="surrogateescape")
    except OSError:
        return ""
