"""Predicts public files that configure a training, and compares what is said of their memory.

    python -m studies.public_files.run                   # fetch and predict each
    python -m studies.public_files.run --only olmo
    python -m studies.public_files.run --folder FILES    # files that are here already, as NAME.yaml

A file is fetched from its repository at its commit into `files/`, which git ignores, with those
that belong to it beside it. Nothing in it is run. Commands run in that folder, so that results name
no other.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
CAP = "24GiB"
TOLD = (
    "peak_memory_bytes",
    "lower_bound_bytes",
    "upper_bound_bytes",
    "phase",
    "bytes_by_category",
    "config",
    "smallest_change",
)


PROGRESS = re.compile(r"Predicting|(still predicting|\d+( of \d+)? predicted), after")
"""Begins the lines that say how far a prediction is."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="a part of the names")
    parser.add_argument("--folder", type=Path, default=HERE / "files")
    arguments = parser.parse_args()
    entries = tomllib.loads((HERE / "files.toml").read_text())["file"]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for entry in entries:
        if arguments.only in entry["name"]:
            file = local_file(entry, arguments.folder)
            results[entry["name"]] = predicted(entry, file)
            print(entry["name"], json.dumps(results[entry["name"]])[:400], flush=True)
            RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")


def local_file(entry: dict[str, Any], folder: Path) -> Path:
    """Returns the file, which is fetched where it is not there, with those beside it."""
    wanted = folder / f"{entry['name']}{Path(entry['path']).suffix}"
    if not wanted.exists():
        folder.mkdir(exist_ok=True)
        wanted.write_bytes(fetched(entry["repository"], entry["commit"], entry["path"]))
        for path in entry.get("beside", ()):
            beside = folder / Path(path)
            beside.parent.mkdir(parents=True, exist_ok=True)
            commit = entry.get("beside_commit", entry["commit"])
            beside.write_bytes(fetched(entry["repository"], commit, path))
    return wanted


def fetched(repository: str, commit: str, path: str) -> bytes:
    name = repository.removeprefix("https://github.com/")
    url = f"https://raw.githubusercontent.com/{name}/{commit}/{path}"
    with urllib.request.urlopen(url, timeout=60) as answer:
        content: bytes = answer.read()
    return content


def predicted(entry: dict[str, Any], file: Path) -> dict[str, Any]:
    """Returns what `autotune predict --from` says of a file, or why it says nothing."""
    command = ["predict", "--from", file.name, *entry.get("launcher", ())]
    command += [*entry.get("overrides", ()), "--device", entry["predicted_on"]]
    if entry.get("seeks_change", True):
        command += ["--max-mem", CAP]
    command += ["--json"]
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "autotune", *command],
        cwd=file.parent,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    result = {
        "command": f"autotune {' '.join(command)}",
        "seconds": round(time.monotonic() - began, 1),
        "said": [line for line in ended.stderr.splitlines() if not PROGRESS.match(line)],
    }
    if not ended.stdout.strip():
        return result
    answer = json.loads(ended.stdout)
    return {**result, **{name: answer[name] for name in TOLD if name in answer}}


if __name__ == "__main__":
    main()
