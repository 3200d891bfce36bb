"""Progress of a running search on stderr: a live table on a terminal, plain lines elsewhere."""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

from autotune.analysis.pick import Preferences
from autotune.cli.tables import as_text, heading, is_narrow, make_console, row_texts
from autotune.errors import AutotuneError
from autotune.reporting.columns import trial_table
from autotune.reporting.trial_text import (
    short_description,
)
from autotune.spec.study import MOST_TRIALS_IN_TIME
from autotune.study.events import LASTING_EVENTS, WAITING, Event
from autotune.study.progress import AtPlace, Progress
from autotune.units import format_duration, format_size

_ROWS_SHOWN = 14
_REMARK_WIDTH, _NARROW_REMARK_WIDTH = 48, 34


class PlainDisplay:
    """Prints one line per event, for files and pipes."""

    _printed: ClassVar[tuple[type[Event], ...]] = (Event,)
    """Events whose lines are printed."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self.progress = progress
        self._console = console

    def __call__(self, event: Event) -> None:
        self.progress.note(event)
        if isinstance(event, self._printed):
            for line in self.progress.lines(event):
                self._console.print(as_text(line), soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class QuietDisplay(PlainDisplay):
    """Shows only what is waited for: without a word a search that waits would look broken."""

    _printed = WAITING


class LiveDisplay(PlainDisplay):
    """Shows a table of the latest trials, a progress bar, the time left and the best so far.

    What a search says that holds for longer stays above the table.
    """

    _printed = LASTING_EVENTS

    def __init__(self, progress: Progress, console: Console) -> None:
        super().__init__(progress, console)
        self._memory = _MemoryInUse()
        self._live = Live(
            get_renderable=self._draw, console=console, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def _draw(self) -> Group:
        progress = self.progress
        if progress.opened is None:
            return Group(Spinner("dots", text=as_text("; ".join(progress.doing()))))
        found = trial_table(progress.so_far(), progress.records[-_ROWS_SHOWN:])
        columns = [column for column in found.columns if column.on_phones]
        is_short = is_narrow(self._console)
        remark_width = _NARROW_REMARK_WIDTH if is_short else _REMARK_WIDTH
        table = Table(box=None, pad_edge=False, expand=True)
        for column in columns:
            if column.is_number:
                table.add_column(heading(column, is_short=True), justify="right", no_wrap=True)
            elif column.key == "name":
                table.add_column(heading(column), ratio=1, no_wrap=True, overflow="ellipsis")
            else:
                table.add_column(max_width=remark_width, no_wrap=True, overflow="ellipsis")
        baseline = progress.opened.baseline
        for row, record in zip(found.rows, progress.records[-_ROWS_SHOWN:], strict=True):
            texts = {**row_texts(row)}
            if is_short:
                texts["name"] = record.name or short_description(record.config, baseline)
            cells = [as_text(texts[column.key]) for column in columns]
            table.add_row(*cells, style="" if record.feasible else "dim")
        running: list[Spinner | Table] = [
            Spinner("dots", text=as_text(f" {line}")) for line in progress.doing()
        ]
        if places := progress.places():
            running.insert(0, self._places_table(places, progress.opened.places))
        ends_by_time = progress.wanted >= MOST_TRIALS_IN_TIME
        bar = ProgressBar(
            total=None if ends_by_time else max(1, progress.wanted),
            completed=len(progress.records),
            width=30,
        )
        status = Table.grid(padding=(0, 2))
        status.add_row(bar, as_text(progress.counts()))
        lines = [as_text(progress.best(), style="bold")]
        if left := progress.time_left():
            lines.insert(0, as_text(left))
        return Group(table, *running, as_text(""), status, *lines)

    def _places_table(self, places: Sequence[AtPlace], uuids: Mapping[str, Sequence[str]]) -> Table:
        """Returns a row for each place: its trial, what it does, and the memory in use there."""
        table = Table(box=None, pad_edge=False, expand=True, show_header=False)
        for _ in ("place", "trial"):
            table.add_column(no_wrap=True)
        table.add_column("configuration", no_wrap=True, overflow="ellipsis", ratio=3)
        table.add_column("time", no_wrap=True, justify="right")
        table.add_column("what it does", no_wrap=True, overflow="ellipsis", ratio=2)
        table.add_column("memory", no_wrap=True, justify="right")
        for place in places:
            trial = place.trial
            table.add_row(
                place.name,
                "" if trial is None else f"#{trial.number}",
                as_text(place.label),
                format_duration(place.seconds) if place.label or place.doing else "",
                as_text(place.doing or ("" if place.label else "idle")),
                self._memory.in_use(uuids.get(place.name, ())) or _in_use(place.used_bytes),
            )
        return table


def _in_use(used_bytes: int | None) -> str:
    return "" if used_bytes is None else f"{format_size(used_bytes)} in use"


class _MemoryInUse:
    """Reads how much of a GPU's memory is in use, at most once a second."""

    def __init__(self) -> None:
        self._devices: dict[str, Any] = {}
        self._read_at: dict[str, float] = {}
        self._used_bytes: dict[str, int | None] = {}

    def in_use(self, uuids: Sequence[str]) -> str:
        """Returns the size as text, of several GPUs the largest; empty where it is not known."""
        now = time.monotonic()
        for uuid in uuids:
            if now - self._read_at.get(uuid, -math.inf) >= 1.0:
                self._read_at[uuid] = now
                self._used_bytes[uuid] = self._read(uuid)
        sizes = [self._used_bytes[uuid] or 0 for uuid in uuids]
        return _in_use(max(sizes, default=0) or None)

    def _read(self, uuid: str) -> int | None:
        # A tenth of a second, which only searches on several GPUs need.
        from autotune.memory.nvml import open_device  # noqa: PLC0415

        try:
            if uuid not in self._devices:
                self._devices[uuid] = open_device(uuid)
            return int(self._devices[uuid].used_bytes())
        except AutotuneError:
            return None  # the GPU is lost


def make_display(
    *,
    quiet: bool,
    preferences: Preferences,
    until_converged: bool = False,
) -> PlainDisplay:
    """Returns the display that suits stderr: a listener for events and a context manager."""
    console = make_console(sys.stderr)
    progress = Progress(preferences=preferences, until_converged=until_converged)
    if quiet:
        return QuietDisplay(progress, console)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(progress, console)
    return PlainDisplay(progress, console)
