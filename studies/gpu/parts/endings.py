"""Part 8: searches and trials that are killed or hang, and whether device memory is released."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from studies.gpu import used_memory
from studies.gpu.items import Item, Missing, Part, Place, Settings, TimeIsUp
from studies.gpu.processes import (
    MORE_THAN_THERE_ARE,
    PROGRAMS,
    STORAGE,
    CommandFailed,
    environment,
    run,
    space,
    trials_of,
)

MIB = 2**20
GROWN_BYTES = {True: 100 * MIB, False: 2**30}
"""A trial is running once the device holds so much more; in a rehearsal and else."""
BACK_BYTES = 16 * MIB
"""Memory is given back when no more than this is missing."""
START_SECONDS = 90.0
BACK_SECONDS = 30.0
LOOK_SECONDS = 0.02
SETTLED_SECONDS = 1.0
"""After a trial holds its memory, for it to be at its steps."""
STEP_TIME_LIMIT = "8s"
WAYS = ("sleeps", "never-ending kernels", "out of memory", "illegal access", "kills itself")
"""Of `programs/ends_badly.py`."""
SIGNALS = {
    "search-killed": signal.SIGKILL,
    "search-terminated": signal.SIGTERM,
    "search-interrupted": signal.SIGINT,
}


def items(settings: Settings) -> list[Item]:
    killed = [
        Item(name=name, work=partial(_signalled, name=name), least_seconds=60.0) for name in SIGNALS
    ]
    trial = Item(name="trial-killed", work=_trial_killed, least_seconds=75.0)
    scripts = [
        Item(
            name=f"script-{way.replace(' ', '-')}",
            work=partial(_script, way=way),
            least_seconds=60.0,
        )
        for way in WAYS
    ]
    return [killed[0], scripts[0], scripts[1], trial, *killed[1:], *scripts[2:]]


# -- what the device holds -------------------------------------------------------------------------


def used_bytes(device: str) -> int:
    """Of all processes together. Raises Missing."""
    used = used_memory.used_bytes(device)
    if used is None:
        raise Missing("needs NVML to see the device's memory without a context")
    return used


def wait_until_back(device: str, before: int) -> dict[str, Any]:
    """How long it takes until the device holds what it held before, and what it holds then."""
    began = time.monotonic()
    while (
        used := used_bytes(device)
    ) > before + BACK_BYTES and time.monotonic() - began < BACK_SECONDS:
        time.sleep(LOOK_SECONDS)
    return {
        "used_before_bytes": before,
        "used_after_bytes": used,
        "seconds_until_back": round(time.monotonic() - began, 2),
        "is_back": used <= before + BACK_BYTES,
    }


def wait_until_trained(
    name: str, before: int, *, place: Place, process: "subprocess.Popen[bytes]"
) -> int:
    """What the device holds once a trial of study `name` is at its steps.

    Raises CommandFailed where none begins.

    A probe of the device and the first steps that trials are compared with hold memory earlier:
    only a trial has a log.
    """
    grown = GROWN_BYTES[place.settings.rehearse]
    began = time.monotonic()
    while time.monotonic() - began < min(START_SECONDS, place.clock.left()):
        if process.poll() is not None:
            raise CommandFailed(
                f"the search ended with {process.returncode} before a trial held {grown} bytes"
            )
        has_begun = any((place.folder / "work").glob(f"*/{name}/logs/trial-*.log"))
        if has_begun and used_bytes(place.settings.device) >= before + grown:
            time.sleep(SETTLED_SECONDS)
            if (used := used_bytes(place.settings.device)) >= before + grown:
                return used
        time.sleep(LOOK_SECONDS)
    raise CommandFailed(f"no trial held {grown} bytes within {START_SECONDS:.0f} s")


# -- searches that are ended -----------------------------------------------------------------------


@contextmanager
def searching(place: Place, name: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A search with a long trial, in a session of its own; ended with the block."""
    words = [
        "search",
        "--name",
        name,
        "--device",
        place.settings.device,
        "--fresh",
        "--no-confirm",
        "--json",
        "--no-predict",
    ]
    words += [
        *space("plain", place),
        "--storage",
        STORAGE,
        "--trials",
        MORE_THAN_THERE_ARE,
        "--quiet",
    ]
    log_file = place.folder / "logs" / f"{name}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "autotune", *words],
            cwd=place.folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            process_group=0,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _signalled(place: Place, name: str) -> Mapping[str, Any]:
    """The whole search gets one signal while a trial runs."""
    place.needs_cuda()
    device = place.settings.device
    before = used_bytes(device)
    with searching(place, name) as process:
        held = wait_until_trained(name, before, place=place, process=process)
        began = time.monotonic()
        process.send_signal(SIGNALS[name])
        back = wait_until_back(device, before)
        process.wait(timeout=BACK_SECONDS)
        ended = round(time.monotonic() - began, 2)
    code = process.returncode
    return {
        "signal": SIGNALS[name].name,
        "held_bytes": held - before,
        "code": code,
        "seconds": ended,
        **back,
    }


