"""One's own rows beside a published table, as text cells for a terminal, for Markdown and for the report."""

from collections.abc import Sequence

from autotune.analysis.published_comparison import (
    ComparedRow,
    compare_with_published,
    is_of_published_size,
    reference_of,
    rows_of_study,
)
from autotune.reporting.study_view import StudyView
from autotune.spec.published_table import Reference
from autotune.units import format_size

PREDICTED_MARK = "~"


def compared_rows(view: StudyView) -> tuple[ComparedRow, ...]:
    """A study beside the table of its search space. Raises InvalidInput where that has none."""
    definition = view.definition
    return compare_with_published(
        reference_of(definition.space, what=f"study {view.result.study!r}"),
        rows_of_study(
            definition, {record.config.fingerprint: record for record in view.result.trials}
        ),
        has_published_size=has_published_size(view),
    )


def has_published_size(view: StudyView) -> bool:
    return is_of_published_size(view.definition.space, view.definition.workload)


def heads(rows: Sequence[ComparedRow]) -> list[str]:
    """The columns that hold anything."""
    return [
        "row",
        "peak",
        "published",
        *(["ratio"] if _has_ratio(rows) else []),
        "saved",
        "published",
        "difference",
        *(["speed", "published", "ratio"] if _has_speed(rows) else []),
        *(["perplexity", "published"] if _has_perplexity(rows) else []),
        *(["remark"] if _has_remarks(rows) else []),
    ]


def cells(rows: Sequence[ComparedRow]) -> list[list[str]]:
    """One list a row, under `heads`. Names and remarks are plain text."""
    return [_cells(rows, row) for row in rows]


STACKED_HEADS = ("row", "peak", "saved", "speed", "perplexity", "remark")


def stacked_cells(rows: Sequence[ComparedRow]) -> list[list[str]]:
    """The same for a narrow page, under `STACKED_HEADS`: three lines a row."""
    lines = []
    for row in rows:
        own, published = _own_cells(row), _published_cells(row)
        lines += [[row.name, *own, row.own.remark], ["  published", *published, ""]]
        lines.append(
            [
                "  difference",
                _ratio(row.peak_ratio),
                _percent(row.saved_difference, sign="+"),
                _ratio(row.speed_ratio),
            ]
        )
    return lines


def _own_cells(row: ComparedRow) -> list[str]:
    own = row.own.figures
    mark = PREDICTED_MARK if row.own.peak_is_predicted else ""
    return [
        mark + _size(own.peak_memory_bytes),
        _percent(row.saved),
        _times(row.speed),
        _number(own.perplexity),
    ]


def _published_cells(row: ComparedRow) -> list[str]:
    published = row.published
    return [
        _size(published.peak_memory_bytes),
        _percent(row.published_saved),
        _times(row.published_speed),
        _number(published.perplexity),
    ]


def notes(
    reference: Reference, rows: Sequence[ComparedRow], *, has_published_size: bool
) -> list[str]:
    """What a reader has to know beside the table."""
    said = [
        f"Published: {reference.source}, on {reference.measured_on}.",
        f"Savings and speeds are relative to {reference.control}, each to that of its own run; the difference of two "
        "savings is in percentage points.",
    ]
    if not has_published_size:
        said.append(
            "The model or the batch here is of another size: savings compare, peaks do not."
        )
    if any(row.own.peak_is_predicted for row in rows):
        said.append(f"{PREDICTED_MARK} is predicted, not measured.")
        control = next(row.own for row in rows if row.name == reference.control)
        if control.peak_is_predicted:
            said.append("So is the control: savings beside it are predictions, too.")
    return said


def _cells(rows: Sequence[ComparedRow], row: ComparedRow) -> list[str]:
    (peak, saved, speed, perplexity), published = _own_cells(row), _published_cells(row)
    return [
        row.name,
        peak,
        published[0],
        *([_ratio(row.peak_ratio)] if _has_ratio(rows) else []),
        saved,
        published[1],
        _percent(row.saved_difference, sign="+"),
        *([speed, published[2], _ratio(row.speed_ratio)] if _has_speed(rows) else []),
        *([perplexity, published[3]] if _has_perplexity(rows) else []),
        *([row.own.remark] if _has_remarks(rows) else []),
    ]


def _has_remarks(rows: Sequence[ComparedRow]) -> bool:
    return any(row.own.remark for row in rows)


def _has_ratio(rows: Sequence[ComparedRow]) -> bool:
    return any(row.peak_ratio is not None for row in rows)


def _has_speed(rows: Sequence[ComparedRow]) -> bool:
    return any(row.speed is not None for row in rows)


def _has_perplexity(rows: Sequence[ComparedRow]) -> bool:
    return any(row.own.figures.perplexity is not None for row in rows)


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else format_size(size_bytes)


def _percent(share: float | None, *, sign: str = "") -> str:
    if share is None:
        return "-"
    percent = round(100 * share, 1) + 0.0  # no -0.0
    return f"{percent:{sign}.1f}{'' if sign else ' %'}"


def _times(factor: float | None) -> str:
    return "-" if factor is None else f"{factor:.2f}x"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"
