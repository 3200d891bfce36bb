"""The reference study at one size: the eleven rows, searches with and without caps, comparisons.

    python studies/peak_memory/run.py --scale tiny --dataset python-docs    # 2 CPU cores
    python studies/peak_memory/run.py --scale small                         # a GPU of 8 GB
    python studies/peak_memory/run.py --scale full                          # a GPU with 21.2 GiB

The control, the first of the rows, needs the 21.2 GiB. Everything is written to
`studies/peak_memory/SCALE/`: the database `results.db`; `rows.json`; `rows.md` and `beside.json`,
the comparison with the published table; for every search a JSON, a comparison with the rows and a
report; and `environment.json`. With `--minutes 9` it stops in time with exit code 75, and the same
command continues from there.
"""

import argparse
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

CAPS = {"full": ("8GiB", "4GiB"), "small": ("4GiB", "2GiB"), "tiny": ("16MiB", "8MiB", "6MiB")}
"""8 GiB at full size are 2 GiB at the small and 8 MiB at the tiny one."""
TO_BE_CONTINUED = 75
NOTHING_FEASIBLE = 1
ROWS = "rows"


class Run:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._scale, self._trials, self._dataset = (
            arguments.scale,
            arguments.trials,
            arguments.dataset,
        )
        self._ends = (
            None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
        )
        self._folder = Path(os.path.relpath(arguments.out or Path(__file__).parent / self._scale))
        self._folder.mkdir(parents=True, exist_ok=True)
        self._storage = f"sqlite:///{self._folder}/results.db"
        self._searches = {
            "search-uncapped": None,
            **{f"search-{cap}": cap for cap in CAPS[self._scale]},
        }
        self._commands: list[str] = []
        self._failed: list[str] = []

    def all(self) -> bool:
        """Whether everything is done; else the same command goes on."""
        # Each row is trained to its end, as it was for the table.
        done = self._search(ROWS, "--space", "peak_memory", "--full-trainings")
        for name, cap in self._searches.items():
            options = ("--trials", str(self._trials), *(("--max-mem", cap) if cap else ()))
            done = done and self._search(name, "--space", "peak_memory_search", *options)
        if self._exists(ROWS):
            self._tell()
        if self._failed:
            sys.exit("failed: " + "; ".join(self._failed))
        return done

    def _search(self, name: str, *options: str) -> bool:
        """Starts or continues a study; returns False if time ran out and trials may be missing."""
        words = [
            "search",
            "--scale",
            self._scale,
            "--name",
            name,
            "--fresh",
            "--no-confirm",
            *options,
        ]
        words += ["--dataset", self._dataset] if self._dataset else []
        self._commands.append(shlex.join(["autotune", *words]))
        if self._ends is not None:
            if time.monotonic() >= self._ends:
                return False
            words += ["--time-budget", f"{max(1, math.ceil(self._ends - time.monotonic()))}s"]
        ended = self._autotune(*words, "--json", keep=f"{name}.json")
        if ended not in (0, NOTHING_FEASIBLE):
            sys.exit(ended)
        # Not by counting trials: where a device cannot compile, or a space is exhausted, there are
        # fewer than wanted.
        return self._ends is None or time.monotonic() < self._ends

    def _tell(self) -> None:
        self._autotune("show", ROWS, "--reference", "--markdown", keep="rows.md")
        self._autotune("show", ROWS, "--reference", "--json", keep="beside.json")
        for name in filter(self._exists, self._searches):
            page = str(self._folder / f"{name}-compared.html")
            self._autotune(
                "compare",
                ROWS,
                name,
                "--no-worse",
                "--json",
                "--out",
                page,
                keep=f"{name}-no-worse.json",
            )
            self._autotune("report", name, "--out", str(self._folder / f"{name}.html"))
        environment = {
            "commands": self._commands,
            "date": datetime.now(UTC).isoformat(timespec="minutes"),
            "machine": f"{platform.machine()}, {os.cpu_count()} processors, "
            f"Python {platform.python_version()}",
            "device": json.loads((self._folder / f"{ROWS}.json").read_text())["device"],
            "versions": {
                package: version(package)
                for package in ("torch", "optuna", "datasets", "tokenizers")
            },
        }
        (self._folder / "environment.json").write_text(json.dumps(environment, indent=1) + "\n")

    def _exists(self, name: str) -> bool:
        return (self._folder / f"{name}.json").exists()

    def _autotune(self, *words: str, keep: str | None = None) -> int:
        """Runs the command, its progress on the terminal; `keep`: the file for what it prints."""
        words = (*words, "--storage", self._storage)
        print(shlex.join(["autotune", *words]), file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "autotune", *words]
        ended = subprocess.run(command, check=False, stdout=subprocess.PIPE)
        if ended.stdout and keep is not None:
            (self._folder / keep).write_bytes(ended.stdout)
        if ended.returncode and words[0] != "search":
            self._failed.append(shlex.join(words))
        return ended.returncode


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", choices=CAPS, required=True)
    parser.add_argument(
        "--dataset", help="text other than TinyStories from the hub, such as python-docs"
    )
    parser.add_argument(
        "--trials", type=int, default=60, help="of each search, the eleven rows among them"
    )
    parser.add_argument(
        "--minutes", type=float, help="begin no trial after this; the same command goes on"
    )
    parser.add_argument("--out", type=Path, help="folder for the results")
    if not Run(parser.parse_args()).all():
        sys.exit(TO_BE_CONTINUED)


if __name__ == "__main__":
    main()
