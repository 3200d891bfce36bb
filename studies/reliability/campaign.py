"""Kills 3,000 processes in parts, and goes on where the last one stopped.

    python -m studies.reliability.campaign --minutes 20
    python -m studies.reliability.campaign --only service --seed 5 --kills 60    # a part again

Each part is of the way that is furthest behind its share, with a seed of its own, and is a line of
`campaign.jsonl`: what was killed on which machine and which state of autotune, and what was wrong.
A part that finds something wrong keeps its folder and says how to run it again. Other machines and
times kill at other moments, so that a seed repeats who is killed, and not what it met.
"""

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

from studies.reliability.kills import Run, about_this_machine
from studies.reliability.local_kills import local_run
from studies.reliability.nursery import ROOT
from studies.reliability.ray_kills import ray_run
from studies.reliability.service_kills import service_run

RESULTS = Path(__file__).with_name("campaign.jsonl")
WAYS: Mapping[str, Callable[[Path, Random], AbstractContextManager[Run]]] = {
    "sqlite": partial(local_run, storage="sqlite"),
    "postgresql": partial(local_run, storage="postgresql"),
    "ray": ray_run,
    "service": service_run,
}
SHARES = {"sqlite": 900, "postgresql": 900, "ray": 600, "service": 600}
"""Of the kills; those of workers on one machine take a fifth of the time of the others."""
KILLS_OF_A_PART = {"sqlite": 150, "postgresql": 150, "ray": 60, "service": 60}
LEAST_SECONDS = 60.0
"""A part is not begun with less time for its kills."""


def sums() -> dict[str, int]:
    """Returns the kills of each way so far."""
    so_far = dict.fromkeys(WAYS, 0)
    if RESULTS.exists():
        for line in RESULTS.read_text().splitlines():
            part = json.loads(line)
            so_far[part["way"]] += part["kills"]
    return so_far


def furthest_behind(so_far: Mapping[str, int]) -> str | None:
    """Returns the way of the next part; None where all have their shares."""
    way = min(WAYS, key=lambda way: so_far[way] / SHARES[way])
    return way if so_far[way] < SHARES[way] else None


def carry_out_part(way: str, *, seed: int, kills: int, seconds: float) -> dict[str, Any]:
    """Kill so many, or for so long; return the line of the part."""
    folder = Path(tempfile.mkdtemp(prefix=f"kills-{way}-{seed}-")).resolve()
    load_average = round(os.getloadavg()[0], 1)
    seen: dict[str, Any]
    with WAYS[way](folder, Random(seed)) as run:
        try:
            seen = run.carry_out(kills=kills, seconds=seconds)
        except Exception:
            seen = {"kills": sum(run.kills.values()), "violations": [traceback.format_exc()]}
    if seen["violations"]:
        studies = {name: asdict(watch) for name, watch in run.watches.items()}
        (folder / "studies.json").write_text(json.dumps(studies, default=_plain))
        seen["evidence"] = str(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    about = about_this_machine()
    if way == "ray":
        about["versions"]["ray"] = version("ray")
    about["command"] = (
        f"python -m studies.reliability.campaign --only {way} --seed {seed} --kills {kills}"
    )
    return {
        "way": way,
        **about,
        "commit": _last_commit_of_autotune(),
        "load_average": load_average,
        "seed": seed,
        **seen,
    }


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)


def _last_commit_of_autotune() -> str:
    """Returns the commit that changed the package last, with a + after further changes."""
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=True)
    commit = git(["git", "log", "-1", "--format=%h", "--", "autotune"]).stdout.strip()
    changed = git(["git", "status", "--porcelain", "--", "autotune"]).stdout
    return f"{commit}+" if changed else commit


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="begin no part after that")
    parser.add_argument("--only", choices=WAYS, help="one part of this way")
    parser.add_argument("--seed", type=int, help="of the part; default: a new one")
    parser.add_argument("--kills", type=int, help="of a part")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    has_violations = False
    while (seconds := end - time.monotonic()) > LEAST_SECONDS:
        way = arguments.only or furthest_behind(sums())
        if way is None:
            break
        seed = secrets.randbelow(2**32) if arguments.seed is None else arguments.seed
        kills = arguments.kills or KILLS_OF_A_PART[way]
        part = carry_out_part(way, seed=seed, kills=kills, seconds=seconds)
        with RESULTS.open("a") as results:
            results.write(json.dumps(part) + "\n")
        has_violations |= bool(part["violations"])
        print(f"{way}: {part['kills']} kills, {len(part['violations'])} violations")
        for violation in part["violations"]:
            print(f"  {violation}")
        if part["violations"]:
            print(f"  kept in {part['evidence']}; again: {part['command']}")
        of_ways = ", ".join(f"{way} {count} of {SHARES[way]}" for way, count in sums().items())
        print(f"so far {sum(sums().values())} of {sum(SHARES.values())}: {of_ways}", flush=True)
        if arguments.only:
            break
    return 1 if has_violations else 0


if __name__ == "__main__":
    sys.exit(main())
