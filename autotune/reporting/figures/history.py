"""Progress of a search: best value of each objective and hypervolume, over trials and time."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import optuna
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from autotune.analysis.confirmed_speed import measured_alone
from autotune.analysis.counting_perplexity import counts, with_neutral_perplexities
from autotune.reporting import style
from autotune.reporting.figures import FigureOptions
from autotune.reporting.figures.axes import Axis, capped_axis, make_axis, memory_unit
from autotune.reporting.figures.parallel import nothing_to_show
from autotune.reporting.study_view import StudyView
from autotune.spec.result import TrialRecord
from autotune.spec.terms import ROWS, TOKENS, Terms
from autotune.units import format_size

_TIME_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
BEYOND = 1.1
"""The reference point of the hypervolume is this factor beyond the worst feasible trial. At the
worst value itself the box would be empty with a single trial, or if all had the same perplexity."""
Corner = tuple[float, float, float]
"""Memory in bytes, seconds per token, perplexity. Lower is better for each."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """One quantity after each trial; None before the first feasible trial."""

    title: str
    values: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class HistoryFigure:
    """All data of the figure, ready to draw."""

    numbers: tuple[int, ...]
    moments: tuple[float, ...]
    """Total time of all trials up to the end of each, in `time_unit`."""
    time_unit: str
    courses: tuple[Course, ...]
    reference: Corner
    """Reference point of the hypervolume."""
    note: str


def compute(view: StudyView) -> HistoryFigure:
    """Compute the figure. Raises InvalidInput if no trial is feasible."""
    result = view.result
    # A search knows the speeds of its trials only, and what was confirmed is on another scale.
    finished = (measured_alone(record) for record in result.trials if record.is_finished)
    trials = sorted(finished, key=lambda record: record.number)
    feasible = [record for record in trials if record.feasible]
    if not feasible:
        raise nothing_to_show(view, "is feasible")
    unit = memory_unit(result.trials, cap_bytes=result.cap_bytes)
    axes = [
        make_axis(name, unit=unit, terms=result.terms)
        for name in (capped_axis(result.device.type), "speed", "perplexity")
    ]
    reference = _reference(feasible, cap_bytes=result.cap_bytes)
    elapsed = list(accumulate(record.seconds or 0.0 for record in trials))
    time_unit, unit_seconds = next(
        (name, seconds) for name, seconds in _TIME_UNITS if elapsed[-1] >= seconds or seconds == 1.0
    )
    return HistoryFigure(
        numbers=tuple(record.number for record in trials),
        moments=tuple(moment / unit_seconds for moment in elapsed),
        time_unit=time_unit,
        courses=(
            *(
                Course(title=f"best {axis.title}", values=tuple(_best(axis, trials)))
                for axis in axes
            ),
            Course(title="hypervolume", values=hypervolumes(trials, reference)),
        ),
        reference=reference,
        note=result.terms.worded(_note(reference, trials, feasible, terms=result.terms)),
    )


def _best(axis: Axis, trials: Sequence[TrialRecord]) -> Iterator[float | None]:
    best: float | None = None
    for record in trials:
        value = axis.of(record) if record.feasible and counts(record, axis.name) else None
        if value is not None and (best is None or axis.is_better(value, best)):
            best = value
        yield best


# -- hypervolume -----------------------------------------------------------------------------------


def _reference(feasible: Sequence[TrialRecord], *, cap_bytes: int) -> Corner:
    """Returns the cap, and `BEYOND` times the worst speed and perplexity of feasible trials."""
    corners = [_corner(record) for record in with_neutral_perplexities(feasible)]
    return (
        float(cap_bytes),
        BEYOND * max(corner[1] for corner in corners),
        BEYOND * max(corner[2] for corner in corners),
    )


def _corner(record: TrialRecord) -> Corner:
    assert record.tokens_per_second, "a feasible trial has all three"
    assert record.perplexity
    return (
        float(record.device_bytes or record.peak_memory_bytes or 0),
        1 / record.tokens_per_second,
        record.perplexity,
    )


def hypervolumes(trials: Sequence[TrialRecord], reference: Corner) -> tuple[float, ...]:
    """Returns after each trial the share of the box up to `reference` that is dominated.

    Optuna computes it. Its public interface offers the numbers only in the figure it draws.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(directions=["minimize"] * 3)
    for record in with_neutral_perplexities([record for record in trials if record.feasible]):
        shares = [value / most for value, most in zip(_corner(record), reference, strict=True)]
        study.add_trial(optuna.trial.create_trial(values=shares))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        drawn = optuna.visualization.plot_hypervolume_history(study, reference_point=[1.0] * 3)
    of_feasible = iter(float(value) for value in drawn.data[0].y)
    volume, volumes = 0.0, []
    for record in trials:
        volume = next(of_feasible) if record.feasible else volume
        volumes.append(volume)
    return tuple(volumes)


