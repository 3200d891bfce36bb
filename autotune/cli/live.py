"""Progress of a running search on stderr: a live table on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from autotune.analysis.pick import Preferences
from autotune.cli.progress import Progress
from autotune.cli.tables import describe, make_console, speed
from autotune.reporting.outcomes import OUTCOME_LABELS
from autotune.reporting.trial_text import format_perplexity, perplexity_source_text
from autotune.spec.result import TrialRecord
from autotune.study.events import (
    AttemptLost,
    BudgetSpent,
    Converged,
    Event,
    Notice,
    PoisonTrial,
    Preparing,
    ResultRejected,
    SameProgram,
    SpaceExhausted,
    StorageBack,
    StudyOpened,
    TrialEnded,
    WaitingForDevice,
    WaitingForOthers,
    WaitingForStorage,
    WorkerEnded,
)
from autotune.units import format_duration, format_percent, format_size

_ROWS_SHOWN = 14
_STUDIES_SHOWN = 3


def headline(opened: StudyOpened) -> str:
    definition = opened.definition
    verb = "Study" if opened.is_new else "Continuing study"
    return (
        f"{verb} {definition.name}: {definition.workload.describe()}, "
        f"under {format_size(definition.cap_bytes)} "
        f"on {definition.device.device} ({definition.device.name})"
    )


def excluded_line(opened: StudyOpened) -> str:
    if not opened.legal.excluded:
        return ""
    return f"Excluded: {'; '.join(opened.legal.excluded)}"


def reused_line(counts: Mapping[str, int]) -> str:
    """Return which studies results are reused from, or an empty text if none are.

    `Reused    12 results: 9 of study a, 3 of study b; --fresh measures them again`.
    """
    if not counts:
        return ""
    shown = [f"{count} of study {study}" for study, count in list(counts.items())[:_STUDIES_SHOWN]]
    rest = sum(list(counts.values())[_STUDIES_SHOWN:])
    total = sum(counts.values())
    if rest:
        shown.append(f"{rest} of older studies")
    results = "1 result" if total == 1 else f"{total} results"
    return f"Reused    {results}: {', '.join(shown)}; --fresh measures them again"


class PlainDisplay:
    """Prints one line per event, for files and pipes."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress = progress
        self._console = console
        self._reported_waits: set[str | tuple[int, ...]] = set()

    def __call__(self, event: Event) -> None:
        self._progress.note(event)
        match event:
            case Preparing(what=what):
                self._print(f"{what[0].upper()}{what[1:]} ...")
            case Notice(message=message):
                self._print(f"Note: {message}.")
            case StudyOpened():
                self._print(headline(event))
                if line := excluded_line(event):
                    self._print(line)
                if line := reused_line(event.reused):
                    self._print(line)
                if event.definition.device.others:
                    device = event.definition.device
                    self._print(f"Warning: {device.device}: {device.others}")
                for note in event.definition.device.notes:
                    self._print(f"Note: {note}.")
            case TrialEnded(record=record):
                self._print(f"[{self._progress.status()}]  {_one_line(record)}")
            case SameProgram(config=config, number=number):
                self._print(
                    f"{config.describe()}: not run, it compiles to the same program as #{number}"
                )
            case SpaceExhausted(trials=trials):
                self._print(
                    f"Nothing worth trying is left after {trials} trials: every other "
                    "configuration compiles to the program of one of them, does not fit or is "
                    "dominated."
                )
            case Converged(trials=trials, relative_improvement=gain):
                added = format_percent(gain, digits=2)
                self._print(
                    f"Converged after {trials} trials: the most promising configuration left is "
                    f"expected to add {added} % to the hypervolume of the front."
                )
            case BudgetSpent(trials=trials, trials_wanted=wanted):
                self._print(f"The time budget is used up after {trials} of {wanted} trials.")
            case WaitingForDevice(device=waited_for) | WaitingForOthers(numbers=waited_for):
                if waited_for in self._reported_waits:
                    return  # report each wait once, however often it happens
                self._reported_waits.add(waited_for)
                waiting = self._progress.meanwhile
                self._print(f"{waiting[0].upper()}{waiting[1:]}.")
            case AttemptLost(number=number, cause=cause, attempts_left=left):
                if left:
                    then = f"it is tried again, {left} attempts left"
                else:
                    then = "it is left for a later search"
                self._print(f"#{number} failed for a reason outside the trial: {cause}; {then}.")
            case PoisonTrial(number=number, deaths=deaths):
                self._print(
                    f"#{number} was running each time when {deaths} searches or workers died; "
                    "it is run last."
                )
            case ResultRejected(number=number):
                self._print(
                    f"A stale result of #{number} was rejected: another worker has the trial. "
                    "The result is stored separately."
                )
            case WaitingForStorage(message=message, limit_seconds=limit):
                self._print(
                    f"{message[0].upper()}{message[1:]}; waiting up to {format_duration(limit)}, "
                    "no result is lost."
                )
            case StorageBack(seconds=seconds):
                self._print(
                    f"The studies database can be reached again after {format_duration(seconds)}."
                )
            case WorkerEnded(number=number, exit_code=code, log_file=log_file):
                self._print(f"Worker {number} ended with exit code {code}; see {log_file}.")

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)

    def __enter__(self) -> "PlainDisplay":
        return self

    def __exit__(self, *_: object) -> None:
        pass


