"""Commands in processes of their own, ended in time with all that they started."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.gpu.items import Place, TimeIsUp

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"

GRACE_SECONDS = 10.0
"""For a command to end cleanly after SIGINT; a search keeps its results then."""
LAST_CHARACTERS = 2000
STORAGE = "sqlite:///results.db"
"""In the part's own folder, which is the current one of its commands."""
NOTHING_FEASIBLE = 1
MORE_THAN_THERE_ARE = "100"
"""Trials to ask for where a space names its configurations and all of them are wanted."""
TIME_LIMITS = ("--trial-time-limit", "4m", "--compile-time-limit", "3m")
"""A whole model compiles for a minute from a cold cache; what hangs costs no part all of its time.
"""
LATEST_TRIAL_SECONDS = 40.0
"""A search begins no trial when less is left: it would hardly end in time."""
SHOW_SECONDS = 8.0
"""For reading what there is of a study that was stopped."""


class CommandFailed(Exception):
    """A command ended with an exit code that it should not have."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    code: int
    output: str
    log: str
    """The end of what went to stderr."""
    is_cut: bool
    """Whether it was ended because the time was up."""

    def last_json(self) -> dict[str, Any]:
        """The object that the last line of the output is."""
        lines = self.output.strip().splitlines()
        found = json.loads(lines[-1]) if lines else None
        if not isinstance(found, dict):
            raise CommandFailed(f"no result was printed: {self.log[-LAST_CHARACTERS:]}")
        return found


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The caller's, in which Python looks into this checkout first."""
    before = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    python_path = os.pathsep.join([str(ROOT), *before])
    return {**os.environ, "PYTHONPATH": python_path, "PYTHONUNBUFFERED": "1", **(extra or {})}


