"""A figure of a study as an HTML page, with the workload, the pick and the trials not shown."""

import plotly.graph_objects as go

from autotune.reporting.figures import FigureKind
from autotune.reporting.html_page import whole_page
from autotune.reporting.html_text import html_text
from autotune.reporting.trial_text import about, answer_of, outcome_line
from autotune.spec.result import StudyResult


def figure_page(result: StudyResult, kind: FigureKind, drawing: go.Figure) -> str:
    """Returns the HTML of the page; it needs nothing from the network."""
    return whole_page(
        result.study,
        about=about(result),
        answer=answer_of(result),
        heading=kind.title,
        drawing=drawing,
        below=_without_a_speed(result),
    )


def _without_a_speed(result: StudyResult) -> str:
    """Returns HTML that lists the trials without a speed, which most figures cannot show."""
    records = [record for record in result.trials if not record.tokens_per_second]
    if not records:
        return ""
    lines = "".join(f"<li>{html_text(outcome_line(record))}</li>" for record in records)
    return f"<details><summary>Without a speed: {len(records)}</summary><ul>{lines}</ul></details>"
