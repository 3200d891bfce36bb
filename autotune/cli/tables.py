"""Print a study on a terminal: the table of trials, the front, the pick and what did not fit."""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from autotune.printable import printable
from autotune.reporting.columns import (
    PREDICTIONS,
    Column,
    Row,
    baseline_of,
    front_records,
    front_title,
    trial_table,
)
from autotune.reporting.outcomes import outcome_label, outcome_reason
from autotune.reporting.trial_text import (
    advice_without_pick,
    communication_text,
    no_pick_reason,
    peaks_text,
    perplexity_warning,
    short_label,
    trial_label,
    utilization_sentence,
)
from autotune.spec.config import TrainingConfig
from autotune.spec.result import StudyResult, TrialRecord

MOST_FOLDED = 1000
"""A table of more trials is not folded to the width of the terminal."""
_PLAIN_WIDTH = 140
NARROW = 110
"""A terminal of fewer columns shows of each trial only what differs from the baseline."""
_REMARK_WIDTH, _NARROW_REMARK_WIDTH = 34, 14


def make_console(file: TextIO | None = None) -> Console:
    """Returns a console on `file` (default: stdout), 140 columns wide if that is not a terminal."""
    file = file or sys.stdout
    width = None if file.isatty() or "COLUMNS" in os.environ else _PLAIN_WIDTH
    if not file.isatty():
        file = cast("TextIO", _WithoutTrailingBlanks(file))
    return _PrintableConsole(
        file=file, width=width, highlight=False, soft_wrap=False, markup=False, emoji=False
    )


class _PrintableConsole(Console):
    """A console that shows control characters of a text, and never obeys them.

    Names, messages and paths may come from anywhere. Brackets in a text are no markup either.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        # Before rich drops some control characters, and measures how wide the others are.
        return super().render_str(printable(text, keep_lines=True), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        # Everything comes through here, also a `Text`. What rich itself writes is a control segment
        # or a style.
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable() or segment.text == "\n":
                yield segment
            else:
                yield Segment(printable(segment.text, keep_lines=True), segment.style)


def as_text(text: str, *, style: str = "") -> Text:
    """Returns plain text for a table or a line, with escapes for what must not reach a terminal.

    The console escapes it in any case; here widths are still computed from the escapes.
    """
    return Text(printable(text, keep_lines=True), style=style)


class _WithoutTrailingBlanks:
    """A text file in which no line ends with the blanks that rich fills tables up with."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(re.sub(r" +(?=\n)", "", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def is_narrow(console: Console) -> bool:
    """Returns whether a table has to do with short configurations and fewer columns."""
    return console.width < NARROW


_HEADINGS = {"number": "#", "outcome": ""}
"""Headings that are shorter on a terminal than on a page, by the key of the column."""


