"""Searches one model on one, two and four devices, each of one CPU core.

    python -m studies.scaling.measure

Each round searches each number of devices once, in turn. Writes `results.json` next to this file.
Takes about seven minutes a round on two CPU cores.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DEVICES = (1, 2, 4)
SIZES = {
    "--layers": 6,
    "--width": 256,
    "--heads": 8,
    "--seq-len": 128,
    "--global-batch": 8,
    "--steps": 40,
}
ROUNDS = 3

Round = dict[str, list[dict[str, Any]]]
"""The trials of each number of devices."""


def autotune(*arguments: object, cpus: set[int], folder: Path) -> Any:
    """Return what a command of autotune prints as JSON, run on these CPU cores."""
    run = subprocess.run(
        [sys.executable, "-m", "autotune", *map(str, arguments), "--json"],
        check=True,
        capture_output=True,
        text=True,
        cwd=folder,
        preexec_fn=lambda: os.sched_setaffinity(0, cpus),
    )
    return json.loads(run.stdout)


def search(devices: int, *, folder: Path) -> Any:
    """Return the study of a search with trials on `devices` devices.

    One device is one core; four devices share two, so that only their memory is of interest.
    """
    sizes = [part for option in SIZES.items() for part in option]
    return autotune(
        *("search", "--name", f"on-{devices}", "--space", HERE / "space.toml"),
        *("--devices-per-trial", devices, "--max-mem", "1GiB", "--trials", 6, "--fresh"),
        *("--full-trainings", *sizes),
        cpus={0} if devices == 1 else {0, 1},
        folder=folder,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    options = parser.parse_args()
    rounds: list[Round] = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work)
            studies = {str(devices): search(devices, folder=folder) for devices in DEVICES}
        rounds.append(of_round(studies))
        print(f"round {number + 1}:", flush=True)
        print_table(rounds[-1])
        results = {
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores",
            "python": platform.python_version(),
            "torch": version("torch"),
            "sizes": SIZES,
            "rounds": rounds,
        }
        options.out.write_text(json.dumps(results, indent=1) + "\n")


def of_round(studies: dict[str, Any]) -> Round:
    """Return memory and speed of each trial of a round, by number of devices."""
    keys = (
        "name",
        "outcome",
        "devices",
        "peak_memory_bytes",
        "peak_memory_bytes_by_rank",
        "predicted_peak_memory_bytes",
        "tokens_per_second",
        "tokens_per_second_interval",
        "perplexity",
        "communication_seconds",
    )
    return {
        devices: [{key: trial.get(key) for key in keys} for trial in study["trials"]]
        for devices, study in studies.items()
    }


def print_table(found: Round) -> None:
    """Print the peak of a device and the speed, relative to one device, of each configuration."""
    (plain, *_) = found[str(DEVICES[0])]
    for devices, trials in found.items():
        for trial in trials:
            peak_mb = (trial["peak_memory_bytes"] or 0) / 1e6
            speedup = (trial["tokens_per_second"] or 0.0) / plain["tokens_per_second"]
            print(
                f"  {devices} devices  {trial['name'] or 'baseline':22s} {trial['outcome']:8s} "
                f"{peak_mb:7.1f} MB  {speedup:5.2f} times the speed  "
                f"perplexity {trial['perplexity'] or 0:.3f}"
            )


if __name__ == "__main__":
    main()
