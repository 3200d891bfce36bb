"""`autotune export`: a trial's configuration in the words of the trainer somebody uses."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.analysis.pick import PREFERENCES
from autotune.cli import options
from autotune.errors import IllegalConfiguration, InvalidInput, StorageUnavailable
from autotune.exporters import TARGETS
from autotune.spec.result import JSON_SCHEMA, StudyResult, TrialRecord
from autotune.spec.study import RESULTS_FOLDER
from autotune.spec.user_code import is_function_reference, read_reference
from autotune.spec.user_paths import expanded, is_there
from autotune.spec.workload import STANDARD_LIBRARY_TEXT, Workload

if TYPE_CHECKING:
    from autotune.exporters.export import Export, Refusal, Target


def export(
    study: options.StudyArgument,
    to: Annotated[
        str, typer.Option("--to", "-t", metavar="TARGET", help=f"One of {', '.join(TARGETS)}.")
    ],
    trial: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", help="Which trial. [default: the study's pick]", min=0),
    ] = None,
    pick: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(PREFERENCES),
            help="Which of the front instead of a number. [default: fastest]",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FOLDER", help="[default: studies/STUDY-TARGET-TRIAL]"),
    ] = None,
    target_version: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="Version of the trainer. [default: the usual one]"),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Write nothing where the target cannot express what the trial did."
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write over other files in the folder of --out.")
    ] = False,
    tolerance: options.ToleranceOption = None,
    max_perplexity_increase: options.PerplexityOption = options.PERPLEXITY_INCREASE,
    storage: options.StorageOption = options.STORAGE,
    as_json: options.JsonOption = False,
) -> None:
    """Write the files with which another trainer trains as a trial did, and say what it has no words for."""
    import autotune
    from autotune.exporters.recipe import recipe_of

    if to not in TARGETS:
        raise InvalidInput(f"there is no target {to!r}", hint=f"use one of {', '.join(TARGETS)}")
    target = TARGETS[to]
    version = _version(to, target, target_version)
    if trial is not None and pick is not None:
        raise InvalidInput(
            f"--trial {trial} and --pick {pick} both say what to export",
            hint="leave one of them out",
        )
    preferences = options.preferences_of(tolerance, pick or options.PREFER, max_perplexity_increase)
    result = autotune.show(study, storage=storage, preferences=preferences)
    record = _record(result, trial)
    recipe = recipe_of(result, record)
    written = target.write(dataclasses.replace(recipe, workload=_located(recipe.workload)), version)
    if strict:
        _check_strictly(written, to)
    folder = out or RESULTS_FOLDER / f"{study}-{to}-{record.number}"
    _write(written, folder, is_ours=out is None or force)
    if as_json:
        print(
            json.dumps(
                _to_dict(written, target=to, version=version, record=record, folder=folder),
                indent=2,
            )
        )
    else:
        _say(written, target=target, record=record, folder=folder)


def _version(name: str, target: "Target", asked: str | None) -> str:
    if asked is not None and asked not in target.versions:
        raise InvalidInput(
            f"there is no export to version {asked!r} of {name}",
            hint=f"use one of {', '.join(target.versions)}",
        )
    return asked or target.versions[0]


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
        there = (
            f"its trials are 0 to {len(result.trials) - 1}" if result.trials else "it has none yet"
        )
        raise InvalidInput(
            f"study {result.study!r} has no trial {number}",
            hint=f"{there}; see autotune show {result.study}",
        )
    return record


def _located(workload: Workload) -> Workload:
    """With whole paths for what is named from this folder: the files are used in their own."""
    places = {
        "dataset": workload.dataset,
        "tokenizer": workload.tokenizer,
        "script": workload.script,
    }
    found = {name: _whole(place) for name, place in places.items() if place not in _NO_PATHS}
    if (
        is_function_reference(workload.model)
        and (file := read_reference(workload.model).file) is not None
    ):
        found["model"] = f"{_whole(str(file))}:{read_reference(workload.model).function}"
    return dataclasses.replace(workload, **found)  # type: ignore[arg-type]  # a text for each of these texts


_NO_PATHS = (None, STANDARD_LIBRARY_TEXT, "bytes", "bpe")


def _whole(place: str | None) -> str | None:
    return str(expanded(place).absolute()) if place and is_there(place) else place


def _check_strictly(written: "Export", target: str) -> None:
    """What is left to somebody's own script is no failure, unless it is a technique."""
    if refused := [
        refusal
        for refusal in written.refusals
        if refusal.is_technique or refusal.instead is not None
    ]:
        first, more = refused[0], len(refused) - 1
        raise IllegalConfiguration(
            f"{target} cannot express {_named(first)}: {first.why}"
            + (f" (and {more} more)" if more else ""),
            hint="leave --strict out to write what it can"
            + (", or export to pytorch" if target != "pytorch" else ""),
        )


def _write(written: "Export", folder: Path, *, is_ours: bool) -> None:
    """`is_ours`: whether other files of these names may go.

    All or nothing, as far as can be seen before.
    """
    contents = {
        folder / name: text.encode("utf-8", errors="backslashreplace")
        for name, text in written.files.items()
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in contents.items():
            if not is_ours and file.exists() and file.read_bytes() != content:
                raise InvalidInput(
                    f"{file} is there already, and another file",
                    hint="name another folder with --out, or write over it with --force",
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
    """Python finds a module of an export before this one as well."""
    others = sorted(file.name for file in folder.glob("autotune_*") if file.name not in written)
    if others:
        print(
            f"note: {folder} also holds {', '.join(others)}, which is not of this export",
            file=sys.stderr,
        )


# -- what is said ----------------------------------------------------------------------------------


def _say(written: "Export", *, target: "Target", record: TrialRecord, folder: Path) -> None:
    from rich.text import Text

    from autotune.cli.tables import make_console

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
    for title, refusals in (
        ("Not expressed", [refusal for refusal in written.refusals if refusal.is_technique]),
        ("Left to you", [refusal for refusal in written.refusals if not refusal.is_technique]),
    ):
        if refusals:
            say()
            say(title, "bold")
            for refusal in refusals:
                instead = "" if refusal.instead is None else f" ({refusal.instead} instead)"
                say(f"  {_named(refusal)}{instead}: {refusal.why}")
    if written.notes:
        say()
        say("Good to know", "bold")
        for note in written.notes:
            say(f"  {note}")
    if any(refusal.is_technique for refusal in written.refusals):
        print(
            "note: memory and speed are not those of the trial where techniques are missing",
            file=sys.stderr,
        )


def _named(refusal: "Refusal") -> str:
    return refusal.setting if refusal.value is None else f"{refusal.setting} {refusal.value}"


def _to_dict(
    written: "Export", *, target: str, version: str, record: TrialRecord, folder: Path
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
                "setting": refusal.setting,
                "value": refusal.value,
                "instead": refusal.instead,
                "why": refusal.why,
                "is_technique": refusal.is_technique,
            }
            for refusal in written.refusals
        ],
        "notes": list(written.notes),
    }
