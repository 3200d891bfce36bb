"""A study as CSV with one row per trial, and as Markdown tables."""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from autotune.printable import printable
from autotune.reporting.columns import COLUMNS, MARKS, front_records, front_title, trial_table
from autotune.reporting.outcomes import outcome_counts
from autotune.reporting.trial_text import no_pick_reason, perplexity_notes, trial_label
from autotune.spec.config import FIELD_ORDER
from autotune.spec.result import NOT_SHOWN, StudyResult, TrialRecord
from autotune.units import format_size

_NESTED = ("config", "bytes_by_kind", "peak_bytes_by_category", "seconds_by_part")
_BOUNDS: Mapping[str, tuple[str, str]] = {
    "tokens_per_second_interval": ("tokens_per_second_low", "tokens_per_second_high")
}
"""The columns of the two ends of an interval: no spreadsheet calculates with both in one cell."""
_FIRST = ("number", "name", "outcome", "feasible")
_NO_COLUMN = (*_FIRST, *_NESTED, *_BOUNDS, *NOT_SHOWN)
_OF_JSON = (
    *_FIRST,
    *MARKS,
    *FIELD_ORDER,
    *(field.name for field in fields(TrialRecord) if field.name not in _NO_COLUMN),
    *(column for columns in _BOUNDS.values() for column in columns),
)
_COMPUTED = tuple(column for column in COLUMNS if column.key not in _OF_JSON)
CSV_COLUMNS = (*_OF_JSON, *(column.key for column in _COMPUTED))
"""The keys of a trial's JSON object and of its `config`, without other nested objects, the marks of
a trial as true or false, the ends of intervals, and the columns that are computed from others."""

_FORMULA = ("=", "+", "-", "@", "\t", "\n")


def csv_text(result: StudyResult) -> str:
    """Returns the trials as CSV, with an empty cell for what was not measured.

    Names and messages may come from anywhere: control characters in them are written as escapes.
    A text that a spreadsheet would take for a formula gets a leading apostrophe, which spreadsheets
    do not show; numbers stay numbers. `--json` has the unchanged text.
    """
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for values in trial_rows(result):
        writer.writerow([_cell(values[column]) for column in CSV_COLUMNS])
    return written.getvalue()


def trial_rows(result: StudyResult) -> list[dict[str, Any]]:
    """Returns the values of each trial by column; `CSV_COLUMNS` are among the keys."""
    rows = []
    for record in result.trials:
        values = record.to_dict()
        for interval, columns in _BOUNDS.items():
            values |= zip(columns, values[interval] or (None, None), strict=True)
        values |= {column.key: column.value(record) for column in _COMPUTED}
        rows.append({**values, **record.config.to_dict(), **_marks(result, record)})
    return rows


def _marks(result: StudyResult, record: TrialRecord) -> dict[str, bool]:
    pick = None if result.pick is None else result.pick.number
    return {
        "front": record.number in result.front,
        "pick": record.number == pick,
        "baseline": record.number == result.baseline,
    }


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    if isinstance(value, str):
        # The csv module does not quote a carriage return.
        with_lines = value.replace("\r\n", "\n").replace("\r", "\n")
        text = printable(with_lines, keep_lines=True)
        return f"'{text}" if text.startswith(_FORMULA) else text
    return value


# -- Markdown --------------------------------------------------------------------------------------


def reference_markdown(
    about: str, heads: Sequence[str], rows: Iterable[Sequence[str]], notes: Iterable[str]
) -> str:
    """Returns a study compared with a published table, as Markdown."""
    rules = [":--" if head in ("row", "remark") else "--:" for head in heads]
    cells = ([_plain(cell) for cell in row] for row in rows)
    table = "\n".join(_row(line) for line in [heads, rules, *cells])
    return "\n\n".join([f"**{_plain(about)}**", table, *map(_plain, notes)]) + "\n"


def markdown_text(result: StudyResult) -> str:
    """Returns the pick, the front and all trials as Markdown.

    Trial numbers have no `#`, which would become a link to an issue.
    """
    cap = format_size(result.cap_bytes)
    devices = result.workload.devices_per_trial
    place = (
        _plain(result.device.name) if devices == 1 else f"{devices} {_plain(result.device.name)}"
    )
    each = "" if devices == 1 else " each"
    about = result.workload.describe(counted=result.terms.counted)
    blocks = [
        f"## {_plain(result.study)}",
        f"{_plain(about)}, {result.workload.steps} steps, "
        f"on {place}, cap {cap}{each}. {outcome_counts(result.trials)}.",
        f"**{_answer(result)}**",
    ]
    if result.front:
        blocks.append(f"### {front_title(result)}")
        blocks.append(_table(result, front_records(result)))
    if result.trials:
        blocks.append("### All trials")
        blocks.append(_table(result, result.trials))
    blocks += perplexity_notes(result.trials)
    return "\n\n".join(blocks) + "\n"


def _answer(result: StudyResult) -> str:
    if result.pick is None:
        return no_pick_reason(result)
    picked = result.trial(result.pick.number)
    label = _plain(trial_label(picked))
    return f"{result.pick.heading}: trial {picked.number}, {label}: {_plain(result.pick.reason)}."


def _table(result: StudyResult, records: Sequence[TrialRecord]) -> str:
    table = trial_table(result, records, with_before_training=True)
    heads = [*(column.title for column in table.columns), "message"]
    rules = [*("--:" if column.is_number else ":--" for column in table.columns), ":--"]
    rows = [[*map(_plain, (*row.texts.values(), "; ".join(row.remarks)))] for row in table.rows]
    return "\n".join(map(_row, [heads, rules, *rows]))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """Escape `text` for one Markdown table cell: on one line, without markup or HTML."""
    on_one_line = printable(" ".join(text.split()))
    escaped = re.sub(r"([\\`*_\[\]|~])", r"\\\1", on_one_line)
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
