"""Commands as a user types them, run in this process: the same text without a new interpreter.

Where the process itself is the property (signals, a terminal, what is imported), a test starts
`python -m autotune`.
"""

import contextlib
import io
import os
import sys
from dataclasses import dataclass
from unittest import mock

from autotune.cli import main

NO_WIDTH_AND_NO_COLOUR = ("COLUMNS", "NO_COLOR", "FORCE_COLOR")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended, with the names of `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


def run_here(*arguments, folder, **environment) -> Ended:
    """Run `autotune` with these arguments in `folder`, its output in pipes."""
    settings = {k: v for k, v in os.environ.items() if k not in NO_WIDTH_AND_NO_COLOUR}
    stdout, stderr = io.BytesIO(), io.BytesIO()
    with (
        mock.patch.dict(os.environ, {**settings, **environment}, clear=True),
        mock.patch.object(sys, "argv", ["autotune", *arguments]),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(_text_to(stdout)),
        contextlib.redirect_stderr(_text_to(stderr)),
    ):
        try:
            main()
        except SystemExit as ended:
            return Ended(
                returncode=ended.code or 0,
                stdout=stdout.getvalue().decode(),
                stderr=stderr.getvalue().decode(),
            )
    raise AssertionError("a command ends the process")


def _text_to(pipe: io.BytesIO) -> io.TextIOWrapper:
    return io.TextIOWrapper(pipe, encoding="utf-8", write_through=True)
