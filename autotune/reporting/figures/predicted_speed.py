"""Predicted against measured speed, with the bounds and the error of the prediction."""

import plotly.graph_objects as go

from autotune.analysis.expected_step import with_speed
from autotune.reporting import style
from autotune.reporting.figures import FigureOptions
from autotune.reporting.figures.parallel import nothing_to_show
from autotune.reporting.figures.predicted import (
    PredictedFigure,
    PredictedTrial,
    draw,
    group_of,
    note_of,
)
from autotune.reporting.study_view import StudyView
from autotune.reporting.trial_text import speed_text, trial_label
from autotune.spec.prediction import Prediction
from autotune.spec.result import TrialRecord


def compute(view: StudyView) -> PredictedFigure:
    """Compute the figure of speeds. Raises InvalidInput if no trial has both."""
    result = view.result
    points = []
    for record in result.trials:
        found = view.prediction_of(record.config)
        if found is None or record.tokens_per_second is None:
            continue
        found = with_speed(found, record.config, workload=result.workload, device=result.device)
        if found.predicted_tokens_per_second and found.predicted_tokens_per_second_bounds:
            points.append(_point(record, found))
    if not points:
        raise nothing_to_show(view, "has both a predicted and a measured speed")
    return PredictedFigure(
        quantity="speed", unit="tokens/s", points=tuple(points), note=note_of(points, "speed")
    )


def _point(record: TrialRecord, prediction: Prediction) -> PredictedTrial:
    predicted = prediction.predicted_tokens_per_second or 0.0
    lower, upper = prediction.predicted_tokens_per_second_bounds or (0.0, 0.0)
    measured = record.tokens_per_second or 0.0
    return PredictedTrial(
        number=record.number,
        group=group_of(record),
        predicted=predicted,
        measured=measured,
        lower=lower,
        upper=upper,
        hover=f"<b>#{record.number}</b> {style.wrapped(trial_label(record), width=60)}<br>"
        f"predicted {speed_text(prediction)}<br>"
        f"measured {measured:,.0f} tokens/s: {100 * (measured / predicted - 1):+.0f} %",
    )


def plot(view: StudyView, _: FigureOptions) -> go.Figure:
    """Compute the figure of a study and draw it."""
    return draw(compute(view))
