"""A part of the run is a list of items; each has a result file of its own, so that a later call goes on with the rest.

An item is the smallest thing that is not done again: one measurement, or one search, which
continues where it stopped.
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
"""Calls in a row that may run out of time within one item and get no further: then it counts as
failed."""
LAST_LINES = 12
"""Of an unexpected error, kept and shown."""


class TimeIsUp(Exception):  # not an error: the next call goes on
    """The part's time ended before the item did. `result` is what there is so far."""

    def __init__(self, result: Mapping[str, Any] | None = None) -> None:
        super().__init__("the time was up")
        self.result = dict(result or {})


class Missing(Exception):
    """The item cannot be done here; the message says what is missing. Counts as finished."""


class Clock:
    """The wall-clock time that is left."""

    def __init__(self, seconds: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._ends = now() + seconds

    def left(self) -> float:
        return max(0.0, self._ends - self._now())


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all parts of one call share."""

    out: Path
    device: str
    """torch's name: `cuda:0`, or `cpu` in a rehearsal."""
    rehearse: bool = False
    """Whether sizes are tiny: every part is run through, and no number means anything."""
    source: str = ""
    """Hash of the code that runs."""

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")


@dataclass(frozen=True, kw_only=True)
class Place:
    """What an item works with."""

    settings: Settings
    folder: Path
    """The part's own."""
    clock: Clock

    def needs_cuda(self) -> None:
        """Raises Missing where there is no CUDA device."""
        if not self.settings.is_cuda:
            raise Missing("needs a CUDA device")


@dataclass(frozen=True, kw_only=True)
class Item:
    name: str
    work: Callable[[Place], Mapping[str, Any]]
    """Returns the result, JSON-ready. Raises TimeIsUp, Missing, or anything else for a failure."""
    least_seconds: float = 10.0
    """With less time left it is not begun."""


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    minutes: float
    """Its wall-clock budget, at most nine."""
    about: str
    items: Callable[[Settings], list[Item]]
    summary: Callable[[Mapping[str, Mapping[str, Any]]], Iterable[str]]
    """Lines for {item: its result}, of the items that have one."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The results of one part, each in a file."""

    folder: Path

    def read(self, item: str) -> dict[str, Any] | None:
        """None where there is none, or half of one."""
        try:
            kept = json.loads(self._file(item).read_text())
        except (OSError, ValueError):
            return None
        return kept if isinstance(kept, dict) else None

    def is_finished(self, item: str) -> bool:
        kept = self.read(item)
        return kept is not None and kept["state"] != "cut"

    def write(self, item: str, kept: Mapping[str, Any]) -> None:
        """Whole or not at all, however the process ends."""
        file = self._file(item)
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(kept, indent=1) + "\n")
        os.replace(unfinished, file)

    def forget_failures(self) -> None:
        """What failed, and what was missing, is open again."""
        for file in self.folder.glob("*.json"):
            kept = self.read(file.stem)
            if kept is not None and kept["state"] in ("failed", "missing"):
                file.unlink()

    def _file(self, item: str) -> Path:
        return self.folder / f"{item}.json"


def kept_of(part: Part, out: Path) -> Kept:
    return Kept(folder=out / part.name / "results")


def run_item(item: Item, *, place: Place, kept: Kept) -> str:
    """Runs one item and keeps what came of it; returns its state: done, cut, missing or failed."""
    before = kept.read(item.name) or {}
    started, result, error = time.monotonic(), dict[str, Any](), ""
    try:
        result, state = dict(item.work(place)), "done"
    except TimeIsUp as cut:
        result, state = cut.result, "cut"
    except Missing as missing:
        state, error = "missing", str(missing)
    except Exception as unexpected:
        state = "failed"
        error = "\n".join(
            "".join(traceback.format_exception(unexpected)).splitlines()[-LAST_LINES:]
        )
    has_got_further = result != before.get("result", {})
    cuts = 0 if state != "cut" else 1 if has_got_further else before.get("cuts", 0) + 1
    if cuts >= MOST_CUTS and state == "cut":
        state, error = "failed", f"got no further in {cuts} calls"
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
    """Runs what is open of a part, as far as time allows; returns what is left open.

    Raises nothing: a part that cannot even list its items has that as its one failed item, `items`.
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
