"""Print a study on a terminal: the table of trials, the front, the pick and what did not fit."""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from autotune.analysis.reasons import left_in_16_bits
from autotune.printable import printable
from autotune.reporting.outcomes import outcome_label, outcome_reason
from autotune.reporting.trial_text import (
    BEFORE_TRAINING,
    BeforeTraining,
    advice_without_pick,
    before_training,
    communication_text,
    confirmed_mark,
    format_perplexity,
    format_speed,
    format_utilization,
    no_pick_reason,
    peaks_text,
    perplexity_notes,
    perplexity_remarks,
    perplexity_warning,
    short_label,
    trial_label,
    utilization_sentence,
)
from autotune.spec.config import TrainingConfig
from autotune.spec.result import StudyResult, TrialRecord
from autotune.units import format_size

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


@dataclass(frozen=True, kw_only=True)
class _Column:
    title: str
    is_number: bool = True
    cell: Callable[[StudyResult, TrialRecord], str]
    before_training: Callable[[BeforeTraining], str] = lambda row: ""
    """The cell in the row before those of trials, which most columns leave empty."""


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
    columns = list(_columns(result, records, with_predictions=with_predictions))
    note = "\n".join(perplexity_notes(records))
    remark_width = _REMARK_WIDTH
    if is_narrow(console) and len(records) <= MOST_FOLDED:
        remark_width = _NARROW_REMARK_WIDTH
        columns = list(_narrow_columns(result))
        notes = [note, *_reasons(records), *_perplexity_warnings(result, records)]
        baseline = _baseline(result)
        if with_narrow_note and baseline is not None:
            notes.append(narrow_note(baseline.config))
        note = "\n".join(line for line in notes if line)
    rows = [[column.cell(result, record) for column in columns] for record in records]
    styles = ["bold" if _is_pick(result, record) else "" for record in records]
    first = before_training(result) if with_before_training else None
    if first is not None:
        rows.insert(0, [column.before_training(first) for column in columns])
        styles.insert(0, "")
    if len(records) <= MOST_FOLDED:
        table = _folded(
            rows, columns, styles=styles, title=title, note=note, remark_width=remark_width
        )
        console.print(table)
        return
    lines = _aligned(rows, columns)
    text = "\n".join(line for line in (title, *lines, note) if line)
    console.print(as_text(text), soft_wrap=True)


def _columns(
    result: StudyResult, records: Sequence[TrialRecord], *, with_predictions: bool
) -> Iterator[_Column]:
    yield _Column(title="#", cell=lambda _, record: str(record.number))
    yield _Column(
        title="configuration",
        is_number=False,
        cell=lambda _, record: trial_label(record),
        before_training=lambda row: BEFORE_TRAINING,
    )
    yield _Column(title="peak memory", cell=lambda _, record: _size(record.peak_memory_bytes))
    if with_predictions and any(record.predicted_peak_memory_bytes for record in records):
        yield _Column(
            title="predicted", cell=lambda _, record: _size(record.predicted_peak_memory_bytes)
        )
        yield _Column(title="ratio", cell=lambda _, record: _ratio(record))
    if result.device.type == "cuda":
        yield _Column(title="on device", cell=lambda _, record: _size(record.device_bytes))
    yield _Column(title="tokens/s", cell=lambda _, record: speed(record))
    if any(record.model_flops_utilization is not None for record in records):
        yield _Column(title="MFU", cell=lambda _, record: format_utilization(record) or "-")
    yield _Column(
        title="perplexity",
        cell=lambda _, record: format_perplexity(record) or "-",
        before_training=lambda row: row.perplexity or "-",
    )
    yield _Column(title="", is_number=False, cell=_remark, before_training=lambda row: row.remark)


