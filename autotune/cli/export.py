"""`autotune export`: write a trial's configuration as files for another trainer."""

import json
from dataclasses import dataclass, replace

from autotune.analysis.pick import DEFAULT_PREFERENCES, Preference, Preferences
from autotune.cli.lines import print_line
from autotune.cli.options import ReadStudy, Shown
from autotune.cli.tables import as_text, make_console
from autotune.errors import InvalidInput
from autotune.exporters import TARGETS
from autotune.exporters.written import WrittenExport, target_of, version_of
from autotune.spec.setting import EVERYDAY, RESULTS, FilePath, TrialNumber, part, setting

PREFER = DEFAULT_PREFERENCES.prefer


@dataclass(frozen=True, kw_only=True)
class ExportCommand(ReadStudy, Shown):
    """A trial to export, and the trainer that it is for."""

    to: str = setting(
        help=f"Trainer to export to: {', '.join(TARGETS)}.",
        group=EVERYDAY,
        synonym="-t",
        metavar="TARGET",
        choices=tuple(TARGETS),
    )
    trial: TrialNumber | None = setting(
        None,
        "Number of the trial. [default: the study's pick]",
        group=EVERYDAY,
        metavar="NUMBER",
    )
    pick: Preference | None = setting(
        None,
        "Which trial of the front to export, instead of --trial. [default: fastest]",
        group=EVERYDAY,
    )
    out: FilePath | None = setting(
        None,
        "Folder to write to. [default: studies/STUDY-TARGET-TRIAL]",
        group=RESULTS,
        synonym="-o",
        metavar="FOLDER",
    )
    target_version: str | None = setting(
        None,
        "Version of the trainer. [default: the first supported one]",
        group=EVERYDAY,
        metavar="VERSION",
    )
    strict: bool = setting(
        False,
        "Write nothing if the target cannot express all of the configuration.",
        group=EVERYDAY,
    )
    force: bool = setting(False, "Overwrite existing files in the folder of --out.", group=RESULTS)
    preferences: Preferences = part(
        Preferences, only=("tolerance", "max_perplexity_increase"), default=DEFAULT_PREFERENCES
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        version_of(self.to, self.target_version)
        if self.trial is not None and self.pick is not None:
            raise InvalidInput(
                f"--trial {self.trial} and --pick {self.pick} both select the trial",
                hint="leave one of them out",
            )


def export(request: ExportCommand) -> None:
    """Export a trial to another trainer, and say what that trainer cannot express."""
    preferences = replace(request.preferences, prefer=request.pick or PREFER)
    with replace(request, preferences=preferences).result() as result:
        written = result.export(
            request.to,
            trial=request.trial,
            out=request.out,
            target_version=request.target_version,
            strict=request.strict,
            overwrite=request.force,
        )
    if request.as_json:
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
