"""Predicted against measured peak memory, with the bounds and the error of the prediction."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from autotune.reporting import style
from autotune.reporting.figures import FigureOptions
from autotune.reporting.figures.parallel import nothing_to_show
from autotune.reporting.figures.pareto import MANY
from autotune.reporting.study_view import StudyView
from autotune.reporting.trial_text import trial_label
from autotune.spec.prediction import Prediction
from autotune.spec.result import TrialRecord
from autotune.units import format_size


@dataclass(frozen=True, kw_only=True)
class PredictedTrial:
    """Prediction and measurement of one trial, in the unit of the figure."""

    number: int
    group: str
    """Configurations whose prediction errors are alike, such as `compiled 16-bit`."""
    predicted: float
    measured: float
    lower: float
    upper: float
    """Bounds between which the measurement was expected."""
    hover: str

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted

    @property
    def is_inside(self) -> bool:
        return self.lower <= self.measured <= self.upper


@dataclass(frozen=True, kw_only=True)
class PredictedFigure:
    quantity: str
    """peak or speed."""
    unit: str
    points: tuple[PredictedTrial, ...]
    note: str


def compute(view: StudyView) -> PredictedFigure:
    """Compute the figure. Raises InvalidInput if no trial has a measured and a predicted peak."""
    both = [(record, view.prediction_of(record.config)) for record in view.result.trials]
    known = [
        (record, found) for record, found in both if found is not None and record.peak_memory_bytes
    ]
    if not known:
        raise nothing_to_show(view, "has both a predicted and a measured peak")
    unit = style.unit_for(max(record.peak_memory_bytes or 0 for record, _ in known))
    points = tuple(
        _point(record, prediction, unit, is_short=len(known) > MANY) for record, prediction in known
    )
    return PredictedFigure(
        quantity="peak", unit=unit.name, points=points, note=note_of(points, "peak")
    )


def _point(
    record: TrialRecord, prediction: Prediction, unit: style.Unit, *, is_short: bool
) -> PredictedTrial:
    measured = record.peak_memory_bytes or 0
    error = 100 * (measured / prediction.peak_memory_bytes - 1)
    hover = f"#{record.number}: measured {error:+.2f} % against predicted"
    if not is_short:
        hover = (
            f"<b>#{record.number}</b> {style.wrapped(trial_label(record), width=60)}<br>"
            f"predicted {format_size(prediction.peak_memory_bytes)}, "
            f"measured {format_size(measured)}: {error:+.2f} %<br>"
            f"expected from {format_size(prediction.lower_bound_bytes)} "
            f"to {format_size(prediction.upper_bound_bytes)}"
        )
    return PredictedTrial(
        number=record.number,
        group=group_of(record),
        predicted=unit.of(prediction.peak_memory_bytes),
        measured=unit.of(measured),
        lower=unit.of(prediction.lower_bound_bytes),
        upper=unit.of(prediction.upper_bound_bytes),
        hover=hover,
    )


def group_of(record: TrialRecord) -> str:
    """Returns the group of a trial, such as `compiled 16-bit`."""
    mode = "eager" if record.config.compile == "none" else "compiled"
    width = "fp32" if record.config.precision in ("fp32", "tf32") else "16-bit"
    return f"{mode} {width}"


def note_of(points: Sequence[PredictedTrial], quantity: str) -> str:
    """Returns how far measurements are from predictions, in a sentence."""
    ratios = [point.ratio for point in points]
    outside = sum(not point.is_inside for point in points)
    trials = "1 trial" if len(points) == 1 else f"{len(points)} trials"
    return (
        f"Measured over predicted {quantity} in {trials}: "
        f"median {statistics.median(ratios):.4f}, "
        f"from {min(ratios):.4f} to {max(ratios):.4f}; {outside or 'none'} outside the bounds."
    )


def plot(view: StudyView, _: FigureOptions) -> go.Figure:
    """Compute the figure of a study and draw it."""
    return draw(compute(view))


def draw(figure: PredictedFigure) -> go.Figure:
    """Draw the values on top and their error below: next to the diagonal, 1 % cannot be seen."""
    panels = make_subplots(
        rows=2, cols=1, shared_xaxes=True, row_heights=[0.6, 0.4], vertical_spacing=0.05
    )
    drawing = style.styled(panels, note=figure.note)
    ends = [
        0.9 * min(p.predicted for p in figure.points),
        1.05 * max(p.predicted for p in figure.points),
    ]
    diagonal = {
        "mode": "lines",
        "line": {"color": style.GREY, "dash": "dash", "width": 1},
        "hoverinfo": "skip",
    }
    drawing.add_trace(go.Scatter(x=ends, y=ends, name="as predicted", **diagonal), row=1, col=1)
    drawing.add_trace(go.Scatter(x=ends, y=[0, 0], showlegend=False, **diagonal), row=2, col=1)
    for number, group in enumerate(sorted({point.group for point in figure.points})):
        points = sorted(
            (p for p in figure.points if p.group == group), key=lambda point: point.predicted
        )
        for row, height in ((1, _as_it_is), (2, _percent_off)):
            color = style.PALETTE[number]
            for edge in _band(points, height, name=group, color=color):
                drawing.add_trace(edge, row=row, col=1)
            marker = {"color": color, "symbol": style.SYMBOLS[number], "size": 9}
            drawing.add_trace(
                _marks(points, height, name=group, marker=marker, legend=row == 1), row=row, col=1
            )
    drawing.update_yaxes(title=f"measured {figure.quantity}, {figure.unit}", row=1, col=1)
    drawing.update_yaxes(title="measured against<br>predicted, %", row=2, col=1)
    drawing.update_xaxes(title=f"predicted {figure.quantity}, {figure.unit}", row=2, col=1)
    drawing.update_layout(legend=style.LEGEND_ABOVE, height=640)
    return drawing


Height = Callable[[PredictedTrial, float], float]
"""Maps a point and one of its sizes to the height on the y axis."""


def _as_it_is(_: PredictedTrial, size: float) -> float:
    return size


def _percent_off(point: PredictedTrial, size: float) -> float:
    return 100 * (size / point.predicted - 1)


def _band(
    points: Sequence[PredictedTrial], height: Height, *, name: str, color: str
) -> Iterator[go.Scatter]:
    """Yield the two edges of the bounds, with the area between them filled."""
    points = points[:: math.ceil(len(points) / MANY)]
    red, green, blue = (int(color[index : index + 2], 16) for index in (1, 3, 5))
    for edge, fill in (
        ([height(p, p.lower) for p in points], None),
        ([height(p, p.upper) for p in points], "tonexty"),
    ):
        yield go.Scatter(
            x=[point.predicted for point in points],
            y=edge,
            mode="lines",
            line={"width": 1, "color": color, "dash": "dot"},
            opacity=0.5,
            fill=fill,
            fillcolor=f"rgba({red},{green},{blue},0.15)",
            name=f"bounds, {name}",
            legendgroup=name,
            showlegend=False,
            hoverinfo="skip",
        )


def _marks(
    points: Sequence[PredictedTrial],
    height: Height,
    *,
    name: str,
    marker: dict[str, object],
    legend: bool,
) -> go.Scatter:
    scatter = go.Scattergl if len(points) > MANY else go.Scatter
    return scatter(
        x=[float(f"{point.predicted:.6g}") for point in points],
        y=[float(f"{height(point, point.measured):.6g}") for point in points],
        mode="markers",
        name=name,
        legendgroup=name,
        showlegend=legend,
        marker=marker,
        customdata=[point.hover for point in points],
        hovertemplate="%{customdata}<extra></extra>",
    )
