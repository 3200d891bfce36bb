"""Divides the CPUs of a machine between trials that run at once, and says which they are."""

import os
import platform
from contextlib import suppress
from pathlib import Path

from autotune.errors import InvalidInput

LEAST_CORES_BESIDE, MOST_BESIDE = 4, 4

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def usable_cpus() -> tuple[int, ...]:
    """Returns the CPUs that this process may use, by their numbers."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def usable_cores() -> float:
    """Returns how many cores this process may use, which may be a part of its CPUs' time.

    A container may have such a part (`cpu.max` of control groups, Linux 4.15).
    """
    cores = float(len(usable_cpus()))
    with suppress(OSError, ValueError):  # no such file, or `max` in the place of a quota
        quota, period = _CPU_MAX.read_text().split()
        cores = min(cores, int(quota) / int(period))
    return cores


def processes_beside(*, places: int) -> int:
    """Returns how many processes may run beside the trial of each of several places.

    None where it has fewer than `LEAST_CORES_BESIDE` cores.
    """
    cores = int(usable_cores() / places)
    return 0 if cores < LEAST_CORES_BESIDE else min(cores // 2, MOST_BESIDE)


def cpu_share(place: int, *, of: int, most_cpus: int | None = None) -> tuple[int, ...] | None:
    """Returns the CPUs of one of several places: equal shares of those this process may use.

    A single place is bound to none. What does not divide is left idle, so that speeds compare.
    Where there are more places than CPUs, several share one. No more than `most_cpus` are used.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    all_usable = usable_cpus()
    usable = all_usable[: most_cpus or None]
    if of == 1:
        return None if usable == all_usable else usable
    if of >= len(usable):
        return (usable[place % len(usable)],)
    size = len(usable) // of
    return usable[size * place : size * (place + 1)]


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
    usable = len(usable_cpus()[: most_cpus or None])
    return f"{count} trials on {usable} CPU{'s' * (usable > 1)}" if count > usable else ""


RANKS_PER_CORE = 4
"""How many ranks of a trial a core of a CPU may have. Each needs hundreds of MiB, too."""


def check_ranks_on_cpu(count: int, *, trials: int = 1, cores: int | None = None) -> None:
    """Raise InvalidInput for more ranks than a CPU can take turns with.

    `count` are those of a trial, of which `trials` run at a time. `cores` None: this machine's.
    """
    if cores is None:
        cores = len(usable_cpus())
    most = RANKS_PER_CORE * cores
    if count > most:
        raise InvalidInput(
            f"a trial cannot use {count} devices on a CPU with {cores} cores, which would be "
            f"{count} processes",
            hint=f"use --devices-per-trial {most} or fewer; autotune predict needs no devices",
        )
    if count * trials > most:
        raise InvalidInput(
            f"{trials} trials of {count} devices cannot run at a time on a CPU with {cores} cores, "
            f"which would be {count * trials} processes",
            hint=f"run at most {most // count} at a time, with --devices {most // count * count}",
        )


def check_is_one_node(nodes: int) -> None:
    """Raise InvalidInput for a trial on several nodes, where trials run on this machine."""
    if nodes > 1:
        raise InvalidInput(
            f"a trial on {nodes} nodes needs a Ray cluster, and this one would run on this machine",
            hint="give its address with --ray, such as --ray auto, or --nodes-per-trial 1; "
            "autotune predict needs no nodes",
        )


def check_system_for_ranks(count: int) -> None:
    """Raise InvalidInput where this system has no file in memory, through which ranks meet."""
    if not hasattr(os, "memfd_create"):
        raise InvalidInput(
            f"trials on {count} devices run on Linux only, and this is {platform.system()}",
            hint="search on Linux; autotune predict, and fit --no-trial, work here",
        )
