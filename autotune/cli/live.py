"""A running search for the eyes: a live table on a terminal, plain lines elsewhere.

Always on stderr.
"""

import sys
from collections.abc import Callable, Mapping
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
from autotune.reporting.outcomes import OUTCOME_WORDS
from autotune.reporting.trial_text import perplexity_source_words, perplexity_words
from autotune.spec.result import TrialRecord
from autotune.study.events import (
    AttemptLost,
    BudgetSpent,
    ComesLast,
    Converged,
    Event,
    Notice,
    Preparing,
    ResultRefused,
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
from autotune.units import format_duration, format_size

_ROWS_SHOWN = 14
_STUDIES_SHOWN = 3


def headline(opened: StudyOpened) -> str:
    definition = opened.definition
    verb = "Study" if opened.is_new else "Continuing study"
    return (
        f"{verb} {definition.name}: {definition.workload.describe()}, under {format_size(definition.cap_bytes)} on "
        f"{definition.device.device} ({definition.device.name})"
    )


def left_out_line(opened: StudyOpened) -> str:
    return f"Left out: {'; '.join(opened.legal.excluded)}" if opened.legal.excluded else ""


def reused_line(counts: Mapping[str, int]) -> str:
    """`Taken over  12 results: 9 of study a, 3 of study b; --fresh measures them anew`; empty where there are none."""
    if not counts:
        return ""
    shown = [f"{count} of study {study}" for study, count in list(counts.items())[:_STUDIES_SHOWN]]
    rest = sum(list(counts.values())[_STUDIES_SHOWN:])
    total = sum(counts.values())
    said = ", ".join([*shown, *([f"{rest} of older ones"] if rest else [])])
    return (
        f"Taken over  {total} result{'' if total == 1 else 's'}: {said}; --fresh measures them anew"
    )


class PlainDisplay:
    """One line an event, for files and pipes."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress, self._console = progress, console
        self._said_waiting: set[str | tuple[int, ...]] = set()

    def __call__(self, event: Event) -> None:
        self._progress.note(event)
        match event:
            case Preparing(what=what):
                self._say(f"{what[0].upper()}{what[1:]} ...")
            case Notice(message=message):
                self._say(f"Note: {message}.")
            case StudyOpened():
                self._say(headline(event))
                if line := left_out_line(event):
                    self._say(line)
                if line := reused_line(event.reused):
                    self._say(line)
                if event.definition.device.others:
                    self._say(
                        f"Warning: {event.definition.device.device}: {event.definition.device.others}"
                    )
                for note in event.definition.device.notes:
                    self._say(f"Note: {note}.")
            case TrialEnded(record=record):
                self._say(f"[{self._progress.status()}]  {_one_line(record)}")
            case SameProgram(config=config, number=number):
                self._say(f"{config.describe()}: the same program as #{number}, not run again")
            case SpaceExhausted(trials=trials):
                self._say(
                    f"Nothing worth trying is left after {trials} trials: every other configuration runs the program "
                    "of one of them, will not fit, or is surely beaten."
                )
            case Converged(trials=trials, relative_gain=gain):
                self._say(
                    f"Converged after {trials} trials: the most promising one left is expected to add "
                    f"{100 * gain:.2f} % to the hypervolume of the front."
                )
            case BudgetSpent(trials=trials, trials_wanted=wanted):
                self._say(f"The time budget is spent: {trials} of {wanted} trials.")
            case WaitingForDevice(device=waited_for) | WaitingForOthers(numbers=waited_for):
                if waited_for in self._said_waiting:
                    return  # once, however often it has to, and whoever has it
                self._said_waiting.add(waited_for)
                self._say(f"{self._progress.meanwhile[0].upper()}{self._progress.meanwhile[1:]}.")
            case AttemptLost(number=number, cause=cause, attempts_left=left):
                then = f"tried again, {left} attempts left" if left else "left for a later search"
                self._say(f"#{number} was lost, not by its own fault: {cause}; {then}.")
            case ComesLast(number=number, deaths=deaths):
                self._say(
                    f"#{number} was under way each time when {deaths} searches or workers died; it comes last."
                )
            case ResultRefused(number=number):
                self._say(
                    f"A late result of #{number} was refused: another worker has the trial. It is kept aside."
                )
            case WaitingForStorage(message=message, limit_seconds=limit):
                self._say(
                    f"{message[0].upper()}{message[1:]}; results are kept, waiting up to {format_duration(limit)}."
                )
            case StorageBack(seconds=seconds):
                self._say(f"The studies database is back after {format_duration(seconds)}.")
            case WorkerEnded(number=number, exit_code=code, log_file=log_file):
                self._say(f"Worker {number} ended with exit code {code}; see {log_file}.")

    def _say(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)

    def __enter__(self) -> "PlainDisplay":
        return self

    def __exit__(self, *_: object) -> None:
        pass


_STAYS_ABOVE = (
    Notice,
    StudyOpened,
    SameProgram,
    SpaceExhausted,
    Converged,
    BudgetSpent,
    AttemptLost,
    ComesLast,
    ResultRefused,
    WaitingForStorage,
    StorageBack,
    WorkerEnded,
)
"""What is said in a line of its own over the live table."""


class LiveDisplay:
    """A table of the latest trials that fills, with a bar, the time left and the best so far."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress = progress
        self._plain = PlainDisplay(progress, console)
        self._live = Live(
            get_renderable=self._draw, console=console, refresh_per_second=4, transient=True
        )

    def __call__(self, event: Event) -> None:
        if isinstance(event, _STAYS_ABOVE):
            self._plain(event)  # stays above the live part
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
    perplexity = perplexity_words(record) or "-"
    outcome = OUTCOME_WORDS[record.outcome] + (
        f", {record.reused_from}" if record.reused_from else ""
    )
    return [str(record.number), describe(record), size, speed(record), perplexity, Text(outcome)]


def _one_line(record: TrialRecord) -> str:
    words = [f"#{record.number} {describe(record).plain}:"]
    if record.peak_memory_bytes is not None:
        words.append(format_size(record.peak_memory_bytes))
    if record.tokens_per_second is not None:
        words.append(f"{speed(record)} tokens/s")
    if record.perplexity is not None:
        source = perplexity_source_words(record)
        words.append(f"perplexity {record.perplexity:.2f}" + (f" ({source})" if source else ""))
    if record.outcome != "ok":
        words.append(
            OUTCOME_WORDS[record.outcome] + (f" ({record.message})" if record.message else "")
        )
    return " ".join(words)


class SilentDisplay:
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
    if quiet:
        return SilentDisplay()
    console = make_console(sys.stderr)
    progress = Progress(
        preferences=preferences,
        time_budget_seconds=time_budget_seconds,
        until_converged=until_converged,
    )
    display: Callable[[Progress, Console], LiveDisplay | PlainDisplay]
    display = LiveDisplay if console.is_terminal and not console.is_dumb_terminal else PlainDisplay
    return display(progress, console)