def _narrow_columns(result: StudyResult) -> Iterator[_Column]:
    baseline = _baseline(result)
    yield _Column(title="#", cell=lambda _, record: str(record.number))
    yield _Column(
        title="configuration",
        is_number=False,
        cell=lambda _, record: short_label(record, baseline),
        before_training=lambda row: BEFORE_TRAINING,
    )
    yield _Column(title="peak", cell=lambda _, record: _size(record.peak_memory_bytes))
    if result.device.type == "cuda":
        yield _Column(title="on device", cell=lambda _, record: _size(record.device_bytes))
    yield _Column(title="tokens/s", cell=lambda _, record: speed(record))
    yield _Column(
        title="perpl.",
        cell=lambda _, record: format_perplexity(record) or "-",
        before_training=lambda row: row.perplexity or "-",
    )
    yield _Column(
        title="",
        is_number=False,
        cell=lambda _, record: ", ".join(_marks(result, record)),
        before_training=lambda row: row.remark,
    )


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
        if warning := perplexity_warning(result, record):
            numbers.setdefault(warning, []).append(f"#{record.number}")
    for warning, warned in numbers.items():
        yield f"{', '.join(warned)} perplexity: {warning}"


def narrow_note(baseline: TrainingConfig) -> str:
    """Returns the sentence that explains the short configurations of a narrow table."""
    return (
        f"A configuration is its name, or what differs from the baseline: "
        f"{baseline.describe()}. Terminals of {NARROW} columns show all of it."
    )


def _baseline(result: StudyResult) -> TrialRecord | None:
    return next((record for record in result.trials if record.number == result.baseline), None)


def _folded(
    rows: Sequence[Sequence[str]],
    columns: Sequence[_Column],
    *,
    styles: Sequence[str],
    title: str,
    note: str,
    remark_width: int,
) -> Table:
    table = Table(
        title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    table.caption, table.caption_justify = note or None, "left"
    for column in columns:
        if column.is_number:
            table.add_column(column.title, justify="right", no_wrap=column.title != "#")
        elif column.title:
            table.add_column(column.title, ratio=1, overflow="fold")
        else:
            table.add_column(overflow="fold", max_width=remark_width)
    for row, style in zip(rows, styles, strict=True):
        table.add_row(*map(as_text, row), style=style)
    return table


def _aligned(rows: Sequence[Sequence[str]], columns: Sequence[_Column]) -> Iterator[str]:
    """Yield the line of headings, then one line per row."""
    headings = [column.title for column in columns]
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


def speed(record: TrialRecord) -> str:
    return format_speed(record.tokens_per_second, record.tokens_per_second_spread) or "-"


def _remark(result: StudyResult, record: TrialRecord) -> str:
    marks = _marks(result, record)
    if record.outcome != "ok" and (reason := outcome_reason(record)):
        marks.append(reason)
    if record.compile_seconds is not None:
        marks.append(f"compiled in {record.compile_seconds:.0f} s")
    if left := left_in_16_bits(record.unquantized_share):
        marks.append(left)
    if record.reused_from:
        marks.append(f"from {record.reused_from}")
    if remarks := perplexity_remarks(result, record):
        marks.append(f"perplexity: {remarks}")
    return ", ".join(marks)


def _marks(result: StudyResult, record: TrialRecord) -> list[str]:
    marks = []
    if _is_pick(result, record):
        marks.append("pick")
    if record.number in result.front:
        marks.append("front")
    if record.number == result.baseline and record.name != "baseline":
        marks.append("baseline")
    if mark := confirmed_mark(record):
        marks.append(mark)
    if record.outcome != "ok":
        marks.append(outcome_label(record))
    return marks


def print_result(result: StudyResult, console: Console) -> None:
    """Print the front, the pick and its reason, then the trials that are not candidates."""
    baseline = _baseline(result)
    front = [result.trial(number) for number in result.front]
    if front:
        shown = [*front]
        if baseline is not None and baseline not in front:
            shown.append(baseline)
        title = f"Front under {format_size(result.cap_bytes)}, and the baseline"
        print_trials(console, result, shown, title=title, with_before_training=True)
        console.print()
    print_pick(result, console)
    not_candidates = [
        record for record in result.trials if record.outcome != "ok" and record is not baseline
    ]
    if not_candidates and result.pick is not None:
        console.print()
        print_trials(
            console, result, not_candidates, title="Not candidates", with_narrow_note=not front
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


def _is_pick(result: StudyResult, record: TrialRecord) -> bool:
    return result.pick is not None and record.number == result.pick.number


def _ratio(record: TrialRecord) -> str:
    """Returns predicted peak / measured peak as text."""
    if not record.peak_memory_bytes or not record.predicted_peak_memory_bytes:
        return "-"
    return f"{record.predicted_peak_memory_bytes / record.peak_memory_bytes:.4f}"


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else format_size(size_bytes)
