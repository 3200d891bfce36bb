"""`autotune export`: write a trial as files of a trainer, or into a file that the user has."""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from autotune.analysis.pick import DEFAULT_PREFERENCES, Preference, Preferences
from autotune.cli.lines import print_line
from autotune.cli.options import ReadStudy, Shown
from autotune.cli.tables import as_text, make_console
from autotune.errors import InvalidInput
from autotune.exporters import TARGETS
from autotune.exporters.into.written import WrittenInto
from autotune.exporters.written import WrittenExport, target_of, version_of
from autotune.spec.result import TrialRecord
from autotune.spec.setting import EVERYDAY, RESULTS, FilePath, TrialNumber, part, setting

PREFER = DEFAULT_PREFERENCES.prefer


@dataclass(frozen=True, kw_only=True)
class ExportCommand(ReadStudy, Shown):
    """A trial to export, and the trainer that it is for."""

    to: str | None = setting(
        None,
        f"Trainer to export to: {', '.join(TARGETS)}.",
        group=EVERYDAY,
        synonym="-t",
        metavar="TARGET",
        choices=tuple(TARGETS),
    )
    into: FilePath | None = setting(
        None,
        "A trainer's own file, as --from takes it: write a copy of it in which only the keys that "
        "the trial changes are changed.",
        group=EVERYDAY,
        metavar="FILE",
    )
    in_place: bool = setting(
        False,
        "With --into: change the file itself, and keep its original as FILE.orig.",
        group=RESULTS,
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
        "Folder to write to, with --into a file. [default: studies/STUDY-TARGET-TRIAL, or "
        "NAME.autotune.yaml beside NAME.yaml]",
        group=RESULTS,
        synonym="-o",
        metavar="PATH",
    )
    target_version: str | None = setting(
        None,
        "Version of the trainer. [default: the first supported one]",
        group=EVERYDAY,
        metavar="VERSION",
    )
    strict: bool = setting(
        False,
        "Write nothing if the target or file cannot express all of the configuration.",
        group=EVERYDAY,
    )
    force: bool = setting(False, "Overwrite existing files of the names to write.", group=RESULTS)
    preferences: Preferences = part(
        Preferences, only=("tolerance", "max_perplexity_increase"), default=DEFAULT_PREFERENCES
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.to is None and self.into is None:
            raise InvalidInput(
                "nothing says what to export to: neither --to nor --into is given",
                hint=f"Trainer to export to: {', '.join(TARGETS)}; or --into FILE for its own file",
            )
        if self.to is not None and self.into is not None:
            raise InvalidInput(
                f"--to {self.to} and --into {self.into} are two exports",
                hint="use --to TARGET for new files, or --into FILE for a file that you have",
            )
        if self.to is not None:
            version_of(self.to, self.target_version)
            self._check_unused("--in-place", is_given=self.in_place, belongs_to="--into FILE")
        else:
            is_given = self.target_version is not None
            self._check_unused("--target-version", is_given=is_given, belongs_to="--to TARGET")
        if self.in_place and self.out is not None:
            raise InvalidInput(
                f"--in-place and --out {self.out} both say what to write",
                hint="leave one of them out",
            )
        if self.trial is not None and self.pick is not None:
            raise InvalidInput(
                f"--trial {self.trial} and --pick {self.pick} both select the trial",
                hint="leave one of them out",
            )

    def _check_unused(self, option: str, *, is_given: bool, belongs_to: str) -> None:
        if is_given:
            raise InvalidInput(f"{option} belongs to {belongs_to}", hint="leave it out")


def export(request: ExportCommand) -> None:
    """Export a trial to another trainer, and say what that trainer cannot express."""
    preferences = replace(request.preferences, prefer=request.pick or PREFER)
    with replace(request, preferences=preferences).result() as result:
        if request.to is not None:
            written = result.export(
                request.to,
                trial=request.trial,
                out=request.out,
                target_version=request.target_version,
                strict=request.strict,
                overwrite=request.force,
            )
            content, show = written.to_dict(), partial(_print_export, written)
        else:
            assert request.into is not None
            # The parser of a trainer that is installed imports torch, which takes seconds.
            with make_console(sys.stderr).status(as_text("changing the file and reading it back")):
                changed = result.export_into(
                    request.into,
                    trial=request.trial,
                    out=request.out,
                    in_place=request.in_place,
                    strict=request.strict,
                    overwrite=request.force,
                )
            content, show = changed.to_dict(), partial(_print_changed, changed)
    if request.as_json:
        print(json.dumps(content, indent=2))
    else:
        show()


def _print_export(written: WrittenExport) -> None:
    say, target = _printer(), target_of(written.target)
    _print_trial(say, written.record)
    say(f"for {target.title}, keys checked with {target.checked_with}:")
    for file in written.files:
        say(f"  {file}")
    _print_sections(say, written.sections())
    if written.lacks_techniques:
        print_line(_DIFFERS, to_stderr=True)


_COLOURS = {"+": "green", "-": "red", "@": "cyan"}
"""{first letter of a line of a difference: its style}."""


def _print_changed(written: WrittenInto) -> None:
    say = _printer()
    _print_trial(say, written.record)
    if written.changes:
        say(f"for {written.trainer}, {written.read_back}:")
        for file in written.files:
            say(f"  {file}")
        if written.original is not None:
            say(f"  {written.original} (the original)")
        say()
        for line in written.difference.splitlines():
            say(line, _COLOURS.get(line[:1], ""))
    else:
        say(f"{written.source} already describes it: nothing was written")
    _print_sections(say, written.sections())
    if any(entry.is_technique for entry in written.unsupported):
        print_line(_DIFFERS, to_stderr=True)


# -- lines -----------------------------------------------------------------------------------------

_DIFFERS = "note: without the techniques not expressed, memory and speed differ from the trial's"
_Say = Callable[..., None]


def _printer() -> _Say:
    console = make_console()

    def say(line: str = "", style: str = "") -> None:
        console.print(as_text(line, style=style), soft_wrap=True)

    return say


def _print_trial(say: _Say, record: TrialRecord) -> None:
    say(f"#{record.number} {record.config.describe()}", "bold")
    if not record.feasible:
        say(f"It is not feasible ({record.outcome.replace('_', ' ')}).", "yellow")


def _print_sections(say: _Say, sections: Iterable[tuple[str, list[str]]]) -> None:
    for title, lines in sections:
        say()
        say(title, "bold")
        for line in lines:
            say(f"  {line}")
