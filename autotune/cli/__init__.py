"""The command line; `main` turns errors into exit codes.

Each command has a file of its name, which is imported when the command is used.

Exit codes: 0 success; 1 the command finished and nothing is feasible; 2 wrong usage or an invalid
file; 70 internal error; 74 standard output cannot be written; 75 the search stopped and can be
continued; 129, 130 and 143 on SIGHUP, SIGINT and SIGTERM.
"""

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import typer
from typer.exceptions import TyperException
from typer.main import get_command

from autotune import __version__
from autotune.cli.help import SOURCES_OF_DEFAULTS
from autotune.cli.lazy import LazyCommand, LazyGroup
from autotune.cli.lines import on_one_line, print_line, print_warning
from autotune.errors import (
    AutotuneError,
    InvalidInput,
    OutputLost,
    missing_parallelism,
)
from autotune.printable import printable
from autotune.system.standard_streams import protect_streams

_PROGRAM = "autotune"


class _Commands(LazyGroup):
    """All commands, each with the first sentence of its own help."""

    lazy_commands = (
        LazyCommand(
            "search",
            "autotune.cli.search:search",
            help="Search for the fastest way to train a model under a memory cap.",
        ),
        LazyCommand(
            "predict",
            "autotune.cli.predict:predict",
            help="Predict peak memory on fake tensors.",
        ),
        LazyCommand(
            "show",
            "autotune.cli.show:show",
            help="Print every trial of a study, its front and the pick.",
        ),
        LazyCommand(
            "confirm",
            "autotune.cli.confirm:confirm",
            help="Measure the finalists of a study again, so that the pick is not the luckiest of "
            "many trials.",
        ),
        LazyCommand(
            "plot",
            "autotune.cli.plot:plot",
            help="Draw a figure of a study, by default its front, and print the name of the file.",
        ),
        LazyCommand(
            "report",
            "autotune.cli.report:report",
            help="Write a study as one HTML page that opens offline.",
        ),
        LazyCommand(
            "compare",
            "autotune.cli.compare:compare",
            help="Compare the picks of several studies and draw their fronts in one figure.",
        ),
        LazyCommand(
            "export",
            "autotune.cli.export:export",
            help="Export a trial to another trainer, and say what that trainer cannot express.",
        ),
        LazyCommand(
            "profile",
            "autotune.cli.profile:profile",
            help="Run a trial again under torch's profiler: where its time and its memory go.",
        ),
        LazyCommand(
            "explain",
            "autotune.cli.explain:explain",
            help="Explain a trial's memory peak: where it is, why, and what each technique would "
            "save there.",
        ),
        LazyCommand(
            "fit",
            "autotune.cli.fit:fit",
            help="Find the largest model, sequence length or micro batch that fits under a memory "
            "cap.",
        ),
        LazyCommand(
            "doctor",
            "autotune.cli.doctor:doctor",
            help="Check this machine: versions, devices, and which techniques work on them.",
        ),
        LazyCommand(
            "serve",
            "autotune.cli.serve:app",
            help="Serve a page and an HTTP interface: submit searches from anywhere and watch "
            "them.",
        ),
        LazyCommand(
            "worker",
            "autotune.cli.worker:worker",
            help="Run searches of the queue on the devices of this machine.",
        ),
        LazyCommand(
            "submit",
            "autotune.cli.submit:submit",
            help="Put a search in the queue of a server.",
        ),
        LazyCommand(
            "queue",
            "autotune.cli.queue:queue",
            help="List the searches of a server: queued, running and ended.",
        ),
        LazyCommand(
            "watch",
            "autotune.cli.watch:watch",
            help="Follow a search of a server to its end, and print its result.",
        ),
        LazyCommand(
            "cancel",
            "autotune.cli.cancel:cancel",
            help="Cancel searches of a server; their finished trials are kept.",
        ),
        LazyCommand(
            "studies",
            "autotune.cli.studies:app",
            help="List the studies of a database; with a subcommand, check, export or import them.",
        ),
    )


app = typer.Typer(
    name=_PROGRAM,
    cls=_Commands,
    help="Find the fastest way to train a model within your GPU memory, by short real trainings.",
    pretty_exceptions_enable=False,
    # Plain help starts faster, never cuts option names and prints brackets as they are written.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    no_defaults: bool = typer.Option(
        False,
        "--no-defaults",
        help="Leave out the defaults of autotune.toml, pyproject.toml and the environment.",
    ),
) -> None:
    if version:
        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)
    try:
        os.getcwd()
    except OSError:
        raise InvalidInput(
            "the current folder has been removed", hint="change to a folder that is there"
        ) from None


def main() -> None:
    """Entry point of the `autotune` command."""
    protect_streams()
    warnings.showwarning = print_warning
    exit_code = _run()
    try:
        sys.stdout.flush()
    except OutputLost as lost:
        exit_code = _report_lost(lost, exit_code)
    sys.exit(exit_code)


def _run() -> int:
    """Run the command of this process; return its exit code, with the error on stderr."""
    try:
        return _command()(prog_name=_PROGRAM, standalone_mode=False) or 0
    except OutputLost as lost:
        return _report_lost(lost, 0)
    except AutotuneError as error:
        print_error(error.message, error.hint)
        return error.exit_code
    except TyperException as error:
        message = " ".join(error.format_message().split())
        print_error(_source_of_default(error) + message, _usage_hint(error))
        return 2
    except typer.Abort:
        return 130
    except Exception:
        print(printable(traceback.format_exc(), keep_lines=True), end="", file=sys.stderr)
        print_error("this is a defect of autotune", "please report it with the lines above")
        return 70


def _report_lost(lost: OutputLost, exit_code: int) -> int:
    """Returns the exit code of a command whose output is lost, and says so on stderr.

    Where the reader has closed the pipe, as `| head` does, the command has done its work.
    """
    if lost.reader_has_gone:
        return exit_code
    print_error(lost.message, lost.hint)
    return exit_code if exit_code > 1 else lost.exit_code


@cache
def _command() -> Callable[..., Any]:
    """Build the command tree with all options, once per process."""
    return get_command(app)


def print_error(message: str, hint: str) -> None:
    """Print one `error:` line and, where there is a hint, a `hint:` line on stderr.

    A hint of several lines has the others indented below it.
    """
    print_line(f"error: {on_one_line(message)}", to_stderr=True)
    if hint:
        first, *others = hint.splitlines()
        print_line(f"hint: {on_one_line(first)}", to_stderr=True)
        for line in others:
            print_line(f"  {on_one_line(line)}", to_stderr=True)


def _source_of_default(error: TyperException) -> str:
    """Returns `FILE: ` where the value that is wrong is a default from there, else nothing."""
    context = getattr(error, "ctx", None)
    parameter = getattr(error, "param", None)
    if context is None or parameter is None:
        return ""
    source = context.meta.get(SOURCES_OF_DEFAULTS, {}).get(parameter.name)
    return f"{source}: " if source else ""


def _usage_hint(error: TyperException) -> str:
    """Returns the help of an argument that is missing, and where the help of the command is."""
    context = getattr(error, "ctx", None)
    if context is None:
        return f"see {_PROGRAM} --help"
    otherwise = f"see {context.command_path} --help"
    missing = getattr(error, "param", None) if "Missing" in error.format_message() else None
    if missing is not None and getattr(missing, "help", None):
        return f"{missing.help} For more {otherwise}"
    return missing_parallelism(getattr(error, "option_name", "")) or otherwise
