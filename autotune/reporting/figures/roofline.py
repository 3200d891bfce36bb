"""The roofline of a device with the trials under it: how far each is from what could be.

Both axes are logarithmic. A trial cannot be above the roof of its number format, nor above the
slanted line of the memory's bandwidth, unless caches hold what its operators pass on. Formulas and
sources are in `analysis/roofline.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from autotune.analysis.roofline import MatrixFormat, Roofline, roofline
from autotune.errors import InvalidInput
from autotune.reporting import style
from autotune.reporting.figures import FigureOptions
from autotune.reporting.figures.parallel import nothing_to_show
from autotune.reporting.study_view import StudyView
from autotune.reporting.trial_text import full_hover
from autotune.spec.prediction import Prediction
from autotune.spec.result import TrialRecord
from autotune.units import format_percent, format_rate


@dataclass(frozen=True, kw_only=True)
class TrialOnRoofline:
    """One trial."""

    number: int
    is_pick: bool
    is_front: bool
    found: Roofline
    recomputed_per_second: float
    """FLOPs per second that are recomputed ones."""
    hover: str


@dataclass(frozen=True, kw_only=True)
class RooflineFigure:
    """All data of the figure, ready to draw."""

    points: tuple[TrialOnRoofline, ...]
    roofs: Mapping[MatrixFormat, float]
    """FLOPs per second of each number format of the points, of all devices of a trial."""
    bandwidth: float
    """Bytes per second."""
    note: str


def trials_shown(view: StudyView) -> list[TrialRecord]:
    """Returns the trials to be drawn even if they must be predicted: pick, front and baseline."""
    result = view.result
    numbers = dict.fromkeys(result.front)
    if result.pick is not None:
        numbers[result.pick.number] = None
    if result.baseline is not None:
        numbers[result.baseline] = None
    return [result.trial(number) for number in numbers]


def compute(view: StudyView, predictions: Mapping[str, Prediction] | None = None) -> RooflineFigure:
    """Compute the figure. Raises InvalidInput if no trial has a place in it.

    `predictions` are those that the study does not have, by fingerprint.
    """
    result = view.result
    if result.device.matrix_flops_per_second is None:
        raise nothing_to_show(view, "can be compared with its device, which was not measured")
    if result.device.bandwidth_bytes_per_second is None:
        raise InvalidInput(
            f"the speed of the memory of {result.device.name} is not known: when study "
            f"{result.study!r} began, something else used the device while it was measured",
            hint="a new study measures it again, where nothing else uses the device",
        )
    points, without = [], 0
    for record in result.trials:
        if record.model_flops_utilization is None:
            continue
        fingerprint = record.config.fingerprint
        prediction = view.prediction_of(record.config) or (predictions or {}).get(fingerprint)
        found = roofline(record, result.device, prediction)
        if found is None:
            without += 1
        else:
            points.append(_point(view, record, found))
    if not points:
        raise nothing_to_show(view, "has both a speed and a prediction")
    best = view.pick if view.pick is not None else None
    return RooflineFigure(
        points=tuple(points),
        roofs={point.found.format: point.found.matrix_rate for point in points},
        bandwidth=points[0].found.bandwidth,
        note=_note(best, points, without),
    )


def _point(view: StudyView, record: TrialRecord, found: Roofline) -> TrialOnRoofline:
    result = view.result
    recomputed = (record.recomputed_flops_per_token or 0.0) * (record.places_per_second or 0.0)
    is_pick = result.pick is not None and result.pick.number == record.number
    limit = format_percent(found.flops_per_second / found.attainable)
    lines = [
        full_hover(record, view.baseline),
        f"{format_rate(found.flops_per_second, 'FLOP')}, "
        f"{format_rate(recomputed, 'FLOP')} recomputed",
        f"{found.flops_per_byte:.3g} FLOPs per byte accessed",
        f"{limit} % of the roofline there",
    ]
    return TrialOnRoofline(
        number=record.number,
        is_pick=is_pick,
        is_front=record.number in result.front,
        found=found,
        recomputed_per_second=recomputed,
        hover="<br>".join(lines),
    )


def _note(pick: TrialRecord | None, points: Sequence[TrialOnRoofline], without: int) -> str:
    sentences = [
        "Bars reach down to the FLOPs of the model: the rest is recomputed. The roofs are what "
        "matrix products and copies reach on this device, measured when the study began. Bytes are "
        "those that operators read and write; what stays in a cache is above the slanted line."
    ]
    shown = next((point for point in points if pick and point.number == pick.number), None)
    if shown is not None and pick is not None and pick.model_flops_utilization is not None:
        share = format_percent(pick.model_flops_utilization)
        limit = format_percent(shown.found.attainable / shown.found.matrix_rate)
        sentences.append(
            f"The pick has {share} % of the roof of {shown.found.format}; its "
            f"{shown.found.flops_per_byte:.3g} FLOPs per byte allow {limit} %."
        )
    if without:
        trials = "1 trial that was" if without == 1 else f"{without} trials that were"
        sentences.append(f"Not drawn: {trials} not predicted, as the memory surely sufficed.")
    return " ".join(sentences)


def plot(view: StudyView, options: FigureOptions) -> go.Figure:
    """Compute the figure of a study and draw it."""
    return draw(compute(view, options.predictions))


def draw(figure: RooflineFigure) -> go.Figure:
    """Draw the roofs as lines and each trial as a mark."""
    drawing = style.styled(go.Figure(), note=figure.note)
    intensities = [point.found.flops_per_byte for point in figure.points]
    highest = max(figure.roofs.values())
    # The knee of the highest roof belongs to the picture, and some room on both sides.
    left = min(intensities) / 2
    right = 2 * max(*intensities, highest / figure.bandwidth)
    colors = dict(zip(sorted(figure.roofs), style.PALETTE, strict=False))
    drawing.add_trace(
        go.Scatter(
            x=[left, highest / figure.bandwidth],
            y=[left * figure.bandwidth, highest],
            mode="lines",
            name=f"memory, {format_rate(figure.bandwidth, 'B')}",
            line={"color": style.GREY, "dash": "dash", "width": 2},
            hoverinfo="skip",
        )
    )
    for kind, rate in sorted(figure.roofs.items()):
        drawing.add_trace(
            go.Scatter(
                x=[rate / figure.bandwidth, right],
                y=[rate, rate],
                mode="lines",
                name=f"{kind} products, {format_rate(rate, 'FLOP')}",
                line={"color": colors[kind], "width": 2},
                hoverinfo="skip",
            )
        )
        drawing.add_trace(_marks(figure, kind, colors[kind]))
    drawing.update_xaxes(
        type="log", dtick="D2", title="FLOPs per byte that operators read or write"
    )
    drawing.update_yaxes(type="log", dtick="D2", title="FLOPs per second", exponentformat="SI")
    drawing.update_layout(legend=style.LEGEND_ABOVE, height=600)
    return drawing


def _marks(figure: RooflineFigure, kind: MatrixFormat, color: str) -> go.Scatter:
    """Draw the trials of one number format; the front is filled, the pick is a star."""
    points = [point for point in figure.points if point.found.format == kind]
    symbols = []
    for point in points:
        if point.is_pick:
            symbols.append("star")
        else:
            symbols.append("circle" if point.is_front else "circle-open")
    return go.Scatter(
        x=[point.found.flops_per_byte for point in points],
        y=[point.found.flops_per_second for point in points],
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [0.0 for _ in points],
            "arrayminus": [point.recomputed_per_second for point in points],
            "thickness": 1.5,
            "width": 4,
        },
        mode="markers+text",
        name=f"trials in {kind}",
        marker={
            "color": color,
            "symbol": symbols,
            "size": [18 if point.is_pick else 10 for point in points],
        },
        text=[f"#{point.number}" if point.is_front else "" for point in points],
        textposition="top center",
        customdata=[point.hover for point in points],
        hovertemplate="%{customdata}<extra></extra>",
    )
