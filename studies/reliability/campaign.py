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
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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


def parts_so_far() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def furthest_behind(parts: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the way of the next part; None where all have their shares."""
    kills = {way: sum(part["kills"] for part in parts if part["way"] == way) for way in WAYS}
    way = min(WAYS, key=lambda way: kills[way] / SHARES[way])
    return way if kills[way] < SHARES[way] else None


def table(parts: Sequence[Mapping[str, Any]]) -> str:
    """Returns the sums of each way as a table of the page."""
    lines = ["| way | parts | kills, goal | killed and stopped | trials, attempts | violations |"]
    lines.append("|---|---|---|---|---|---|")
    for way in WAYS:
        of_way = [part for part in parts if part["way"] == way]
        by_kind = sum((Counter(part.get("kills_by_kind", {})) for part in of_way), Counter())
        kinds = ", ".join(f"{kind} {count}" for kind, count in by_kind.most_common())
        kills, trials, attempts = (
            sum(part.get(name, 0) for part in of_way) for name in ("kills", "trials", "attempts")
        )
        violations = sum(len(part["violations"]) for part in of_way)
        lines.append(
            f"| {way} | {len(of_way)} | {kills:,}, {SHARES[way]:,} | {kinds} "
            f"| {trials:,}, {attempts:,} | {violations} |"
        )
    return "\n".join(lines)


def carry_out_part(way: str, *, seed: int, kills: int, seconds: float) -> dict[str, Any]:
    """Kill so many, or for so long; return the line of the part."""
    folder = Path(tempfile.mkdtemp(prefix=f"kills-{way}-{seed}-")).resolve()
    load_average = round(os.getloadavg()[0], 1)
    seen: dict[str, Any]
    with WAYS[way](folder, Random(seed)) as run:
        try:
            seen = run.carry_out(kills=kills, seconds=seconds)
        except Exception:
            # What was killed does not count: nobody has looked at what came of it.
            seen = {"kills": 0, "violations": [traceback.format_exc()]}
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # not without what it has started
    RESULTS.touch()
    print(table(parts_so_far()))
    end = time.monotonic() + 60 * arguments.minutes
    has_violations = False
    while (seconds := end - time.monotonic()) > LEAST_SECONDS:
        way = arguments.only or furthest_behind(parts_so_far())
        if way is None:
            break
        seed = secrets.randbelow(2**32) if arguments.seed is None else arguments.seed
        kills = arguments.kills or KILLS_OF_A_PART[way]
        part = carry_out_part(way, seed=seed, kills=kills, seconds=seconds)
        evidence = part.pop("evidence", None)  # it is of this machine
        with RESULTS.open("a") as results:
            results.write(json.dumps(part) + "\n")
        has_violations |= bool(part["violations"])
        print(f"{way}: {part['kills']} kills, {len(part['violations'])} violations")
        for violation in part["violations"]:
            print(f"  {violation}")
        if part["violations"]:
            print(f"  kept in {evidence}; again: {part['command']}")
        print(table(parts_so_far()), flush=True)
        if arguments.only:
            break
    return 1 if has_violations else 0


if __name__ == "__main__":
    sys.exit(main())