def _trial_killed(place: Place) -> Mapping[str, Any]:
    """The trial's own process is killed: the search should go on and try it again."""
    place.needs_cuda()
    device = place.settings.device
    before = used_bytes(device)
    with searching(place, "trial-killed") as process:
        held = wait_until_trained("trial-killed", before, place=place, process=process)
        trials = trials_under(process.pid)
        for pid in trials:
            os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        lowest = used_bytes(device)
        while time.monotonic() - began < 10.0 and lowest > before + BACK_BYTES:
            lowest = min(lowest, used_bytes(device))
        seconds = round(time.monotonic() - began, 2)
        try:
            again = (
                wait_until_trained("trial-killed", before, place=place, process=process) - before
            )
        except CommandFailed as error:
            again = f"not: {error}"
        process.send_signal(signal.SIGTERM)
        back = wait_until_back(device, before)
    return {
        "trials_killed": len(trials),
        "held_bytes": held - before,
        "least_used_between_bytes": lowest - before,
        "seconds_until_least": seconds,
        "trained_again": again,
        **back,
    }


def trials_under(search: int) -> list[int]:
    """Returns the processes of trials, which have the command line of the trial server."""
    parents: dict[int, int] = {}
    servers: set[int] = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError, ValueError):
                words = (folder / "cmdline").read_bytes()
                parents[int(folder.name)] = int(
                    (folder / "stat").read_text().rpartition(")")[2].split()[1]
                )
                if b"autotune.execution.server.fork_server" in words:
                    servers.add(int(folder.name))
    mine = {pid for pid in servers if parents[pid] == search}
    return [pid for pid in servers if parents[pid] in mine]


# -- scripts that end badly ------------------------------------------------------------------------


def _script(place: Place, way: str) -> Mapping[str, Any]:
    """Searches with a script that ends in this way; returns outcomes and memory."""
    place.needs_cuda()
    before = used_bytes(place.settings.device)
    name = f"script-{way.replace(' ', '-')}"
    words = [
        "search",
        "--script",
        str(PROGRAMS / "ends_badly.py"),
        "--global-batch",
        "8",
        "--steps",
        "12",
    ]
    words += [
        "--space",
        str(script_space(place)),
        "--trials",
        "1",
        "--no-predict",
        "--no-confirm",
        "--fresh",
        "--json",
        "--quiet",
    ]
    words += ["--name", name, "--device", place.settings.device, "--storage", STORAGE]
    words += ["--step-time-limit", STEP_TIME_LIMIT]
    command = [sys.executable, "-m", "autotune", *words]
    began = time.monotonic()
    ended = run(command, place=place, log_name=name, extra={"ENDS_BADLY": way}, seconds=120.0)
    seconds = round(time.monotonic() - began, 2)
    if ended.is_cut and place.clock.left() <= 0:
        raise TimeIsUp
    back = wait_until_back(place.settings.device, before)
    trials = trials_of(ended_study(ended.output))
    outcomes = [{key: trial[key] for key in ("outcome", "message", "seconds")} for trial in trials]
    # A trial that the machine ended again and again ends the search itself; its message says so.
    return {
        "code": ended.code,
        "seconds": seconds,
        "trials": outcomes,
        "said": ended.log[-600:],
        **back,
    }


def ended_study(output: str) -> Mapping[str, Any]:
    try:
        return dict(json.loads(output))
    except ValueError:
        return {}


def script_space(place: Place) -> Path:
    file = place.folder / "script.toml"
    file.write_text(
        'description = "one trial"\n'
        '[[configurations]]\nname = "foreach"\noptimizer_fusion = "foreach"\n'
    )
    return file


def summary(results: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    for item, found in results.items():
        numbers: Sequence[str] = [
            f"{name.removesuffix('_bytes')} {value / MIB:,.0f} MiB"
            for name, value in found.items()
            if name.endswith("_bytes")
        ]
        said = "memory is back" if found["is_back"] else "MEMORY IS NOT BACK"
        ended = f"; tried again: {found['trained_again']}" if "trained_again" in found else ""
        ended += f"; the search ended with {found['code']}" if "code" in found else ""
        outcomes = "".join(
            f"; {trial['outcome']}: {trial['message'][:100]}" for trial in found.get("trials", ())
        )
        yield (
            f"{item}: {said} after {found['seconds_until_back']} s; "
            f"{', '.join(numbers)}{ended}{outcomes}"
        )


PART = Part(
    name="endings",
    minutes=9.0,
    about="kills and hangs, and whether memory is released",
    items=items,
    summary=summary,
)
