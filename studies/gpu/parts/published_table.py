"""Part 7: the rows of the published table at `small` and `full`, and searches that beat them."""

import json
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from studies.gpu.items import Item, Part, Place, Settings, TimeIsUp
from studies.gpu.processes import GRACE_SECONDS, ROOT, SHOW_SECONDS, CommandFailed, run

RUN = ROOT / "studies" / "peak_memory" / "run.py"
TRIALS = 30
"""Of each search, the eleven rows among them."""
TO_BE_CONTINUED = 75
LATEST_SECONDS = {"tiny": 45.0, "small": 60.0, "full": 150.0}
"""For the trial that runs when the time is up, and for what its own script tells in the end."""


def items(settings: Settings) -> list[Item]:
    scales = ("tiny",) if settings.rehearse else ("small", "full")
    return [
        Item(name=scale, work=partial(_rows, scale=scale), least_seconds=2 * LATEST_SECONDS[scale])
        for scale in scales
    ]


def _rows(place: Place, scale: str) -> Mapping[str, Any]:
    minutes = max(0.1, (place.clock.left() - LATEST_SECONDS[scale]) / 60)
    folder = place.folder / scale
    trials = "12" if place.settings.rehearse else str(TRIALS)
    words = [
        "--scale",
        scale,
        "--dataset",
        "python-docs",
        "--trials",
        trials,
        "--minutes",
        f"{minutes:.2f}",
    ]
    command = [sys.executable, str(RUN), *words, "--out", str(folder)]
    seconds = place.clock.left() - GRACE_SECONDS - SHOW_SECONDS
    ended = run(command, place=place, log_name=scale, seconds=seconds)
    if ended.is_cut:
        _show_rows(folder, place=place)
    result = _told(folder)
    if ended.is_cut or ended.code == TO_BE_CONTINUED:
        raise TimeIsUp(result)
    if ended.code:
        raise CommandFailed(f"{RUN.name} {' '.join(words)} ended with {ended.code}: {ended.log}")
    return result


def _show_rows(folder: Path, *, place: Place) -> None:
    """What there is of the rows, where the script was ended before it could tell."""
    words = ["show", "rows", "--reference", "--markdown", "--storage", "sqlite:///results.db"]
    command = [sys.executable, "-m", "autotune", *words]
    shown = run(command, place=place, folder=folder, log_name="show-rows", seconds=SHOW_SECONDS)
    if shown.output:
        (folder / "rows.md").write_text(shown.output)


def _told(folder: Path) -> dict[str, Any]:
    """What the script has written of the rows and the searches so far."""
    told: dict[str, Any] = {}
    if (folder / "rows.md").exists():
        told["rows"] = (folder / "rows.md").read_text().splitlines()
    for file in sorted(folder.glob("search-*-no-worse.json")):
        told[file.stem] = json.loads(file.read_text())
    return told


def summary(results: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    for scale, told in results.items():
        yield f"{scale}:"
        yield from told.get("rows", ())
        for name, compared in told.items():
            if name != "rows":
                yield f"{name}: {json.dumps(compared)[:400]}"


PART = Part(
    name="table",
    minutes=9.0,
    about="the published table's rows, and the searches that beat them",
    items=items,
    summary=summary,
)
