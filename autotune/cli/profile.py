"""`autotune profile`: run a trial again under torch's profiler, and show where its time goes."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from autotune import api
from autotune.analysis.profile_comparison import compare_profiles
from autotune.cli import options
from autotune.cli.lines import print_line
from autotune.cli.tables import as_text, make_console
from autotune.errors import InvalidInput
from autotune.printable import printable
from autotune.reporting import profile_text
from autotune.reporting.figures import profile_comparison
from autotune.reporting.html_page import whole_page
from autotune.reporting.output_file import write_file
from autotune.spec.option import EVERYDAY, RESULTS
from autotune.spec.result import JSON_SCHEMA
from autotune.study.profiling import StoredProfile

COMPARISON_FILE = "profile-{first}-{second}.html"


def profile(
    study: options.StudyArgument,
    trials: Annotated[
        list[int] | None,
        typer.Argument(
            metavar="[TRIAL]...",
            help="Numbers of trials of the study. [default: the study's pick]",
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            rich_help_panel=EVERYDAY, metavar="N", help="How many steps to profile, up to 100."
        ),
    ] = 3,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            rich_help_panel=EVERYDAY,
            help="Say where two trials differ, in words and in a picture.",
        ),
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            rich_help_panel=EVERYDAY,
            help="Profile again where there is a profile of as many steps already.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            rich_help_panel=RESULTS,
            metavar="FOLDER",
            help="Folder for the files of one trial. [default: in the study's work folder]",
        ),
    ] = None,
    storage: options.StorageOption = options.STORAGE,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Run a trial again under torch's profiler: where its time and its memory go.

    Writes a trace that ui.perfetto.dev opens, a picture of the memory over a step, what
    torch.compile generated and, on CUDA, a snapshot for pytorch.org/memory_viz. No number of the
    trial changes. A search takes profiles itself with --profile.
    """
    wanted: list[int | None] = [*(trials or ())] or [None]
    if compare and len(wanted) != 2:
        raise InvalidInput(
            f"--compare needs two trials, and {len(trials or ())} are given",
            hint=f"autotune profile {study} 4 11 --compare",
        )
    if out is not None and len(wanted) != 1:
        raise InvalidInput(
            "--out is the folder of one trial, and several are given",
            hint="leave it out, or give one trial",
        )

    def note(sentence: str) -> None:
        if not quiet:
            print_line(printable(sentence), to_stderr=True, flush=True)

    found = [
        api.profile(study, number, steps=steps, out=out, fresh=fresh, storage=storage, note=note)
        for number in wanted
    ]
    if as_json:
        print(json.dumps(_to_dict(found), indent=2, allow_nan=False))
        return
    if compare:
        _print_comparison(*found)
        return
    for one in found:
        _print_profile(one)


def _to_dict(found: list[StoredProfile]) -> dict[str, object]:
    profiles = [
        {
            "trial": one.record.number,
            "config": one.record.config.to_dict(),
            "folder": str(one.folder),
            **one.profile.to_dict(),
        }
        for one in found
    ]
    return {"schema": JSON_SCHEMA, "study": found[0].study, "profiles": profiles}


def _print_profile(found: StoredProfile) -> None:
    console = make_console()
    profile, record = found.profile, found.record
    console.print(as_text(f"#{record.number} {record.config.describe()}", style="bold"))
    sections = profile_text.sections(profile, record.config)
    for index, (title, lines) in enumerate(sections):
        console.print()
        console.print(as_text(title, style="bold"))
        for line in lines:
            console.print(as_text(f"  {line}"), soft_wrap=True)
        if index == 0:
            console.print(_operator_table(found))
    console.print()
    console.print(as_text(f"Files in {found.folder}", style="bold"))
    for line in profile_text.file_lines(profile):
        console.print(as_text(f"  {line}"), soft_wrap=True)


def _operator_table(found: StoredProfile) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("  operator", overflow="fold")
    for title in ("calls", "own time", "of a step", "allocates"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in profile_text.operator_rows(found.profile):
        table.add_row(f"  {row.name}", row.calls, row.seconds, row.share, row.allocated)
    return table


def _print_comparison(first: StoredProfile, second: StoredProfile) -> None:
    console = make_console()
    names = (f"#{first.record.number}", f"#{second.record.number}")
    comparison = compare_profiles(first.profile, second.profile)
    for name, one in zip(names, (first, second), strict=True):
        console.print(as_text(f"{name} {one.record.config.describe()}", style="bold"))
    for title, lines in profile_text.comparison_sections(comparison, names=names):
        console.print()
        console.print(as_text(title, style="bold"))
        for line in lines:
            console.print(as_text(f"  {line}"), soft_wrap=True)
    figure = profile_comparison.compute(comparison, first.profile, second.profile, names=names)
    page = whole_page(
        f"{names[0]} and {names[1]} of {first.study}",
        about="; ".join(
            f"{name}: {one.record.config.describe()}"
            for name, one in zip(names, (first, second), strict=True)
        ),
        answer=" ".join(
            lines[0] + "." for _, lines in profile_text.comparison_sections(comparison, names=names)
        ),
        drawing=profile_comparison.draw(figure),
    )
    file = first.folder.parent / COMPARISON_FILE.format(
        first=first.record.number, second=second.record.number
    )
    write_file(file, page)
    console.print()
    console.print(as_text(str(file)))
