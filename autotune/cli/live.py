"""A running search for the eyes: a live table on a terminal, plain lines elsewhere. Always on stderr."""

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from autotune.cli.tables import describe, make_console, speed
from autotune.quantities import format_duration, format_size
from autotune.recommendation.front import pareto_front
from autotune.recommendation.pick import Preferences, choose
from autotune.reporting.outcomes import OUTCOME_WORDS, outcome_counts
from autotune.result import TrialRecord
from autotune.study.events import (
    BudgetSpent,
    Comparing,
    Converged,
    Event,
    Predicting,
    Preparing,
    SameProgram,
    SpaceExhausted,
    StudyOpened,
    TrialBegan,
    TrialEnded,
)
from autotune.study.pace import seconds_left

_ROWS_SHOWN = 14
_STUDIES_SHOWN = 3


class Progress:
    """What has happened so far, and what can be said of the rest."""

    def __init__(
        self, *, preferences: Preferences, time_budget_seconds: float | None, until_converged: bool = False
    ) -> None:
        self._preferences = preferences
        self._until_converged = until_converged
        self._budget_seconds = time_budget_seconds
        self._ended_at = [time.monotonic()]
        self.opened: StudyOpened | None = None
        self.records: list[TrialRecord] = []
        self.running: TrialBegan | None = None
        self.preparing = self.meanwhile = ""

    def note(self, event: Event) -> None:
        match event:
            case Preparing(what=what):
                self.preparing = what
            case StudyOpened():
                self.opened, self.records = event, [r for r in event.records if r.is_finished]
                self._ended_at = [time.monotonic()]
            case Predicting(config=config):
                self.meanwhile = f"predicting {config.describe()}"
            case Comparing(config=config):
                self.meanwhile = f"first steps of {config.describe()}, to compare"
            case SameProgram():
                self.meanwhile = ""
            case TrialBegan():
                self.running, self.meanwhile = event, ""
            case TrialEnded(record=record):
                self.running, self.meanwhile = None, ""
                self.records.append(record)
                self._ended_at.append(time.monotonic())

    @property
    def wanted(self) -> int:
        return self.opened.trials_wanted if self.opened else 0

    def seconds_left(self) -> float | None:
        """By the pace of the latest trials, and never beyond the time budget; None before the first trial ended."""
        now = time.monotonic()
        left = seconds_left(self._ended_at, now=now, trials_left=self.wanted - len(self.records))
        if left is None or self._budget_seconds is None:
            return left
        return min(left, max(0.0, self._budget_seconds - (now - self._ended_at[0])))

    def best(self) -> str:
        """The pick so far in one line."""
        front = pareto_front(self.records, tolerance=self._preferences.tolerance)
        pick = choose(self.records, front, baseline=None, preferences=self._preferences)
        if pick is None:
            return "nothing feasible yet"
        record = next(record for record in self.records if record.number == pick.number)
        size = format_size(record.peak_memory_bytes or 0)
        return f"best so far #{record.number}: {size}, {speed(record)} tokens/s, perplexity {record.perplexity:.2f}"

    def status(self) -> str:
        left = self.seconds_left()
        parts = [f"{len(self.records)}/{self.wanted}", outcome_counts(self.records)]
        about = "at most" if self._until_converged else "about"
        return "  ".join([*parts, f"{about} {format_duration(left)} left"] if left else parts)


def headline(opened: StudyOpened) -> str:
    definition = opened.definition
    verb = "Study" if opened.is_new else "Continuing study"
    return (
        f"{verb} {definition.name}: {definition.workload.describe()}, under {format_size(definition.cap_bytes)} on "
        f"{definition.device.device} ({definition.device.name})"
    )


def left_out_line(opened: StudyOpened) -> str:
    return f"Left out: {'; '.join(opened.legal.left_out)}" if opened.legal.left_out else ""


def taken_over_line(counts: Mapping[str, int]) -> str:
    """`Taken over  12 results: 9 of study a, 3 of study b; --fresh measures them anew`; empty where there are none."""
    if not counts:
        return ""
    shown = [f"{count} of study {study}" for study, count in list(counts.items())[:_STUDIES_SHOWN]]
    rest = sum(list(counts.values())[_STUDIES_SHOWN:])
    total = sum(counts.values())
    said = ", ".join([*shown, *([f"{rest} of older ones"] if rest else [])])
    return f"Taken over  {total} result{'' if total == 1 else 's'}: {said}; --fresh measures them anew"


class PlainDisplay:
    """One line an event, for files and pipes."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress, self._console = progress, console

    def __call__(self, event: Event) -> None:
        self._progress.note(event)
        match event:
            case Preparing(what=what):
                self._say(f"{what[0].upper()}{what[1:]} ...")
            case StudyOpened():
                self._say(headline(event))
                if line := left_out_line(event):
                    self._say(line)
                if line := taken_over_line(event.taken_over):
                    self._say(line)
                if event.definition.device.others:
                    self._say(f"Warning: {event.definition.device.device}: {event.definition.device.others}")
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

    def _say(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)

    def __enter__(self) -> "PlainDisplay":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class LiveDisplay:
    """A table of the latest trials that fills, with a bar, the time left and the best so far."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress = progress
        self._plain = PlainDisplay(progress, console)
        self._live = Live(get_renderable=self._draw, console=console, refresh_per_second=4, transient=True)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StudyOpened | SameProgram | SpaceExhausted | Converged | BudgetSpent):
            self._plain(event)  # stays above the live part
        else:
            self._progress.note(event)

    def __enter__(self) -> "LiveDisplay":
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
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
    perplexity = "-" if record.perplexity is None else f"{record.perplexity:.2f}"
    outcome = OUTCOME_WORDS[record.outcome] + (f", {record.reused_from}" if record.reused_from else "")
    return [str(record.number), describe(record), size, speed(record), perplexity, Text(outcome)]


def _one_line(record: TrialRecord) -> str:
    words = [f"#{record.number} {describe(record).plain}:"]
    if record.peak_memory_bytes is not None:
        words.append(format_size(record.peak_memory_bytes))
    if record.tokens_per_second is not None:
        words.append(f"{speed(record)} tokens/s")
    if record.perplexity is not None:
        words.append(f"perplexity {record.perplexity:.2f}")
    if record.outcome != "ok":
        words.append(OUTCOME_WORDS[record.outcome] + (f" ({record.message})" if record.message else ""))
    return " ".join(words)


class SilentDisplay:
    def __call__(self, event: Event) -> None:
        pass

    def __enter__(self) -> "SilentDisplay":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def make_display(
    *, quiet: bool, preferences: Preferences, time_budget_seconds: float | None, until_converged: bool = False
) -> LiveDisplay | PlainDisplay | SilentDisplay:
    if quiet:
        return SilentDisplay()
    console = make_console(sys.stderr)
    progress = Progress(
        preferences=preferences, time_budget_seconds=time_budget_seconds, until_converged=until_converged
    )
    display: Callable[[Progress, Console], LiveDisplay | PlainDisplay]
    display = LiveDisplay if console.is_terminal and not console.is_dumb_terminal else PlainDisplay
    return display(progress, console)
