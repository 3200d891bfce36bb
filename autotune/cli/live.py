"""Progress of a running search on stderr: a live table on a terminal, plain lines elsewhere."""

import sys
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from autotune.analysis.pick import Preferences
from autotune.cli.tables import is_narrow, make_console, speed
from autotune.reporting.outcomes import OUTCOME_LABELS
from autotune.reporting.trial_text import format_perplexity, short_description, trial_label
from autotune.spec.result import TrialRecord
from autotune.study.event_text import LASTING_EVENTS, EventText
from autotune.study.events import Event
from autotune.study.progress import Progress
from autotune.units import format_size

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
            self._console.print(Text(line), soft_wrap=True)

    def __enter__(self) -> "PlainDisplay":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class LiveDisplay:
    """Shows a table of the latest trials, a progress bar, the time left and the best so far."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress = progress
        self._plain = PlainDisplay(progress, console)
        self._live = Live(
            get_renderable=self._draw, console=console, refresh_per_second=4, transient=True
        )

    def __call__(self, event: Event) -> None:
        if isinstance(event, LASTING_EVENTS):
            self._plain(event)
        else:
            self._progress.note(event)

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
            return Group(Spinner("dots", text=Text(progress.doing()[0])))
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
        running = [Spinner("dots", text=Text(f" {line}")) for line in progress.doing()]
        bar = ProgressBar(total=max(1, progress.wanted), completed=len(progress.records), width=30)
        status = Table.grid(padding=(0, 2))
        status.add_row(bar, Text(progress.counts()))
        lines = [Text(progress.best(), style="bold")]
        if left := progress.time_left():
            lines.insert(0, Text(left))
        return Group(table, *running, Text(""), status, *lines)


_COLUMNS: dict[str, dict[str, Any]] = {
    "#": {"justify": "right", "no_wrap": True},
    "configuration": {"ratio": 1, "no_wrap": True, "overflow": "ellipsis"},
    "peak": {"justify": "right", "no_wrap": True},
    "tokens/s": {"justify": "right", "no_wrap": True},
    "perpl.": {"justify": "right", "no_wrap": True},
    "outcome": {"no_wrap": True, "max_width": 34, "overflow": "ellipsis"},
}


def _live_row(record: TrialRecord, *, label: str) -> list[Text | str]:
    size = "-" if record.peak_memory_bytes is None else format_size(record.peak_memory_bytes)
    perplexity = format_perplexity(record) or "-"
    outcome = OUTCOME_LABELS[record.outcome]
    if record.reused_from:
        outcome += f", {record.reused_from}"
    return [str(record.number), Text(label), size, speed(record), perplexity, Text(outcome)]


class SilentDisplay:
    """Shows nothing."""

    def __call__(self, event: Event) -> None:
        pass

    def __enter__(self) -> "SilentDisplay":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def make_display(
    *,
    quiet: bool,
    preferences: Preferences,
    until_converged: bool = False,
) -> LiveDisplay | PlainDisplay | SilentDisplay:
    """Return the display that suits stderr: a listener for events and a context manager."""
    if quiet:
        return SilentDisplay()
    console = make_console(sys.stderr)
    progress = Progress(preferences=preferences, until_converged=until_converged)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(progress, console)
    return PlainDisplay(progress, console)
