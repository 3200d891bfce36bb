"""What `autotune show --reference` prints: a study beside the published table of its space."""

import json
from collections.abc import Iterator, Sequence
from functools import partial

from rich.table import Table

from autotune.analysis.published_comparison import (
    ComparedRow,
    compare_with_published,
    is_of_published_size,
)
from autotune.cli.tables import as_text, make_console
from autotune.errors import InvalidInput
from autotune.reporting.columns import BLANK, text_or_blank
from autotune.reporting.plain_tables import reference_markdown
from autotune.reporting.study_view import StudyView
from autotune.spec.published_table import Reference
from autotune.spec.result import JSON_SCHEMA
from autotune.units import format_percent, format_size

_NARROW = 124
"""On a console of fewer columns each row of the table takes three lines."""

_PREDICTED_MARK = "~"
_HEADS = (
    "row",
    *("peak", "published", "ratio"),
    *("saved", "published", "difference"),
    *("speed", "published", "ratio"),
    *("perplexity", "published"),
    "remark",
)
_STACKED_HEADS = ("row", "peak", "saved", "speed", "perplexity", "remark")


def print_reference(view: StudyView, *, as_json: bool = False, as_markdown: bool = False) -> None:
    """Prints the comparison. Raises InvalidInput if the search space of the study has no table."""
    result, definition = view.result, view.definition
    reference = definition.space.reference
    if reference is None:
        raise InvalidInput(
            f"study {result.study!r} has no published table to compare with: search space "
            f"{definition.space.name!r} has no [reference]",
            hint="search --space peak_memory, or add the table to your search space",
        )
    has_published_size = is_of_published_size(definition.space, definition.workload)
    rows = compare_with_published(reference, definition, result.trials)
    if as_json:
        answer = {
            "schema": JSON_SCHEMA,
            "study": result.study,
            "source": reference.source,
            "measured_on": reference.measured_on,
            "control": reference.control,
            "has_published_size": has_published_size,
            "rows": [row.to_dict() for row in rows],
        }
        print(json.dumps(answer, indent=2, allow_nan=False))
        return
    about = (
        f"Study {result.study}: {result.workload.describe()}, {result.workload.steps} steps, "
        f"on {result.device.name}, torch {result.device.versions.get('torch', '?')}"
    )
    cells = [_cells(row) for row in rows]
    notes = list(_notes(reference, rows, has_published_size=has_published_size))
    console = make_console()
    if as_markdown:
        heads, lines = _without_empty_columns(cells)
        print(reference_markdown(about, heads, lines, notes), end="")
    elif console.width < _NARROW:
        stacked = [line for row in cells for line in _stacked(row)]
        console.print(_table(about, _STACKED_HEADS, stacked))
    else:
        console.print(_table(about, *_without_empty_columns(cells)))
    if not as_markdown:
        for note in notes:
            console.print(as_text(note))


def _cells(row: ComparedRow) -> list[str]:
    """Returns a cell for each of `_HEADS`."""
    mark = _PREDICTED_MARK if row.peak_is_predicted else ""
    return [
        row.name,
        mark + text_or_blank(row.peak_memory_bytes, format_size),
        text_or_blank(row.published_peak_memory_bytes, format_size),
        text_or_blank(row.peak_ratio, "{:.3f}".format),
        text_or_blank(row.saved, _percent),
        text_or_blank(row.published_saved, _percent),
        text_or_blank(row.saved_difference, partial(format_percent, digits=1, sign=True)),
        text_or_blank(row.speed, "{:.2f}x".format),
        text_or_blank(row.published_speed, "{:.2f}x".format),
        text_or_blank(row.speed_ratio, "{:.3f}".format),
        text_or_blank(row.perplexity, "{:,.2f}".format),
        text_or_blank(row.published_perplexity, "{:,.2f}".format),
        row.remark,
    ]


def _without_empty_columns(rows: Sequence[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Returns the headings of the columns with a value in any row, and the cells of each row."""
    shown = [
        place for place in range(len(_HEADS)) if any(row[place] not in (BLANK, "") for row in rows)
    ]
    heads = [_HEADS[place] for place in shown]
    return heads, [[row[place] for place in shown] for row in rows]


def _stacked(cells: list[str]) -> Iterator[list[str]]:
    """Yields three lines for a narrow page: the study's numbers, the published, the difference."""
    name, *numbers, remark = cells
    yield [name, *numbers[0::3], remark]
    yield ["  published", *numbers[1::3]]
    yield ["  difference", *numbers[2::3]]


def _table(about: str, heads: Sequence[str], lines: Sequence[list[str]]) -> Table:
    table = Table(
        title=as_text(about),
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
    )
    for head in heads:
        table.add_column(
            head,
            justify="left" if head in ("row", "remark") else "right",
            no_wrap=head != "remark",
            overflow="fold",
        )
    for cells in lines:
        table.add_row(*map(as_text, cells))
    return table


def _notes(
    reference: Reference, rows: Sequence[ComparedRow], *, has_published_size: bool
) -> Iterator[str]:
    """Yields the sentences that a reader needs in order to read the table."""
    yield f"Published: {reference.source}, on {reference.measured_on}."
    yield (
        f"Savings and speeds are relative to {reference.control} of the same run; the difference "
        "of two savings is in percentage points."
    )
    if not has_published_size:
        yield (
            "The model or the batch here has another size: savings can be compared, peaks cannot."
        )
    predicted = [row.name for row in rows if row.peak_is_predicted]
    if predicted:
        yield f"{_PREDICTED_MARK} is predicted, not measured."
    if reference.control in predicted:
        yield "The control is predicted, so savings relative to it are predictions."


def _percent(share: float) -> str:
    return f"{format_percent(share, digits=1)} %"
