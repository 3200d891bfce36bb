"""Compares peaks that were measured on a GPU with what is predicted for it, on any machine.

    python studies/gpu/compare.py h200    # writes studies/gpu/h200/compared.json.xz

`h200/` has searches as `autotune show --json` prints them. Predictions are for the GPU and the
torch release of each search; run it with that release, since torch.compile decides what is kept.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the repository need not be installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from studies.compressed import read_json, write_json
from studies.gpu.processes import HERE, environment, space_file

SPACES: Mapping[str, Sequence[str]] = {
    "techniques": ("--space", str(space_file("every_technique")), "--scale", "full"),
    "default-model": ("--space", str(space_file("predicted_114m")), "--scale", "full"),
    "table": ("--space", "peak_memory", "--scale", "full"),
    "speeds": ("--space", str(space_file("speeds")), "--scale", "full"),
}
"""The space of each search; a folder need not have all of them."""


def main() -> None:
    folder = HERE / sys.argv[1]
    searches = [name for name in SPACES if (folder / f"{name}.json.xz").exists()]
    pairs = [pair for name in searches for pair in _pairs(name, folder)]
    write_json(folder / "compared.json.xz", {"pairs": pairs})
    print("search | configuration | measured, MiB | predicted - measured, KiB | ratio")
    for pair in pairs:
        predicted, measured = pair["predicted_bytes"], pair["measured_bytes"]
        difference = f"{(predicted - measured) / 1024:+,.1f} | {predicted / measured:.4f}"
        print(f"{pair['search']} | {pair['name']} | {measured / 2**20:,.1f} | {difference}")


def _pairs(name: str, folder: Path) -> list[dict[str, Any]]:
    """Returns predicted and measured peak of each trial of a search that ended well."""
    search = read_json(folder / f"{name}.json.xz")
    device = search["device"]
    release = ".".join(device["versions"]["torch"].split(".")[:2])
    options = ("--device", "cuda", "--compute-capability", device["compute_capability"])
    predictions = _predicted(*SPACES[name], *options, "--torch", release)
    return [
        {
            "search": name,
            "name": trial["name"],
            "config": trial["config"],
            "device": device["name"],
            "measured_bytes": trial["peak_memory_bytes"],
            "measured_phase": trial["peak_phase"],
            "predicted_bytes": predictions[trial["name"]],
        }
        for trial in search["trials"]
        if trial["outcome"] == "ok" and predictions.get(trial["name"])
    ]


def _predicted(*options: str) -> dict[str, int | None]:
    command = [sys.executable, "-m", "autotune", "predict", *options, "--json", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            command, cwd=folder, env=environment(), check=True, stdout=subprocess.PIPE
        )
    predictions = json.loads(ended.stdout)["predictions"]
    # A search also tries the space's first configuration as its baseline.
    return {one["name"]: one.get("peak_memory_bytes") for one in predictions}


if __name__ == "__main__":
    main()
