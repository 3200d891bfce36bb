"""Progress of a running search on stderr: a live table on a terminal, plain lines elsewhere."""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from autotune.analysis.pick import Preferences
from autotune.cli.tables import as_text, is_narrow, make_console
from autotune.errors import AutotuneError
from autotune.reporting.columns import BLANK, text_or_blank
from autotune.reporting.outcomes import OUTCOME_LABELS
from autotune.reporting.trial_text import (
    format_perplexity,
    format_speed,
    short_description,
    trial_label,
)
from autotune.spec.result import TrialRecord
from autotune.spec.study import MOST_TRIALS_IN_TIME
from autotune.study.event_text import LASTING_EVENTS, WAITING, EventText
from autotune.study.events import Event
from autotune.study.progress import AtPlace, Progress
from autotune.units import format_duration, format_size

_ROWS_SHOWN = 14


class PlainDisplay:
    """Prints one line per event, for files and pipes."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress = progress
        self._console = console
        self._text = EventText(progress)

    def __call__(self, event: Event) -> None:
        self._progress.note(event)
        for line in self._text(event):
            self.say(line)

    def note(self, event: Event) -> None:
        """Take an event in without showing it."""
        self._progress.note(event)

    def say(self, line: str) -> None:
        self._console.print(as_text(line), soft_wrap=True)

    def say_waiting(self, line: str) -> None:
        """Say what is waited for, which a quiet display says, too."""
        self.say(line)

    def __enter__(self) -> "PlainDisplay":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class LiveDisplay:
    """Shows a table of the latest trials, a progress bar, the time left and the best so far."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress = progress
        self._plain = PlainDisplay(progress, console)
        self._memory = _MemoryInUse()
        self._live = Live(
            get_renderable=self._draw, console=console, refresh_per_second=4, transient=True
        )

    def __call__(self, event: Event) -> None:
        if isinstance(event, LASTING_EVENTS):
            self._plain(event)
        else:
            self._progress.note(event)

    def note(self, event: Event) -> None:
        """Take an event in; nothing of it stays above the table."""
        self._progress.note(event)

    def say(self, line: str) -> None:
        """Print a line that stays above the table."""
        self._plain.say(line)

    def say_waiting(self, line: str) -> None:
        self.say(line)

    def __enter__(self) -> "LiveDisplay":
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def _draw(self) -> Group:
        progress = self._progress
        if progress.opened is None:
            return Group(Spinner("dots", text=as_text(progress.doing()[0])))
        table = Table(box=None, pad_edge=False, expand=True)
        for column, options in _COLUMNS.items():
            table.add_column(column, **options)
        baseline = progress.opened.definition.baseline_config()
        for record in progress.records[-_ROWS_SHOWN:]:
            label = trial_label(record)
            if is_narrow(self._live.console):
                label = record.name or short_description(record.config, baseline)
            style = "" if record.feasible else "dim"
            table.add_row(*_live_row(record, label=label), style=style)
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


_COLUMNS: dict[str, dict[str, Any]] = {
    "#": {"justify": "right", "no_wrap": True},
    "configuration": {"ratio": 1, "no_wrap": True, "overflow": "ellipsis"},
    "peak": {"justify": "right", "no_wrap": True},
    "tokens/s": {"justify": "right", "no_wrap": True},
    "perpl.": {"justify": "right", "no_wrap": True},
    "outcome": {"no_wrap": True, "max_width": 34, "overflow": "ellipsis"},
}


def _live_row(record: TrialRecord, *, label: str) -> list[Text | str]:
    size = text_or_blank(record.peak_memory_bytes, format_size)
    speed = format_speed(record.tokens_per_second, record.tokens_per_second_spread) or BLANK
    perplexity = format_perplexity(record) or BLANK
    outcome = OUTCOME_LABELS[record.outcome]
    if record.reused_from:
        outcome += f", {record.reused_from}"
    return [str(record.number), as_text(label), size, speed, perplexity, as_text(outcome)]


class QuietDisplay(PlainDisplay):
    """Shows only what is waited for: without a word a search that waits would look broken."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, WAITING):
            for line in self._text(event):
                self.say_waiting(line)

    def say(self, line: str) -> None:
        pass

    def say_waiting(self, line: str) -> None:
        super().say(line)


Display = LiveDisplay | PlainDisplay


def make_display(
    *,
    quiet: bool,
    preferences: Preferences,
    until_converged: bool = False,
) -> Display:
    """Returns the display that suits stderr: a listener for events and a context manager."""
    console = make_console(sys.stderr)
    progress = Progress(preferences=preferences, until_converged=until_converged)
    if quiet:
        return QuietDisplay(progress, console)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(progress, console)
    return PlainDisplay(progress, console)
