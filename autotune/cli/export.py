"""`autotune export`: write a trial's configuration as files for another trainer."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from autotune import api
from autotune.analysis.pick import PREFERENCES
from autotune.cli import completion, options
from autotune.cli.tables import make_console
from autotune.errors import IllegalConfiguration, InvalidInput, StorageUnavailable, suggestion
from autotune.exporters import TARGETS
from autotune.exporters.export import Export, Target, Unsupported
from autotune.exporters.recipe import recipe_of
from autotune.spec.result import JSON_SCHEMA, StudyResult, TrialRecord
from autotune.spec.study import RESULTS_FOLDER
from autotune.spec.user_code import is_function_reference, read_reference
from autotune.spec.user_paths import expanded, path_exists
from autotune.spec.workload import STANDARD_LIBRARY_TEXT, Workload


def export(
    study: options.StudyArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            "-t",
            metavar="TARGET",
            autocompletion=completion.one_of(TARGETS),
            help=f"Trainer to export to: {', '.join(TARGETS)}.",
        ),
    ],
    trial: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            autocompletion=completion.trials,
            help="Number of the trial. [default: the study's pick]",
            min=0,
        ),
    ] = None,
    pick: Annotated[
        str | None,
        typer.Option(
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
            metavar="FOLDER",
            help="Folder to write to. [default: studies/STUDY-TARGET-TRIAL]",
        ),
    ] = None,
    target_version: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION", help="Version of the trainer. [default: the first supported one]"
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Write nothing if the target cannot express all of the configuration."
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite existing files in the folder of --out.")
    ] = False,
    tolerance: options.ToleranceOption = None,
    max_perplexity_increase: options.PerplexityOption = options.PERPLEXITY_INCREASE,
    storage: options.StorageOption = options.STORAGE,
    as_json: options.JsonOption = False,
) -> None:
    """Export a trial to another trainer, and say what that trainer cannot express."""
    if to not in TARGETS:
        raise InvalidInput(
            f"there is no target {to!r}",
            hint=suggestion(to, TARGETS, otherwise=f"use one of {', '.join(TARGETS)}"),
        )
    target = TARGETS[to]
    version = _version(to, target, target_version)
    if trial is not None and pick is not None:
        raise InvalidInput(
            f"--trial {trial} and --pick {pick} both select the trial",
            hint="leave one of them out",
        )
    preferences = options.preferences_of(tolerance, pick or options.PREFER, max_perplexity_increase)
    result = api.show(study, storage=storage, preferences=preferences)
    record = _record(result, trial)
    recipe = recipe_of(result, record)
    recipe = dataclasses.replace(recipe, workload=_with_absolute_paths(recipe.workload))
    written = target.write(recipe, version)
    if strict:
        _check_complete(written, to)
    folder = out or RESULTS_FOLDER / f"{study}-{to}-{record.number}"
    _write(written, folder, overwrite=out is None or force)
    if as_json:
        content = _to_dict(written, target=to, version=version, record=record, folder=folder)
        print(json.dumps(content, indent=2))
    else:
        _print_export(written, target=target, record=record, folder=folder)


def _version(name: str, target: Target, requested: str | None) -> str:
    if requested is not None and requested not in target.versions:
        raise InvalidInput(
            f"there is no export to version {requested!r} of {name}",
            hint=f"use one of {', '.join(target.versions)}",
        )
    return requested or target.versions[0]


def _record(result: StudyResult, number: int | None) -> TrialRecord:
    if number is None:
        if result.pick is None:
            raise InvalidInput(
                f"study {result.study!r} has no feasible trial to pick",
                hint=f"name one with --trial, see autotune show {result.study}",
            )
        return result.trial(result.pick.number)
    record = next((record for record in result.trials if record.number == number), None)
    if record is None:
        known = (
            f"its trials are 0 to {len(result.trials) - 1}" if result.trials else "it has none yet"
        )
        raise InvalidInput(
            f"study {result.study!r} has no trial {number}",
            hint=f"{known}; see autotune show {result.study}",
        )
    return record


def _with_absolute_paths(workload: Workload) -> Workload:
    """Make the paths of the workload absolute: the export is used in another folder."""
    paths = {
        "dataset": workload.dataset,
        "tokenizer": workload.tokenizer,
        "script": workload.script,
    }
    found = {name: _absolute(path) for name, path in paths.items() if path not in _NOT_PATHS}
    if is_function_reference(workload.model):
        reference = read_reference(workload.model)
        if reference.file is not None:
            found["model"] = f"{_absolute(str(reference.file))}:{reference.function}"
    return dataclasses.replace(workload, **found)  # type: ignore[arg-type]  # all are strings


_NOT_PATHS = (None, STANDARD_LIBRARY_TEXT, "bytes", "bpe")


def _absolute(path: str | None) -> str | None:
    return str(expanded(path).absolute()) if path and path_exists(path) else path


def _check_complete(written: Export, target: str) -> None:
    """Raise IllegalConfiguration if the target cannot express the trial.

    A setting that is left to the user's script does not count, unless it is a technique.
    """
    missing = [
        entry for entry in written.unsupported if entry.is_technique or entry.instead is not None
    ]
    if not missing:
        return
    message = f"{target} cannot express {_setting(missing[0])}: {missing[0].why}"
    if len(missing) > 1:
        message += f" (and {len(missing) - 1} more)"
    hint = "leave --strict out to write what it can"
    if target != "pytorch":
        hint += ", or export to pytorch"
    raise IllegalConfiguration(message, hint=hint)


def _write(written: Export, folder: Path, *, overwrite: bool) -> None:
    """Write the files. Without `overwrite`, write nothing if a different file exists already."""
    contents = {
        folder / name: text.encode("utf-8", errors="backslashreplace")
        for name, text in written.files.items()
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in contents.items():
            if not overwrite and file.exists() and file.read_bytes() != content:
                raise InvalidInput(
                    f"{file} already exists, with other content",
                    hint="name another folder with --out, or overwrite it with --force",
                )
        for file, content in contents.items():
            file.write_bytes(content)
        _warn_of_others(folder, set(written.files))
    except OSError as error:
        raise StorageUnavailable(
            f"{folder} cannot be written to: {error.strerror or error}",
            hint="name another folder with --out",
        ) from None


def _warn_of_others(folder: Path, written: set[str]) -> None:
    """Warn about modules of an earlier export in the folder: Python would import them as well."""
    others = sorted(file.name for file in folder.glob("autotune_*") if file.name not in written)
    if others:
        print(
            f"note: {folder} also holds {', '.join(others)}, which is not part of this export",
            file=sys.stderr,
        )


# -- output ----------------------------------------------------------------------------------------


def _print_export(written: Export, *, target: Target, record: TrialRecord, folder: Path) -> None:
    console = make_console()

    def say(line: str = "", style: str = "") -> None:
        console.print(Text(line, style=style), soft_wrap=True)

    say(f"#{record.number} {record.config.describe()}", "bold")
    if not record.feasible:
        say(f"It is not feasible ({record.outcome.replace('_', ' ')}).", "yellow")
    say(f"for {target.title}, keys checked with {target.checked_with}:")
    for name in written.files:
        say(f"  {folder / name}")
    say()
    say("Use it, in that folder:", "bold")
    for line in written.command.splitlines():
        say(f"  {line}")
    for title, unsupported in (
        ("Not expressed", [entry for entry in written.unsupported if entry.is_technique]),
        ("Left to you", [entry for entry in written.unsupported if not entry.is_technique]),
    ):
        if unsupported:
            say()
            say(title, "bold")
            for entry in unsupported:
                instead = "" if entry.instead is None else f" ({entry.instead} instead)"
                say(f"  {_setting(entry)}{instead}: {entry.why}")
    if written.notes:
        say()
        say("Good to know", "bold")
        for note in written.notes:
            say(f"  {note}")
    if any(entry.is_technique for entry in written.unsupported):
        print(
            "note: without the techniques not expressed, memory and speed differ from the trial's",
            file=sys.stderr,
        )


def _setting(entry: Unsupported) -> str:
    return entry.setting if entry.value is None else f"{entry.setting} {entry.value}"


def _to_dict(
    written: Export, *, target: str, version: str, record: TrialRecord, folder: Path
) -> dict[str, Any]:
    return {
        "schema": JSON_SCHEMA,
        "target": target,
        "target_version": version,
        "trial": record.number,
        "files": [str(folder / name) for name in written.files],
        "command": written.command,
        "refusals": [
            {
                "setting": entry.setting,
                "value": entry.value,
                "instead": entry.instead,
                "why": entry.why,
                "is_technique": entry.is_technique,
            }
            for entry in written.unsupported
        ],
        "notes": list(written.notes),
    }
