"""Shows on stderr how far predictions are: a bar on a terminal, lines in a file or a pipe."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from autotune.cli.lines import print_line
from autotune.cli.tables import make_console
from autotune.units import format_duration

_SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def predicting(
    *, quiet: bool, seconds_between_lines: float = _SECONDS_BETWEEN_LINES
) -> Iterator[Callable[[int, int | None], None]]:
    """Yields what is told how many predictions are made, and of how many, None if not known.

    A line is printed at the beginning and then every few seconds, whether or not it is told
    anything: a single prediction of a large model takes half a minute.
    """
    if quiet:
        yield lambda _made, _wanted: None
        return
    if sys.stderr.isatty():
        columns = (TextColumn("predicting"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=make_console(sys.stderr), transient=True) as progress:
            task = progress.add_task("", total=None)
            yield lambda made, wanted: progress.update(task, completed=made, total=wanted)
        return
    began = time.monotonic()
    known: tuple[int, int | None] = (0, None)
    has_ended = Event()

    def tell(made: int, wanted: int | None) -> None:
        nonlocal known
        known = made, wanted

    def print_lines() -> None:
        while not has_ended.wait(seconds_between_lines):
            made, wanted = known
            count = str(made) if wanted is None else f"{made} of {wanted}"
            what = f"{count} predicted" if count != "0" else "still predicting"
            elapsed = format_duration(time.monotonic() - began)
            print_line(f"{what}, after {elapsed}", to_stderr=True, flush=True)

    print_line("Predicting ...", to_stderr=True, flush=True)
    printer = Thread(target=print_lines, daemon=True)
    printer.start()
    try:
        yield tell
    finally:
        has_ended.set()
        printer.join()
