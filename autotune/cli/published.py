"""Comparison with a published table, for `show --reference` and `predict --reference`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table

from autotune.analysis.published_comparison import (
    EXCLUDED,
    ComparedRow,
    StudyRow,
    compare_with_published,
    is_of_published_size,
    reference_of,
)
from autotune.cli.tables import as_text, make_console
from autotune.reporting import published_rows
from autotune.reporting.plain_tables import reference_markdown
from autotune.reporting.study_view import StudyView
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Forecast
from autotune.spec.published_table import Figures, Reference
from autotune.spec.result import JSON_SCHEMA
from autotune.spec.search_space import SearchSpace
from autotune.spec.workload import Workload

_NARROW = 124
"""On a console of fewer columns each row of the table takes three lines."""

Form = Literal["table", "json", "markdown"]


@dataclass(frozen=True, kw_only=True)
class ReferenceAnswer:
    """A published table compared with the rows of one study, or with predictions."""

    reference: Reference
    rows: tuple[ComparedRow, ...]
    about: str
    has_published_size: bool
    facts: Mapping[str, Any]
    """The first entries of the JSON: which study or which workload."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": JSON_SCHEMA,
            **self.facts,
            "source": self.reference.source,
            "measured_on": self.reference.measured_on,
            "control": self.reference.control,
            "has_published_size": self.has_published_size,
            "rows": [row.to_dict() for row in self.rows],
        }


def of_study(view: StudyView) -> ReferenceAnswer:
    """Compare a study with the published table of its search space.

    Raises InvalidInput if the search space has no table.
    """
    result = view.result
    torch = result.device.versions.get("torch", "?")
    return ReferenceAnswer(
        reference=reference_of(view.definition.space, what=f"study {result.study!r}"),
        rows=published_rows.compared_rows(view),
        about=f"Study {result.study}: {result.workload.describe()}, {result.workload.steps} steps, "
        f"on {result.device.name}, torch {torch}",
        has_published_size=published_rows.has_published_size(view),
        facts={"study": result.study},
    )


def of_forecasts(
    space: SearchSpace,
    workload: Workload,
    forecasts: Sequence[Forecast],
    named: Mapping[str, TrainingConfig],
    *,
    about: str,
) -> ReferenceAnswer:
    """Compare predictions with the published table of a search space.

    `named` holds the legal configurations of the table by row name; two rows may have the same
    configuration. Raises InvalidInput if the search space has no table.
    """
    reference = reference_of(space, what="what is predicted")
    known = {forecast.config.fingerprint: _predicted(forecast) for forecast in forecasts}

    def row_of(name: str) -> StudyRow:
        return known[named[name].fingerprint] if name in named else StudyRow(remark=EXCLUDED)

    has_published_size = is_of_published_size(space, workload)
    return ReferenceAnswer(
        reference=reference,
        rows=compare_with_published(reference, row_of, has_published_size=has_published_size),
        about=f"Predicted: {about}",
        has_published_size=has_published_size,
        facts={"predicted": about, "workload": workload.to_dict()},
    )


def _predicted(forecast: Forecast) -> StudyRow:
    if forecast.prediction is None:
        return StudyRow(remark=forecast.error)
    return StudyRow(
        figures=Figures(peak_memory_bytes=forecast.prediction.peak_memory_bytes),
        peak_is_predicted=True,
    )


def print_reference(answer: ReferenceAnswer, *, form: Form) -> None:
    if form == "json":
        print(json.dumps(answer.to_dict(), indent=2, allow_nan=False))
    elif form == "markdown":
        print(reference_markdown(answer.about, _notes(answer), answer.rows), end="")
    else:
        _print_table(answer)


def _notes(answer: ReferenceAnswer) -> list[str]:
    return published_rows.notes(
        answer.reference, answer.rows, has_published_size=answer.has_published_size
    )


def _print_table(answer: ReferenceAnswer) -> None:
    console = make_console()
    if console.width < _NARROW:
        heads, lines = list(published_rows.STACKED_HEADS), published_rows.stacked_cells(answer.rows)
    else:
        heads, lines = published_rows.heads(answer.rows), published_rows.cells(answer.rows)
    table = Table(
        title=as_text(answer.about),
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
    )
    for head in heads:
        is_text = head in ("row", "remark")
        table.add_column(
            head, justify="left" if is_text else "right", no_wrap=head != "remark", overflow="fold"
        )
    for cells in lines:
        table.add_row(*map(as_text, cells))
    console.print(table)
    for line in _notes(answer):
        console.print(as_text(line))
