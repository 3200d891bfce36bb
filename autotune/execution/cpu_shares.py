"""Divides the CPUs of a machine between trials that run at once, and says which they are."""

import os
import platform
from pathlib import Path


def cpu_share(place: int, *, of: int, most_cpus: int | None = None) -> tuple[int, ...] | None:
    """Returns the CPUs of one of several places: equal shares of those this process may use.

    A single place is bound to none. What does not divide is left idle, so that speeds compare.
    Where there are more places than CPUs, several share one. No more than `most_cpus` are used.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    all_usable = sorted(os.sched_getaffinity(0))
    usable = all_usable[: most_cpus or None]
    if of == 1:
        return None if len(usable) == len(all_usable) else tuple(usable)
    if of >= len(usable):
        return (usable[place % len(usable)],)
    size = len(usable) // of
    return tuple(usable[size * place : size * (place + 1)])


def cpu_shares(count: int) -> list[tuple[int, ...] | None]:
    """Returns the share of each of `count` places on this machine."""
    return [cpu_share(place, of=count) for place in range(count)]


def sharing_of_cpus(count: int, *, most_cpus: int | None = None) -> str:
    """Returns in words that `count` places share CPUs, where they are more than those; else "".

    It becomes part of the CPU's name: what was measured so compares only with its like, and is not
    reused by a study whose places have CPUs of their own.
    """
    if not hasattr(os, "sched_getaffinity"):
        return ""
    usable = len(sorted(os.sched_getaffinity(0))[: most_cpus or None])
    return f"{count} trials on {usable} CPU{'s' * (usable > 1)}" if count > usable else ""


def cpu_name() -> str:
    """Returns the name of the CPU's model, such as `AMD EPYC`."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []  # not Linux
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
