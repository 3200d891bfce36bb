"""Prints plain lines: every line of a command that a console of `tables.py` does not print."""

import sys
import warnings
from typing import TextIO

from autotune.printable import printable

_LONGEST_LINE = 1000


def print_line(text: str, *, to_stderr: bool = False, flush: bool = False) -> None:
    """Print one line; a line break or a control character in `text` is shown as an escape."""
    file: TextIO = sys.stderr if to_stderr else sys.stdout
    print(printable(text), file=file, flush=flush)


def print_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning as Python does, for `warnings.showwarning`; it may quote any text."""
    text = warnings.formatwarning(message, category, filename, lineno, line)
    print(printable(text, keep_lines=True), end="", file=file or sys.stderr)


def on_one_line(text: str) -> str:
    """Escape control characters, and cut the middle out of a very long text."""
    if len(text) > _LONGEST_LINE:
        text = f"{text[: _LONGEST_LINE // 2]} ... {text[-_LONGEST_LINE // 2 :]}"
    return printable(text)