def _note(
    reference: Corner,
    trials: Sequence[TrialRecord],
    feasible: Sequence[TrialRecord],
    *,
    terms: Terms,
) -> str:
    memory, seconds, perplexity = reference
    return (
        f"Best so far among the {len(feasible)} feasible of {len(trials)} trials. "
        "Hypervolume: the share of the objective space that some feasible trial dominates, up to "
        f"{format_size(memory)} (the cap), {1 / seconds:,.0f} tokens/s and perplexity "
        f"{terms.value(perplexity):.4g} (10 % beyond the slowest and the worst feasible trial). "
        "Speeds are those of the trials themselves, before any confirmation."
    )


# -- drawing ---------------------------------------------------------------------------------------


def plot(view: StudyView, _: FigureOptions) -> go.Figure:
    """Compute the figure of a study and draw it."""
    return draw(compute(view))


def draw(figure: HistoryFigure) -> go.Figure:
    """Draw one row per quantity: on the left over trials, on the right over their time."""
    rows = len(figure.courses)
    panels = make_subplots(
        rows=rows,
        cols=2,
        shared_yaxes=True,
        shared_xaxes="columns",
        vertical_spacing=0.04,
        horizontal_spacing=0.05,
    )
    drawing = style.styled(panels, note=figure.note)
    x_axes = (
        (figure.numbers, "#%{x}"),
        (figure.moments, "after %{x:.3g} " + figure.time_unit),
    )
    for row, course in enumerate(figure.courses, start=1):
        for column, (positions, label) in enumerate(x_axes, start=1):
            corners = _corners(course.values)
            line = go.Scatter(
                x=[positions[corner] for corner in corners],
                y=[course.values[corner] for corner in corners],
                mode="lines",
                line={
                    "shape": "hv",
                    "color": style.PALETTE[(row - 1) % len(style.PALETTE)],
                    "width": 2,
                },
                name=course.title,
                showlegend=False,
                hovertemplate="%{y:.5g}, " + label + "<extra></extra>",
            )
            drawing.add_trace(line, row=row, col=column)
        drawing.update_yaxes(title={"text": course.title, "font": {"size": 12}}, row=row, col=1)
        if course.title not in (TOKENS.quality, ROWS.quality):
            # Otherwise plotly would magnify a level line to its noise.
            drawing.update_yaxes(rangemode="tozero", row=row)
    drawing.update_xaxes(title="trial", row=rows, col=1)
    drawing.update_xaxes(title=f"{figure.time_unit} of trials", row=rows, col=2)
    drawing.update_layout(height=200 * rows + 60)
    return drawing


def _corners(values: Sequence[float | None]) -> list[int]:
    """Returns the indices where a stepped line changes, and its ends; the rest is invisible."""
    ends = {0, len(values) - 1}
    return [i for i, value in enumerate(values) if i in ends or value != values[i - 1]]