def print_trials(
    console: Console,
    result: StudyResult,
    records: Sequence[TrialRecord],
    *,
    title: str = "",
    with_predictions: bool = False,
    with_narrow_note: bool = True,
    with_before_training: bool = False,
) -> None:
    """Print one row per trial: memory, speed, perplexity and remarks.

    `with_before_training` adds a first row with the perplexity of pretrained weights.
    `with_predictions` adds the predicted peak and its ratio to the measured one. On a narrow
    terminal `with_narrow_note` explains the short configurations below the table. Thousands of
    trials are printed as one line each, however wide: that suits grep, and folding the cells would
    take longer than reading the trials from the database.
    """
    is_folded = len(records) <= MOST_FOLDED
    table = trial_table(
        result,
        records,
        optional=PREDICTIONS if with_predictions else (),
        with_before_training=with_before_training,
    )
    is_short = is_folded and is_narrow(console)
    baseline = baseline_of(result)
    columns = [column for column in table.columns if column.on_phones or not is_short]
    notes = list(table.notes)
    if is_short:
        lines = [_short_texts(row, baseline) for row in table.rows]
        notes += [*_reasons(records), *_perplexity_warnings(result, records)]
        if with_narrow_note and baseline is not None:
            notes.append(narrow_note(baseline.config))
    else:
        lines = [row_texts(row) for row in table.rows]
    cells = [[line[column.key] for column in columns] for line in lines]
    if not is_folded:
        text = "\n".join(filter(None, (title, *_aligned(columns, cells), *notes)))
        console.print(as_text(text), soft_wrap=True)
        return
    folded = Table(
        title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    folded.caption, folded.caption_justify = "\n".join(notes) or None, "left"
    for column in columns:
        title_of_column = heading(column, is_short=is_short)
        if column.is_number:
            folded.add_column(title_of_column, justify="right", no_wrap=column.key != "number")
        elif column.key == "outcome":
            width = _NARROW_REMARK_WIDTH if is_short else _REMARK_WIDTH
            folded.add_column(title_of_column, overflow="fold", max_width=width)
        else:
            folded.add_column(title_of_column, ratio=1, overflow="fold")
    for row, line in zip(table.rows, cells, strict=True):
        folded.add_row(*map(as_text, line), style="bold" if row.is_pick else "")
    console.print(folded)


def heading(column: Column, *, is_short: bool = False) -> str:
    """Returns the heading of a column, on a narrow terminal a short one."""
    short = column.short_title if is_short else ""
    return _HEADINGS.get(column.key, short or column.title)


def row_texts(row: Row) -> Mapping[str, str]:
    """Returns the cells of a row; in the last one its remarks follow its marks."""
    return {**row.texts, "outcome": ", ".join((*_marks(row), *row.remarks))}


def _short_texts(row: Row, baseline: TrialRecord | None) -> Mapping[str, str]:
    """Returns the cells of a row on a narrow terminal, which has its remarks below the table."""
    if row.record is None:
        return row_texts(row)
    name = short_label(row.record, baseline)
    return {**row.texts, "name": name, "outcome": ", ".join(_marks(row))}


def _marks(row: Row) -> Sequence[str]:
    # A mark that is the trial's name need not be said twice.
    return [mark for mark in row.marks if mark != row.name]


def _reasons(records: Sequence[TrialRecord]) -> Iterator[str]:
    """Yield why trials failed, for which a narrow row has no room: each reason once."""
    numbers: dict[str, list[str]] = {}
    for record in records:
        reason = outcome_reason(record)
        if record.failed and reason:
            text = f"{outcome_label(record)}: {reason}"
            numbers.setdefault(text, []).append(f"#{record.number}")
    for text, failed in numbers.items():
        yield f"{', '.join(failed)} {text}"


def _perplexity_warnings(result: StudyResult, records: Sequence[TrialRecord]) -> Iterator[str]:
    """Yield what speaks against perplexities, for which a narrow row has no room either."""
    numbers: dict[str, list[str]] = {}
    for record in records:
        if warning := perplexity_warning(record, result.initial_perplexity):
            numbers.setdefault(warning, []).append(f"#{record.number}")
    for warning, warned in numbers.items():
        yield f"{', '.join(warned)} {result.terms.quality}: {warning}"


def narrow_note(baseline: TrainingConfig) -> str:
    """Returns the sentence that explains the short configurations of a narrow table."""
    return (
        f"A configuration is its name, or what differs from the baseline: "
        f"{baseline.describe()}. Terminals of {NARROW} columns show all of it."
    )


def _aligned(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the line of headings, then one line per row."""
    headings = list(map(heading, columns))
    lines = [headings, *([printable(" ".join(cell.split())) for cell in row] for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = []
        for cell, width, column in zip(line, widths, columns, strict=True):
            padding = " " * (width - cell_len(cell))
            cells.append(padding + cell if column.is_number else cell + padding)
        yield "  ".join(cells).rstrip()


def describe(record: TrialRecord) -> Text:
    """Returns name and choices, as a Text: names come from files and may look like markup."""
    return as_text(trial_label(record))


def print_result(result: StudyResult, console: Console) -> None:
    """Print the front, the pick and its reason, then the trials that are not candidates."""
    if result.front:
        shown, title = front_records(result), front_title(result)
        print_trials(console, result, shown, title=title, with_before_training=True)
        console.print()
    print_pick(result, console)
    not_candidates = [
        record
        for record in result.trials
        if record.outcome != "ok" and record.number != result.baseline
    ]
    if not_candidates and result.pick is not None:
        console.print()
        has_note = bool(result.front)
        print_trials(
            console, result, not_candidates, title="Not candidates", with_narrow_note=not has_note
        )


def print_pick(result: StudyResult, console: Console) -> None:
    """Print the pick and its reason or, if nothing fits, the closest miss and what to try."""
    if result.pick is None:
        _print_no_pick(result, console)
        return
    picked = result.trial(result.pick.number)
    colour = "bold yellow" if result.pick.doubt else "bold green"
    heading = (f"{result.pick.heading}: ", colour)
    console.print(Text.assemble(heading, f"#{picked.number} ", describe(picked)))
    console.print(indented(f"{result.pick.reason}."))
    if picked.peak_memory_bytes_by_rank:
        console.print(indented(f"Peak memory {peaks_text(picked.peak_memory_bytes_by_rank)}."))
    if utilization := utilization_sentence(picked, result.device):
        console.print(indented(f"Model FLOPs utilization: {utilization}."))
    if communication := communication_text(picked):
        console.print(indented(f"In collectives with other devices: {communication}."))


def _print_no_pick(result: StudyResult, console: Console) -> None:
    if not any(record.is_finished for record in result.trials):
        console.print(no_pick_reason(result))
        return
    console.print(as_text(no_pick_reason(result), style="bold red"))
    for sentence in advice_without_pick(result):
        console.print(indented(sentence))


def indented(text: str, columns: int = 2, *, style: str = "") -> Padding:
    """Returns `text` with all of its lines moved to the right, also those that are folded."""
    return Padding(as_text(text, style=style), (0, 0, 0, columns), expand=False)
