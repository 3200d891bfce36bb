"""A study compared with a published table, as text cells for terminal, Markdown and report."""

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
from autotune.units import format_percent, format_size

PREDICTED_MARK = "~"


def compared_rows(view: StudyView) -> tuple[ComparedRow, ...]:
    """Compare a study with the published table of its search space, row by row.

    Raises InvalidInput if the search space has no table.
    """
    definition = view.definition
    return compare_with_published(
        reference_of(definition.space, what=f"study {view.result.study!r}"),
        rows_of_study(
            definition, {record.config.fingerprint: record for record in view.result.trials}
        ),
        has_published_size=has_published_size(view),
    )


def has_published_size(view: StudyView) -> bool:
    """Return whether the study has the model and batch size of the published table."""
    return is_of_published_size(view.definition.space, view.definition.workload)


def heads(rows: Sequence[ComparedRow]) -> list[str]:
    """Return the headings of the columns that are not empty in all rows."""
    headings = ["row", "peak", "published"]
    if _has_ratio(rows):
        headings.append("ratio")
    headings += ["saved", "published", "difference"]
    if _has_speed(rows):
        headings += ["speed", "published", "ratio"]
    if _has_perplexity(rows):
        headings += ["perplexity", "published"]
    if _has_remarks(rows):
        headings.append("remark")
    return headings


def cells(rows: Sequence[ComparedRow]) -> list[list[str]]:
    """Return one list of cells per row, for the columns of `heads`. All are plain text."""
    return [_cells(rows, row) for row in rows]


STACKED_HEADS = ("row", "peak", "saved", "speed", "perplexity", "remark")


def stacked_cells(rows: Sequence[ComparedRow]) -> list[list[str]]:
    """Return three lines of cells per row, for the columns of `STACKED_HEADS`.

    For narrow pages: the study's row, the published row and their difference.
    """
    lines = []
    for row in rows:
        lines.append([row.name, *_study_cells(row), row.own.remark])
        lines.append(["  published", *_published_cells(row), ""])
        lines.append(
            [
                "  difference",
                _ratio(row.peak_ratio),
                _percent(row.saved_difference, sign="+"),
                _ratio(row.speed_ratio),
            ]
        )
    return lines


def _study_cells(row: ComparedRow) -> list[str]:
    figures = row.own.figures
    mark = PREDICTED_MARK if row.own.peak_is_predicted else ""
    return [
        mark + _size_or_dash(figures.peak_memory_bytes),
        _percent(row.saved),
        _times(row.speed),
        _number(figures.perplexity),
    ]


def _published_cells(row: ComparedRow) -> list[str]:
    published = row.published
    return [
        _size_or_dash(published.peak_memory_bytes),
        _percent(row.published_saved),
        _times(row.published_speed),
        _number(published.perplexity),
    ]


def notes(
    reference: Reference, rows: Sequence[ComparedRow], *, has_published_size: bool
) -> list[str]:
    """Return the sentences that a reader needs in order to read the table."""
    sentences = [
        f"Published: {reference.source}, on {reference.measured_on}.",
        f"Savings and speeds are relative to {reference.control} of the same run; the difference "
        "of two savings is in percentage points.",
    ]
    if not has_published_size:
        sentences.append(
            "The model or the batch here has another size: savings can be compared, peaks cannot."
        )
    if any(row.own.peak_is_predicted for row in rows):
        sentences.append(f"{PREDICTED_MARK} is predicted, not measured.")
        control = next(row.own for row in rows if row.name == reference.control)
        if control.peak_is_predicted:
            sentences.append("The control is predicted, so savings relative to it are predictions.")
    return sentences


def _cells(rows: Sequence[ComparedRow], row: ComparedRow) -> list[str]:
    peak, saved, speed, perplexity = _study_cells(row)
    published_peak, published_saved, published_speed, published_perplexity = _published_cells(row)
    cells = [row.name, peak, published_peak]
    if _has_ratio(rows):
        cells.append(_ratio(row.peak_ratio))
    cells += [saved, published_saved, _percent(row.saved_difference, sign="+")]
    if _has_speed(rows):
        cells += [speed, published_speed, _ratio(row.speed_ratio)]
    if _has_perplexity(rows):
        cells += [perplexity, published_perplexity]
    if _has_remarks(rows):
        cells.append(row.own.remark)
    return cells


def _has_remarks(rows: Sequence[ComparedRow]) -> bool:
    return any(row.own.remark for row in rows)


def _has_ratio(rows: Sequence[ComparedRow]) -> bool:
    return any(row.peak_ratio is not None for row in rows)


def _has_speed(rows: Sequence[ComparedRow]) -> bool:
    return any(row.speed is not None for row in rows)


def _has_perplexity(rows: Sequence[ComparedRow]) -> bool:
    return any(row.own.figures.perplexity is not None for row in rows)


def _size_or_dash(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else format_size(size_bytes)


def _percent(share: float | None, *, sign: str = "") -> str:
    if share is None:
        return "-"
    percent = format_percent(share, digits=1, sign=bool(sign))
    return percent if sign else f"{percent} %"


def _times(factor: float | None) -> str:
    return "-" if factor is None else f"{factor:.2f}x"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"
