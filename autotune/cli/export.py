"""`autotune export`: write a trial's configuration as files for another trainer."""

import json
from pathlib import Path
from typing import Annotated

import typer

from autotune import api
from autotune.analysis.pick import PREFERENCES
from autotune.cli import completion, options
from autotune.cli.lines import print_line
from autotune.cli.server import ServerOption, check_one_place, open_client
from autotune.cli.tables import as_text, make_console
from autotune.errors import InvalidInput
from autotune.exporters import TARGETS
from autotune.exporters.written import WrittenExport, target_of, version_of
from autotune.spec.option import EVERYDAY, RESULTS


def export(
    study: options.StudyArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            "-t",
            rich_help_panel=EVERYDAY,
            metavar="TARGET",
            autocompletion=completion.one_of(TARGETS),
            help=f"Trainer to export to: {', '.join(TARGETS)}.",
        ),
    ],
    trial: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=EVERYDAY,
            metavar="NUMBER",
            help="Number of the trial. [default: the study's pick]",
            min=0,
        ),
    ] = None,
    pick: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=EVERYDAY,
            metavar="|".join(PREFERENCES),
            autocompletion=completion.one_of(PREFERENCES),
            help="Which trial of the front to export, instead of --trial. [default: fastest]",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            rich_help_panel=RESULTS,
            metavar="FOLDER",
            help="Folder to write to. [default: studies/STUDY-TARGET-TRIAL]",
        ),
    ] = None,
    target_version: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=EVERYDAY,
            metavar="VERSION",
            help="Version of the trainer. [default: the first supported one]",
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            rich_help_panel=EVERYDAY,
            help="Write nothing if the target cannot express all of the configuration.",
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            rich_help_panel=RESULTS,
            help="Overwrite existing files in the folder of --out.",
        ),
    ] = False,
    tolerance: options.ToleranceOption = None,
    max_perplexity_increase: options.PerplexityOption = options.PERPLEXITY_INCREASE,
    storage: options.StorageOption = options.STORAGE,
    server: ServerOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Export a trial to another trainer, and say what that trainer cannot express."""
    version_of(to, target_version)
    if trial is not None and pick is not None:
        raise InvalidInput(
            f"--trial {trial} and --pick {pick} both select the trial",
            hint="leave one of them out",
        )
    preferences = options.preferences_of(tolerance, pick or options.PREFER, max_perplexity_increase)
    if server is None:
        written = api.export(
            study,
            to,
            trial=trial,
            out=out,
            target_version=target_version,
            strict=strict,
            overwrite=force,
            storage=storage,
            preferences=preferences,
        )
    else:
        check_one_place(server, storage)
        with open_client(server) as client:
            written = client.export(
                study,
                to,
                trial=trial,
                out=out,
                target_version=target_version,
                strict=strict,
                overwrite=force,
                preferences=preferences,
            )
    if as_json:
        print(json.dumps(written.to_dict(), indent=2))
    else:
        _print_export(written)


def _print_export(written: WrittenExport) -> None:
    console = make_console()
    record, target = written.record, target_of(written.target)

    def say(line: str = "", style: str = "") -> None:
        console.print(as_text(line, style=style), soft_wrap=True)

    say(f"#{record.number} {record.config.describe()}", "bold")
    if not record.feasible:
        say(f"It is not feasible ({record.outcome.replace('_', ' ')}).", "yellow")
    say(f"for {target.title}, keys checked with {target.checked_with}:")
    for file in written.files:
        say(f"  {file}")
    for title, lines in written.sections():
        say()
        say(title, "bold")
        for line in lines:
            say(f"  {line}")
    if written.lacks_techniques:
        print_line(
            "note: without the techniques not expressed, memory and speed differ from the trial's",
            to_stderr=True,
        )
