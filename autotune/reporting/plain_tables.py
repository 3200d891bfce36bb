"""A study as CSV, one row a trial, for spreadsheets and programs; and as Markdown, to paste where people talk."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from autotune.analysis.published_comparison import ComparedRow
from autotune.reporting import published_rows
from autotune.reporting.outcomes import OUTCOME_WORDS, outcome_counts
from autotune.reporting.trial_text import (
    SHARED_MARK_SAYS,
    is_shared,
    no_answer,
    perplexity_source_words,
    perplexity_words,
    speed_words,
)
from autotune.spec.config import FIELD_ORDER
from autotune.spec.result import StudyResult, TrialRecord
from autotune.units import format_size

_NESTED = ("config", "bytes_by_kind", "peak_bytes_by_category", "seconds_by_part")
_FIRST = ("number", "name", "outcome", "feasible")
MARKS = ("front", "pick", "baseline")
"""What the JSON says of a study by trial numbers, as true and false of each trial."""

CSV_COLUMNS = (
    *_FIRST,
    *MARKS,
    *FIELD_ORDER,
    *(field.name for field in fields(TrialRecord) if field.name not in (*_FIRST, *_NESTED)),
)
"""The names of the JSON object of a trial, those of its `config` beside them; what is nested there
is left out."""

_FORMULA = ("=", "+", "-", "@", "\t", "\n")


def csv_text(result: StudyResult) -> str:
    """What was not measured is empty.

    Names and messages come from files and errors of anybody: one that a spreadsheet would take for
    a formula gets an apostrophe in front, which spreadsheets do not show. `--json` has it as it is.
    """
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for record in result.trials:
        values = {**record.to_dict(), **record.config.to_dict(), **_marks(result, record)}
        writer.writerow([_cell(values[column]) for column in CSV_COLUMNS])
    return written.getvalue()


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
    if isinstance(value, str):
        text = value.replace("\r\n", "\n").replace("\r", "\n")  # which csv does not quote
        return f"'{text}" if text.startswith(_FORMULA) else text
    return value


# -- Markdown --------------------------------------------------------------------------------------


def reference_markdown(about: str, notes: Iterable[str], rows: Sequence[ComparedRow]) -> str:
    """A published table with one's own rows beside it."""
    heads = published_rows.heads(rows)
    rules = [":--" if head in ("row", "remark") else "--:" for head in heads]
    cells = ([_plain(cell) for cell in row] for row in published_rows.cells(rows))
    table = "\n".join(_row(line) for line in [heads, rules, *cells])
    return "\n\n".join([f"**{_plain(about)}**", table, *map(_plain, notes)]) + "\n"


def markdown_text(result: StudyResult) -> str:
    """The pick, the front and all trials.

    Trials are numbers without a `#`, which would link to an issue.
    """
    front = [result.trial(number) for number in result.front]
    beside = [r for r in result.trials if r.number == result.baseline and r not in front]
    cap = format_size(result.cap_bytes)
    blocks = [
        f"## {_plain(result.study)}",
        f"{_plain(result.workload.describe())}, {result.workload.steps} steps, on {_plain(result.device.name)}, "
        f"cap {cap}. {outcome_counts(result.trials)}.",
        f"**{_answer(result)}**",
        *(
            [f"### Front under {cap}, and the baseline", _table(result, [*front, *beside])]
            if front
            else []
        ),
        *(["### All trials", _table(result, result.trials)] if result.trials else []),
        *([SHARED_MARK_SAYS] if any(map(is_shared, result.trials)) else []),
    ]
    return "\n\n".join(blocks) + "\n"


def _answer(result: StudyResult) -> str:
    if result.pick is None:
        return no_answer(result)
    picked = result.trial(result.pick.number)
    return f"Pick: trial {picked.number}, {_words(picked)}: {_plain(result.pick.reason)}."


def _table(result: StudyResult, records: Iterable[TrialRecord]) -> str:
    is_cuda = result.device.type == "cuda"
    device = ["on device"] if is_cuda else []
    heads = [
        "trial",
        "configuration",
        "peak memory",
        *device,
        "tokens/s",
        "perplexity",
        "it is",
        "message",
    ]
    rules = [":--" if head in ("configuration", "it is", "message") else "--:" for head in heads]
    return "\n".join(
        _row(cells) for cells in [heads, rules, *(_cells(result, one, is_cuda) for one in records)]
    )


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(result: StudyResult, record: TrialRecord, is_cuda: bool) -> list[str]:
    marks = [name for name, holds in _marks(result, record).items() if holds]
    marks += [] if record.outcome == "ok" else [OUTCOME_WORDS[record.outcome]]
    marks += [f"from {_plain(record.reused_from)}"] if record.reused_from else []
    marks += (
        [f"perplexity: {_plain(source)}"] if (source := perplexity_source_words(record)) else []
    )
    return [
        str(record.number),
        _words(record),
        _size(record.peak_memory_bytes),
        *([_size(record.device_bytes)] if is_cuda else []),
        speed_words(record.tokens_per_second, record.tokens_per_second_spread),
        perplexity_words(record),
        ", ".join(marks),
        _plain(record.message),
    ]


def _words(record: TrialRecord) -> str:
    return (f"{_plain(record.name)}: " if record.name else "") + record.config.describe()


def _size(size_bytes: int | None) -> str:
    return "" if size_bytes is None else format_size(size_bytes)


def _plain(text: str) -> str:
    """`text` so that Markdown shows it as it is: on one line, no markup, no HTML, no end of the cell."""
    on_one_line = " ".join(text.split())
    escaped = re.sub(r"([\\`*_\[\]|~])", r"\\\1", on_one_line)
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
