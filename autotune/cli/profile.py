"""`autotune profile`: run a trial again under torch's profiler, and show where its time goes."""

import json
from dataclasses import dataclass

from rich.table import Table

from autotune import api
from autotune.analysis.profile_comparison import compare_profiles
from autotune.cli.lines import print_line
from autotune.cli.options import OfStudy, ShownQuietly
from autotune.cli.tables import as_text, make_console
from autotune.errors import InvalidInput
from autotune.printable import printable
from autotune.reporting import profile_text
from autotune.reporting.figures import profile_comparison
from autotune.reporting.html_page import whole_page
from autotune.reporting.output_file import write_file
from autotune.spec.profile import MOST_STEPS
from autotune.spec.result import JSON_SCHEMA
from autotune.spec.setting import (
    EVERYDAY,
    RESULTS,
    FilePath,
    TrialNumbers,
    setting,
)
from autotune.study.profiling import ProfiledSteps, StoredProfile

COMPARISON_FILE = "profile-{first}-{second}.html"


@dataclass(frozen=True, kw_only=True)
class ProfileCommand(OfStudy, ShownQuietly):
    """Trials to profile, and how the profiles are shown."""

    trials: TrialNumbers = setting(
        (),
        "Numbers of trials of the study. [default: the study's pick]",
        metavar="[TRIAL]...",
        is_argument=True,
    )
    steps: ProfiledSteps = setting(
        3, f"How many steps to profile, up to {MOST_STEPS}.", group=EVERYDAY, metavar="N"
    )
    compare: bool = setting(
        False, "Say where two trials differ, in words and in a picture.", group=EVERYDAY
    )
    fresh: bool = setting(
        False,
        "Profile again where there is a profile of as many steps already.",
        group=EVERYDAY,
    )
    out: FilePath | None = setting(
        None,
        "Folder for the files of one trial. [default: in the study's work folder]",
        group=RESULTS,
        metavar="FOLDER",
        synonym="-o",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compare and len(self.trials) != 2:
            raise InvalidInput(
                f"--compare needs two trials, and {len(self.trials)} are given",
                hint=f"autotune profile {self.study} 4 11 --compare",
            )
        if self.out is not None and len(self.trials) > 1:
            raise InvalidInput(
                "--out is the folder of one trial, and several are given",
                hint="leave it out, or give one trial",
            )


def profile(request: ProfileCommand) -> None:
    """Run a trial again under torch's profiler: where its time and its memory go.

    Writes a trace that ui.perfetto.dev opens, a picture of the memory over a step, what
    torch.compile generated and, on CUDA, a snapshot for pytorch.org/memory_viz. No number of the
    trial changes. A search takes profiles itself with --profile.
    """

    def note(sentence: str) -> None:
        if not request.quiet:
            print_line(printable(sentence), to_stderr=True, flush=True)

    found = [
        api.profile(
            request.study,
            number,
            steps=request.steps,
            out=request.out,
            fresh=request.fresh,
            storage=request.storage,
            note=note,
        )
        for number in request.trials or (None,)
    ]
    if request.as_json:
        print(json.dumps(_to_dict(found), indent=2, allow_nan=False))
        return
    if request.compare:
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
