"""`autotune export`: a trial's configuration in the words of the trainer somebody uses."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import options
from autotune.definition import RESULTS_FOLDER
from autotune.errors import IllegalConfiguration, InvalidInput, StorageUnavailable
from autotune.exporters import TARGETS
from autotune.recommendation.pick import PREFERENCES
from autotune.result import JSON_SCHEMA, StudyResult, TrialRecord

if TYPE_CHECKING:
    from autotune.exporters.export import Export, Refusal, Target


def export(
    study: options.StudyArgument,
    to: Annotated[str, typer.Option("--to", "-t", metavar="TARGET", help=f"One of {', '.join(TARGETS)}.")],
    trial: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="Which trial. [default: the study's pick]", min=0)
    ] = None,
    pick: Annotated[
        str | None,
        typer.Option(metavar="|".join(PREFERENCES), help="Which of the front instead of a number. [default: fastest]"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FOLDER", help="[default: studies/STUDY-TARGET-TRIAL]"),
    ] = None,
    target_version: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Version of the trainer. [default: the usual one]")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Write nothing where the target cannot express a technique.")
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
        raise InvalidInput(f"--trial {trial} and --pick {pick} both say what to export", hint="leave one of them out")
    preferences = options.preferences_of(tolerance, pick or options.PREFER, max_perplexity_increase)
    result = autotune.show(study, storage=storage, preferences=preferences)
    record = _record(result, trial)
    written = target.write(recipe_of(result, record), version)
    if strict:
        _check_strictly(written, to)
    folder = out or RESULTS_FOLDER / f"{study}-{to}-{record.number}"
    _write(written, folder)
    if as_json:
        print(json.dumps(_to_dict(written, target=to, version=version, record=record, folder=folder), indent=2))
    else:
        _say(written, target=target, record=record, folder=folder)


def _version(name: str, target: "Target", asked: str | None) -> str:
    if asked is not None and asked not in target.versions:
        raise InvalidInput(
            f"there is no export to version {asked!r} of {name}", hint=f"use one of {', '.join(target.versions)}"
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
        there = f"its trials are 0 to {len(result.trials) - 1}" if result.trials else "it has none yet"
        raise InvalidInput(
            f"study {result.study!r} has no trial {number}", hint=f"{there}; see autotune show {result.study}"
        )
    return record


def _check_strictly(written: "Export", target: str) -> None:
    if refused := [refusal for refusal in written.refusals if refusal.is_technique]:
        first, more = refused[0], len(refused) - 1
        raise IllegalConfiguration(
            f"{target} cannot express {_named(first)}: {first.why}" + (f" (and {more} more)" if more else ""),
            hint="leave --strict out to write what it can, or export to pytorch",
        )


def _write(written: "Export", folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in written.files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageUnavailable(
            f"{folder} cannot be written to: {error.strerror or error}", hint="name another folder with --out"
        ) from None


# -- what is said ------------------------------------------------------------------------------------------------


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
        print("note: memory and speed are not those of the trial where techniques are missing", file=sys.stderr)


def _named(refusal: "Refusal") -> str:
    return f"{refusal.setting} {refusal.value}"


def _to_dict(written: "Export", *, target: str, version: str, record: TrialRecord, folder: Path) -> dict[str, Any]:
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
