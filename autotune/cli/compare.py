"""`autotune compare`: compare several studies in a table and in one figure."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from autotune import api
from autotune.analysis.pick import DEFAULT_PREFERENCES, Preferences
from autotune.cli.options import InStorage, Shown
from autotune.cli.output import ImageSize, Target
from autotune.cli.tables import as_text, make_console
from autotune.errors import InvalidInput
from autotune.reporting.columns import BLANK
from autotune.reporting.trial_text import trial_label
from autotune.spec.result import TrialRecord, terms_of
from autotune.spec.setting import FilePath, Texts, part, setting
from autotune.spec.study import RESULTS_FOLDER
from autotune.spec.terms import Terms
from autotune.units import format_size

if TYPE_CHECKING:
    from autotune.analysis.no_worse_than import Match
    from autotune.reporting.figures.comparison import Comparison, Side

_LONGEST_NAME = 120
_TITLE = "Fronts of several studies"


@dataclass(frozen=True, kw_only=True)
class CompareCommand(InStorage, Shown):
    """Studies to compare, and the file that the figure is written to."""

    studies: Texts = setting(
        help="Names of studies; see autotune studies.",
        metavar="STUDY STUDY...",
        is_argument=True,
    )
    out: FilePath | None = setting(
        None,
        "File to write: .html (opens offline), .png, .svg or .json. "
        "[default: studies/compare-STUDY-STUDY.html]",
        synonym="-o",
    )
    image: ImageSize = part(ImageSize, default=ImageSize())
    preferences: Preferences = part(Preferences, default=DEFAULT_PREFERENCES)
    no_worse: bool = setting(
        False,
        "Also print, for every trial of the first study, one of the second that is worse on no "
        "objective.",
    )


def compare(request: CompareCommand) -> None:
    """Compare the picks of several studies and draw their fronts in one figure."""
    # plotly and numpy take 0.2 s to import, which the help of this command does without.
    from autotune.analysis.no_worse_than import find_matches  # noqa: PLC0415
    from autotune.reporting.figures import comparison  # noqa: PLC0415
    from autotune.reporting.html_page import whole_page  # noqa: PLC0415

    studies, preferences = request.studies, request.preferences
    name = "-".join(["compare", *studies])[:_LONGEST_NAME]
    target = Target(file=request.out or RESULTS_FOLDER / f"{name}.html", size=request.image)
    views = [api.view(study, storage=request.storage, preferences=preferences) for study in studies]
    compared = comparison.compute(views)
    if request.no_worse and len(views) != 2:
        raise InvalidInput(
            f"--no-worse compares two studies, not {len(views)}", hint="name two studies"
        )
    matches = None
    if request.no_worse:
        matches = find_matches(views[0].result, views[1].result, tolerance=preferences.tolerance)
    drawing = comparison.draw(compared)
    title = " and ".join(studies)
    target.write(
        drawing,
        title=title,
        page=lambda: whole_page(
            title,
            about=_TITLE,
            answer=" ".join(
                [
                    *(_summary(side, terms=compared.terms) for side in compared.sides),
                    *compared.scaling,
                ]
            ),
            drawing=drawing,
        ),
    )
    if request.as_json:
        print(json.dumps(_to_dict(compared, target.file, matches), indent=2, allow_nan=False))
        return
    console = make_console(sys.stdout)
    console.print(_table(compared))
    console.print()
    for side in compared.sides:
        console.print(_facts(side))
    for sentence in (*compared.scaling, *compared.differences):
        console.print(sentence, markup=False)
    if matches is not None:
        console.print()
        console.print(_matches_table(matches, *studies))
    console.print(str(target.file), markup=False, soft_wrap=True)


def _to_dict(
    compared: "Comparison", file: Path, matches: "tuple[Match, ...] | None"
) -> dict[str, object]:
    found = {} if matches is None else {"no_worse": [match.to_dict() for match in matches]}
    return {
        "schema": 1,
        "studies": [side.to_dict() for side in compared.sides],
        "workloads_differ": compared.workloads_differ,
        "scaling": list(compared.scaling),
        "differences": list(compared.differences),
        "figure": str(file),
        **found,
    }


def _summary(side: "Side", *, terms: Terms) -> str:
    if side.pick is None:
        return f"{side.study}: {side.pick_text}"
    speed = f"{side.speed_text} {terms.speed}"
    return f"{side.study}: {side.pick_text}, {side.peak_text}, {speed}."


def _table(compared: "Comparison") -> Table:
    """Returns the picks and their numbers; `_facts` has the rest of a study."""
    table = Table(box=None, pad_edge=False)
    table.add_column("study", overflow="fold")
    table.add_column("pick", overflow="fold")
    for column in ("peak", compared.terms.speed, compared.terms.quality, "saved"):
        table.add_column(column, justify="right", no_wrap=True)
    for side in compared.sides:
        numbers = (side.peak_text, side.speed_text, side.perplexity_words or BLANK, side.saved_text)
        table.add_row(*map(as_text, (side.study, side.pick_text, *numbers)))
    return table


def _facts(side: "Side") -> Text:
    """Returns on one line what a study trained, on which device."""
    text = as_text(f"{side.study}: ", style="bold")
    line = f"{side.workload}; {side.device}, torch {side.torch}, cap {format_size(side.cap_bytes)}"
    return text.append_text(as_text(line, style="not bold"))


def _matches_table(matches: "tuple[Match, ...]", first: str, other: str) -> Table:
    """Returns two rows for each trial of `first`: the trial, and what was found in `other`."""
    table = Table(
        box=None,
        pad_edge=False,
        title=as_text(_matches_title(matches, first, other)),
        title_justify="left",
        title_style="bold",
    )
    table.add_column(as_text(f"{first}\n  {other}"), overflow="fold")
    terms = terms_of([match.trial for match in matches])
    for column in ("peak", terms.quality, "speed"):
        table.add_column(column, justify="right", no_wrap=True)
    for match in matches:
        name = match.trial.name or trial_label(match.trial)
        cells = [f"#{match.trial.number} {name}", *_objectives(match.trial), ""]
        table.add_row(*map(as_text, cells))
        if match.found is None:
            table.add_row("  none")
            continue
        name = "itself, on the front" if match.found_itself else match.found.config.describe()
        cells = [f"  #{match.found.number} {name}", *_objectives(match.found)]
        table.add_row(*map(as_text, [*cells, _relative_speed(match)]))
    table.caption, table.caption_justify = _SPEED_NOTE, "left"
    return table


_SPEED_NOTE = "speed: relative to the trial above, both converted to one run"


def _matches_title(matches: "tuple[Match, ...]", first: str, other: str) -> str:
    found = [match for match in matches if match.found is not None]
    itself = sum(match.found_itself for match in found)
    title = (
        f"{len(found) - itself} of the {len(matches)} measured trials of {first} have another in "
        f"{other} that is worse on no objective"
    )
    if itself:
        title += f", and {itself} more {'is' if itself == 1 else 'are'} on its front"
    return title


def _relative_speed(match: "Match") -> str:
    return f"{match.speed or 0.0:.2f}x"


def _objectives(record: TrialRecord) -> list[str]:
    return [format_size(record.peak_memory_bytes or 0), record.terms.text(record.perplexity or 1.0)]