_PRINTED_ABOVE = (
    Notice,
    StudyOpened,
    SameProgram,
    SpaceExhausted,
    Converged,
    BudgetSpent,
    AttemptLost,
    PoisonTrial,
    ResultRejected,
    WaitingForStorage,
    StorageBack,
    WorkerEnded,
)
"""Events that are printed as a line above the live table."""


class LiveDisplay:
    """Shows a table of the latest trials, a progress bar, the time left and the best so far."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress = progress
        self._plain = PlainDisplay(progress, console)
        self._live = Live(
            get_renderable=self._draw, console=console, refresh_per_second=4, transient=True
        )

    def __call__(self, event: Event) -> None:
        if isinstance(event, _PRINTED_ABOVE):
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
            return Group(Spinner("dots", text=Text(progress.preparing or "starting")))
        table = Table(box=None, pad_edge=False, expand=True)
        for column, options in _COLUMNS.items():
            table.add_column(column, **options)
        for record in progress.records[-_ROWS_SHOWN:]:
            table.add_row(*_live_row(record), style="" if record.feasible else "dim")
        running: list[Spinner] = []
        if progress.running is not None:
            name = f"{progress.running.name}: " if progress.running.name else ""
            text = f" #{progress.running.number} {name}{progress.running.config.describe()}"
            running.append(Spinner("dots", text=Text(text)))
        if progress.meanwhile:
            running.append(Spinner("dots", text=Text(f" {progress.meanwhile}")))
        bar = ProgressBar(total=max(1, progress.wanted), completed=len(progress.records), width=30)
        status = Table.grid(padding=(0, 2))
        status.add_row(bar, Text(progress.status()))
        return Group(table, *running, Text(""), status, Text(progress.best(), style="bold"))


_COLUMNS: dict[str, dict[str, Any]] = {
    "#": {"justify": "right", "no_wrap": True},
    "configuration": {"ratio": 1, "no_wrap": True, "overflow": "ellipsis"},
    "peak memory": {"justify": "right", "no_wrap": True},
    "tokens/s": {"justify": "right", "no_wrap": True},
    "perplexity": {"justify": "right", "no_wrap": True},
    "outcome": {"no_wrap": True, "max_width": 34, "overflow": "ellipsis"},
}


def _live_row(record: TrialRecord) -> list[Text | str]:
    size = "-" if record.peak_memory_bytes is None else format_size(record.peak_memory_bytes)
    perplexity = format_perplexity(record) or "-"
    outcome = OUTCOME_LABELS[record.outcome]
    if record.reused_from:
        outcome += f", {record.reused_from}"
    return [str(record.number), describe(record), size, speed(record), perplexity, Text(outcome)]


def _one_line(record: TrialRecord) -> str:
    words = [f"#{record.number} {describe(record).plain}:"]
    if record.peak_memory_bytes is not None:
        words.append(format_size(record.peak_memory_bytes))
    if record.tokens_per_second is not None:
        words.append(f"{speed(record)} tokens/s")
    if record.perplexity is not None:
        source = perplexity_source_text(record)
        words.append(f"perplexity {record.perplexity:.2f}")
        if source:
            words.append(f"({source})")
    if record.outcome != "ok":
        words.append(OUTCOME_LABELS[record.outcome])
        if record.message:
            words.append(f"({record.message})")
    return " ".join(words)


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
    time_budget_seconds: float | None,
    until_converged: bool = False,
) -> LiveDisplay | PlainDisplay | SilentDisplay:
    """Return the display that suits stderr: a listener for events and a context manager."""
    if quiet:
        return SilentDisplay()
    console = make_console(sys.stderr)
    progress = Progress(
        preferences=preferences,
        time_budget_seconds=time_budget_seconds,
        until_converged=until_converged,
    )
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(progress, console)
    return PlainDisplay(progress, console)
