"""Progress in a notebook: one output of the cell, replaced while a search runs.

Jupyter, JupyterLab, VS Code and Colab show it: an output with an identity that later messages
update needs no widgets, which Rich's live display would. Its rows are those of a result's table in
`reporting/result_html.py`, HTML that a reader can copy into a spreadsheet.
"""

import contextvars
import importlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from autotune.printable import printable
from autotune.reporting.html_text import html_text
from autotune.units import format_duration

if TYPE_CHECKING:
    from autotune.analysis.pick import Preferences
    from autotune.study.events import Event, Listener
    from autotune.study.progress import Progress

_ROWS_SHOWN = 8
_NOTES_SHOWN = 6
_SECONDS_BETWEEN_UPDATES = 0.5
_DONE = "Done"

Show = Callable[[str, str], None]
"""Shows HTML, and the text for what cannot show HTML, in place of what it showed before."""


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which can show HTML."""
    ipython = sys.modules.get("IPython")  # a kernel has imported it
    if ipython is None:
        return False
    return getattr(ipython.get_ipython(), "kernel", None) is not None


def cell_output() -> Show:
    """Returns a function that shows HTML in one output of the current cell."""
    from IPython.display import DisplayHandle  # noqa: PLC0415  # only in a notebook

    handle = DisplayHandle()
    shown: list[str] = []

    def show(html: str, text: str) -> None:
        if shown == [html]:
            return
        bundle = {"text/html": html, "text/plain": text}
        # The connection to the page may raise anything of its own; the search goes on without it.
        with suppress(Exception):
            if shown:
                handle.update(bundle, raw=True)
            else:
                handle.display(bundle, raw=True)
            shown[:] = [html]

    return show


@contextmanager
def status_line(doing: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows one line of progress, outside a notebook nowhere.

    At the end the line says how long it took, what `doing` names.
    """
    if not is_notebook():
        yield lambda _: None
        return
    show = cell_output()
    begun = time.monotonic()

    def say(line: str) -> None:
        elapsed = format_duration(time.monotonic() - begun)
        text = f"{doing}: {line}, {elapsed}"
        show(f"<p>{html_text(text)}</p>", printable(text))

    say("starting")
    try:
        yield say
    except BaseException:
        say("stopped")
        raise
    say("done")


@contextmanager
def live_progress(*, preferences: "Preferences", until_converged: bool) -> "Iterator[Listener]":
    """Yield a listener that shows a running search in the output of the cell."""
    # The search imports it in any case, a script that only trains does not.
    from autotune.study.progress import Progress  # noqa: PLC0415

    with warnings.catch_warnings():
        # Optuna imports it, and without widgets it warns into the cell.
        warnings.filterwarnings("ignore", message="IProgress not found")
        importlib.import_module("tqdm.auto")
    progress = Progress(preferences=preferences, until_converged=until_converged)
    with LiveOutput(progress, cell_output()) as display:
        yield display


class LiveOutput:
    """Shows the latest trials, a progress bar, the time left and the best so far, twice a second.

    A thread of its own shows the time that passes while a trial runs.
    """

    def __init__(self, progress: "Progress", show: Show) -> None:
        self._progress = progress
        self._show = show
        self._notes: list[str] = []
        self._begun = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        # In the context of the cell: outputs of a thread belong to no cell otherwise.
        in_cell = contextvars.copy_context().run
        self._thread = threading.Thread(target=in_cell, args=(self._refresh,), daemon=True)

    def __call__(self, event: "Event") -> None:
        # The database's mapper and numpy, which a script that only trains does without.
        from autotune.study.events import LASTING_EVENTS  # noqa: PLC0415

        with self._lock:
            self._progress.note(event)
            if isinstance(event, LASTING_EVENTS):
                self._notes += self._progress.lines(event)

    def __enter__(self) -> "LiveOutput":
        self._draw()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if kind is None:
            self._draw(ended=_DONE)
        elif issubclass(kind, KeyboardInterrupt):
            again = "run the cell again to continue"
            self._draw(ended=f"Stopped; every finished trial is stored, {again}")
        else:
            self._draw(ended="Ended by an error; every finished trial is stored")

    def _refresh(self) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_UPDATES):
            self._draw()

    def _draw(self, *, ended: str = "") -> None:
        with self._lock:
            html, text = self._html(ended), self._plain(ended)
        self._show(html, printable(text, keep_lines=True))

    def _plain(self, ended: str) -> str:
        now = ended or "\n".join(self._progress.doing())
        if self._progress.opened is None:
            return now
        return f"{now}\n{self._progress.status()}\n{self._progress.best()}"

    def _html(self, ended: str) -> str:
        from autotune.reporting.result_html import trials_html  # noqa: PLC0415  # as above

        progress = self._progress
        now = time.monotonic()
        parts = [f"<div>{html_text(note)}</div>" for note in self._notes[-_NOTES_SHOWN:]]
        if ended:
            parts.append(f"<p>{html_text(ended)}. {format_duration(now - self._begun)}</p>")
        elif doing := [*_lines_of_places(progress), *progress.doing()]:
            parts.append(f"<p>{'<br>'.join(map(html_text, doing))}</p>")
        if progress.opened is None:
            return f"<div>{''.join(parts)}</div>"
        done = len(progress.records)
        wanted = progress.wanted
        if ended == _DONE:  # also where the space had fewer than that
            wanted = done
        parts.append(
            f'<p><progress max="{max(1, wanted)}" value="{done}"></progress> '
            f"{html_text(progress.status())}</p><p><b>{html_text(progress.best())}</b></p>"
        )
        latest = progress.records[-_ROWS_SHOWN:]
        if latest and not ended:
            parts.append(trials_html(progress.so_far(), latest))
        return f"<div>{''.join(parts)}</div>"


def _lines_of_places(progress: "Progress") -> list[str]:
    """Returns a line for each of several places."""
    return [f"{place.name}: {'; '.join(place.lines()) or 'idle'}" for place in progress.places()]