def run(
    words: Sequence[str],
    *,
    place: Place,
    log_name: str,
    folder: Path | None = None,
    seconds: float | None = None,
    extra: Mapping[str, str] | None = None,
    grace_seconds: float = GRACE_SECONDS,
) -> Ended:
    """Runs a command until it ends, for `seconds` and no longer than the part's time.

    Its output is returned; its stderr goes to `logs/LOG_NAME.log` in the part's folder.
    """
    log_file = place.folder / "logs" / f"{log_name}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    limit = place.clock.left() if seconds is None else min(seconds, place.clock.left())
    with log_file.open("ab") as log:
        log.write(f"$ {' '.join(words)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            words,
            cwd=folder or place.folder,
            env=environment(extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            process_group=0,  # ended as a whole, and still of our session: gone with it
        )
        is_cut = False
        try:
            output, _ = process.communicate(timeout=max(1.0, limit))
        except subprocess.TimeoutExpired:
            is_cut = True
            output = _end(process, grace_seconds=grace_seconds)
        except BaseException:
            _end(process, grace_seconds=grace_seconds)
            raise
    tail = log_file.read_bytes()[-LAST_CHARACTERS:].decode(errors="replace")
    return Ended(
        code=process.returncode, output=output.decode(errors="replace"), log=tail, is_cut=is_cut
    )


def _end(process: "subprocess.Popen[bytes]", *, grace_seconds: float) -> bytes:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    try:
        output, _ = process.communicate(timeout=grace_seconds)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            output, _ = process.communicate(timeout=GRACE_SECONDS)
        except (
            subprocess.TimeoutExpired
        ):  # a driver that hangs holds even what is killed: the part goes on
            output = b""
    return output or b""


def program(
    name: str,
    *words: str,
    place: Place,
    log_name: str,
    folder: Path | None = None,
    seconds: float | None = None,
    extra: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Runs a file of `programs/`; returns the JSON object that it prints as its last line.

    Raises TimeIsUp where the part's time was up, CommandFailed where it ended otherwise or after
    `seconds`.
    """
    command = [sys.executable, str(PROGRAMS / name), *words]
    # No grace: a program that is cut has nothing to keep.
    ended = run(
        command,
        place=place,
        log_name=log_name,
        folder=folder,
        seconds=seconds,
        extra=extra,
        grace_seconds=0.1,
    )
    if ended.is_cut and place.clock.left() <= 0:
        raise TimeIsUp
    if ended.is_cut or ended.code:
        how = f"did not end in {seconds:.0f} s" if ended.is_cut else f"ended with {ended.code}"
        raise CommandFailed(f"{' '.join(command[1:])} {how}: {ended.log}")
    return ended.last_json()


def autotune(
    *words: str,
    place: Place,
    log_name: str,
    codes: Sequence[int] = (0,),
    seconds: float | None = None,
) -> Ended:
    """Runs a command of autotune that only reads, in the part's folder.

    Raises TimeIsUp, and CommandFailed for an exit code that is not in `codes`.
    """
    command = [sys.executable, "-m", "autotune", *words]
    ended = run(command, place=place, log_name=log_name, seconds=seconds, grace_seconds=0.1)
    if ended.is_cut and place.clock.left() <= 0:
        raise TimeIsUp
    if ended.is_cut or ended.code not in codes:
        how = f"did not end in {seconds:.0f} s" if ended.is_cut else f"ended with {ended.code}"
        raise CommandFailed(f"autotune {' '.join(words)} {how}: {ended.log}")
    return ended


def space(name: str, place: Place, *, scale: str = "full") -> list[str]:
    """Options for a search space of this study at its scale; in a rehearsal the tiny one."""
    return [
        "--space",
        str(space_file(name)),
        "--scale",
        "tiny" if place.settings.rehearse else scale,
    ]


def space_file(name: str) -> Path:
    return HERE / "spaces" / f"{name}.toml"


def names_in(space_name: str) -> list[str]:
    """Of the configurations of a search space of this study."""
    content = tomllib.loads(space_file(space_name).read_text())
    return [configuration["name"] for configuration in content["configurations"]]


def item_name(configuration: str) -> str:
    """A configuration's name as that of a file."""
    return "-".join("".join(c if c.isalnum() or c in "._" else " " for c in configuration).split())


def search(name: str, *words: str, place: Place) -> dict[str, Any]:
    """Begins a study or goes on with it; returns what `autotune search --json` prints.

    Its trials are all that is wanted here; the part of the commands confirms one study.
    Raises TimeIsUp, with the study as it is by then, where trials may be missing; CommandFailed.
    """
    budget = max(1.0, place.clock.left() - LATEST_TRIAL_SECONDS)
    given = [
        "search",
        "--name",
        name,
        "--device",
        place.settings.device,
        "--fresh",
        "--no-confirm",
        "--json",
        *words,
    ]
    given += ["--storage", STORAGE, *TIME_LIMITS, "--time-budget", f"{budget:.0f}s"]
    command = [sys.executable, "-m", "autotune", *given]
    ended = run(
        command,
        place=place,
        log_name=f"search-{name}",
        seconds=place.clock.left() - GRACE_SECONDS - SHOW_SECONDS,
    )
    if ended.is_cut:
        raise TimeIsUp(_so_far(name, place))
    if ended.code not in (0, NOTHING_FEASIBLE) or not ended.output.strip():
        raise CommandFailed(f"autotune {' '.join(given)} ended with {ended.code}: {ended.log}")
    study: dict[str, Any] = json.loads(ended.output)
    # Not by counting trials: where a technique is missing there are fewer than the space names.
    if place.clock.left() <= LATEST_TRIAL_SECONDS:
        raise TimeIsUp(study)
    return study


def _so_far(name: str, place: Place) -> dict[str, Any]:
    """Returns a stopped study as `autotune show --json` prints it; empty if there is none yet."""
    words = ["show", name, "--json", "--storage", STORAGE]
    shown = run(
        [sys.executable, "-m", "autotune", *words],
        place=place,
        log_name=f"show-{name}",
        seconds=SHOW_SECONDS,
    )
    try:
        return dict(json.loads(shown.output))
    except ValueError:
        return {}


def side_by_side(place: Place) -> list[str]:
    """Options for a search from which no speed is read."""
    return ["--trials-per-device", str(place.settings.trials_per_device)]


def trials_of(study: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(study.get("trials", ()))
