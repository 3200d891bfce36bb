"""The figures of a report, each with a text alternative that says in words what it shows."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.quantities import format_size
from autotune.reporting import pareto
from autotune.reporting.study_view import StudyView
from autotune.result import TrialRecord

if TYPE_CHECKING:
    import plotly.graph_objects as go


@dataclass(frozen=True, kw_only=True)
class Table:
    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class ReportFigure:
    id: str
    title: str
    lead: str
    """What to look for in it."""
    alternative: str
    caption: str
    height: int
    """Pixels."""
    drawing: "go.Figure"
    table: Table | None = None

    @property
    def json(self) -> str:
        from markupsafe import Markup

        from autotune.reporting.report.page import script_json

        return Markup(script_json(self.drawing.to_plotly_json()))

    @property
    def needs_graphics_card(self) -> bool:
        return any(str(trace.type).endswith("gl") for trace in self.drawing.data)


def figures_of(view: StudyView) -> tuple[ReportFigure, ...]:
    return (_pareto(view),)


def _pareto(view: StudyView) -> ReportFigure:
    return ReportFigure(
        id="pareto",
        title="Front",
        lead="",
        alternative=_pareto_in_words(view),
        caption="",
        height=560,
        drawing=pareto.draw(pareto.compute(view.result)),
    )


def _pareto_in_words(view: StudyView) -> str:
    result = view.result
    measured = [record for record in result.trials if record.tokens_per_second and record.peak_memory_bytes]
    said = [f"Peak memory against speed of {len(measured)} trials, with the cap of {format_size(result.cap_bytes)}"]
    front = [result.trial(number) for number in result.front[:12]]
    if front:
        said.append("the front is " + ", ".join(map(_point, front)))
    if len(result.front) > len(front):
        said.append(f"and {len(result.front) - len(front)} more")
    if view.pick is not None:
        said.append(f"the pick is trial {view.pick.number}")
    if view.baseline is not None and view.baseline.tokens_per_second:
        said.append(f"the baseline is {_point(view.baseline)}")
    return "; ".join(said) + ". The table after it has the same numbers."


def _point(record: TrialRecord) -> str:
    return (
        f"trial {record.number} with {format_size(record.peak_memory_bytes or 0)} "
        f"at {record.tokens_per_second or 0:,.0f} tokens per second"
    )
