"""The command line: one file a command, and the only place where errors become exit codes.

Exit codes: 0 ok; 1 finished and nothing feasible; 2 usage or an invalid file; 70 internal error; 75
stopped, can be continued; 130 and 143 on SIGINT and SIGTERM.
"""

import io
import os
import sys
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any

import typer
from typer.exceptions import TyperException
from typer.main import get_command

from autotune.cli import (
    compare,
    doctor,
    explain,
    export,
    fit,
    plot,
    predict,
    report,
    search,
    show,
    studies,
)
from autotune.errors import AutotuneError

_PROGRAM = "autotune"
_LONGEST_LINE = 1000

app = typer.Typer(
    name=_PROGRAM,
    help="The fastest way to train your model inside the GPU memory you have, found by measuring.",
    add_completion=False,
    pretty_exceptions_enable=False,
    # plain help: whole option names at any width, brackets as written, quick to start
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("search")(search.search)
app.command("predict")(predict.predict)
app.command("show")(show.show)
app.add_typer(studies.app, name="studies")
app.command("plot")(plot.plot)
app.command("report")(report.report)
app.command("compare")(compare.compare)
app.command("export")(export.export)
app.command("explain")(explain.explain)
app.command("fit")(fit.fit)
app.command("doctor")(doctor.doctor)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        from autotune import __version__

        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


def main() -> None:
    """Entry point of the `autotune` command."""
    # A name of a file may hold what is no character; it ends no output.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        exit_code = _command()(prog_name=_PROGRAM, standalone_mode=False)
        sys.stdout.flush()
    except AutotuneError as error:
        complain(error.message, error.hint)
        exit_code = error.exit_code
    except TyperException as error:
        if message := error.format_message():  # empty where the help has been printed instead
            complain(" ".join(message.split()), f"see {_command_of(error)} --help")
        exit_code = 2
    except typer.Abort:
        exit_code = 130
    except (BrokenPipeError, SystemExit) as error:
        # The reader of our output has gone, as with `| head`; typer makes it an exit of its own.
        if not isinstance(error.__context__ or error, BrokenPipeError):
            raise
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # nothing more to flush at the end
        exit_code = 0
    except Exception:
        traceback.print_exc()
        complain("this is a defect of autotune", "please report it with the lines above")
        exit_code = 70
    sys.exit(exit_code or 0)


@cache
def _command() -> Callable[..., Any]:
    """The commands with all their options, put together once a process."""
    return get_command(app)


def complain(message: str, hint: str) -> None:
    """One `error:` line and one `hint:` line on stderr."""
    print(f"error: {_on_one_line(message)}", file=sys.stderr)
    if hint:
        print(f"hint: {_on_one_line(hint)}", file=sys.stderr)


def _on_one_line(text: str) -> str:
    """With what would end the line or steer the terminal spelled out, and the middle of an endless value left out."""
    if len(text) > _LONGEST_LINE:
        text = f"{text[: _LONGEST_LINE // 2]} ... {text[-_LONGEST_LINE // 2 :]}"
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _command_of(error: TyperException) -> str:
    context = getattr(error, "ctx", None)
    return _PROGRAM if context is None else context.command_path
