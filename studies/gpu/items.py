"""Items of a part of the run, each with a result file, so that a later call does only the rest.

An item is the smallest unit that is not repeated: one measurement, or one search, which continues
where it stopped.
"""

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MOST_CUTS = 3
"""An item fails after so many calls in a row that ran out of time without progress."""
LAST_LINES = 12
"""Number of lines of an unexpected error that are stored and shown."""


class TimeIsUp(Exception):  # not an error: the next call continues
    """The time of the part ended before the item did. `result` is the partial result."""

    def __init__(self, result: Mapping[str, Any] | None = None) -> None:
        super().__init__("the time was up")
        self.result = dict(result or {})


class Missing(Exception):
    """The item cannot run here; the message names what is missing. Counts as finished."""


class Clock:
    """A wall-clock budget."""

    def __init__(self, seconds: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._ends = now() + seconds

    def left(self) -> float:
        return max(0.0, self._ends - self._now())


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one call, the same for all parts."""

    out: Path
    device: str
    """torch's name: `cuda:0`, or `cpu` in a rehearsal."""
    rehearse: bool = False
    """Whether sizes are tiny, to test every part; the numbers mean nothing."""
    trials_per_device: int = 1
    """Trials that run at once in searches from which only memory and losses are read."""
    source: str = ""
    """Hash of the code that runs."""

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Arguments of an item's work."""

    settings: Settings
    folder: Path
    """Folder of the part."""
    clock: Clock

    def needs_cuda(self) -> None:
        """Raises Missing without a CUDA device."""
        if not self.settings.is_cuda:
            raise Missing("needs a CUDA device")


@dataclass(frozen=True, kw_only=True)
class Item:
    name: str
    work: Callable[[Place], Mapping[str, Any]]
    """Returns the result, JSON-ready. Raises TimeIsUp, Missing, or anything else for a failure."""
    least_seconds: float = 10.0
    """The item does not start with less time left."""


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    minutes: float
    """Wall-clock budget, at most nine minutes."""
    about: str
    items: Callable[[Settings], list[Item]]
    summary: Callable[[Mapping[str, Mapping[str, Any]]], Iterable[str]]
    """Returns lines of text for {item: result} of the items that have a result."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Results of one part, one file each."""

    folder: Path

    def read(self, item: str) -> dict[str, Any] | None:
        """Returns the result of `item`; None if there is none or the file is incomplete."""
        try:
            kept = json.loads(self._file(item).read_text())
        except (OSError, ValueError):
            return None
        return kept if isinstance(kept, dict) else None

    def is_finished(self, item: str) -> bool:
        kept = self.read(item)
        return kept is not None and kept["state"] != "cut"

    def write(self, item: str, kept: Mapping[str, Any]) -> None:
        """Writes the file atomically."""
        file = self._file(item)
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(kept, indent=1) + "\n")
        os.replace(unfinished, file)

    def forget_failures(self) -> None:
        """Deletes the results of items that failed or were missing, so that they run again."""
        for file in self.folder.glob("*.json"):
            kept = self.read(file.stem)
            if kept is not None and kept["state"] in ("failed", "missing"):
                file.unlink()

    def _file(self, item: str) -> Path:
        return self.folder / f"{item}.json"


def kept_of(part: Part, out: Path) -> Kept:
    return Kept(folder=out / part.name / "results")


def run_item(item: Item, *, place: Place, kept: Kept) -> str:
    """Runs one item and stores its result; returns its state: done, cut, missing or failed."""
    before = kept.read(item.name) or {}
    started = time.monotonic()
    result: dict[str, Any] = {}
    error = ""
    try:
        result = dict(item.work(place))
        state = "done"
    except TimeIsUp as cut:
        result = cut.result
        state = "cut"
    except Missing as missing:
        state = "missing"
        error = str(missing)
    except Exception as unexpected:
        state = "failed"
        error = "\n".join(
            "".join(traceback.format_exception(unexpected)).splitlines()[-LAST_LINES:]
        )
    cuts = 0
    if state == "cut":
        made_progress = result != before.get("result", {})
        cuts = 1 if made_progress else before.get("cuts", 0) + 1
        if cuts >= MOST_CUTS:
            state = "failed"
            error = f"got no further in {cuts} calls"
    kept.write(
        item.name,
        {
            "item": item.name,
            "state": state,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(before.get("seconds", 0.0) + time.monotonic() - started, 2),
            "cuts": cuts,
            "source": place.settings.source,
            "error": error,
            "result": result,
        },
    )
    return state


def run_part(
    part: Part, *, settings: Settings, clock: Clock, say: Callable[[str], None]
) -> list[str]:
    """Runs the open items of a part while there is time; returns the names of those left open.

    Raises nothing: if a part cannot list its items, this error is stored as the failed item
    `items`.
    """
    kept = kept_of(part, settings.out)
    folder = settings.out / part.name
    folder.mkdir(parents=True, exist_ok=True)
    place = Place(settings=settings, folder=folder, clock=clock)
    try:
        items = part.items(settings)
    except Exception as unexpected:
        lines = "".join(traceback.format_exception(unexpected)).splitlines()[-LAST_LINES:]
        kept.write(
            "items", {"item": "items", "state": "failed", "error": "\n".join(lines), "result": {}}
        )
        return []
    left_open = []
    for item in items:
        if kept.is_finished(item.name):
            continue
        if clock.left() < item.least_seconds:
            left_open.append(item.name)
            continue
        state = run_item(item, place=place, kept=kept)
        say(f"  {part.name}/{item.name}: {state}, {clock.left():.0f} s left")
        if state == "cut":
            left_open.append(item.name)
    return left_open
