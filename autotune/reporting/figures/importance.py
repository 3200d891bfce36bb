"""Importance of each technique for each objective: an analysis of variance over the trials.

The logarithm of an objective is taken for a sum of one effect for each technique's value,

    log(objective) = constant + sum over techniques of effect(technique, value) + rest,

whose effects are those of least squares. So they are exact where effects add up, also if the trials
are a small part of all combinations, and each technique was changed together with others. The
importance of a technique is the variance of its effects over the values that were tried, and what
is left is the variance of the rest: of interactions of techniques, and of noise. As the rest makes
effects differ by chance, the variance expected of that is subtracted (it is the covariance of least
squares, the variance of the rest times the inverse of X'X).

A random forest (fANOVA of optuna.importance) showed interactions of 9 % where there were none,
since its trees learn a sum only in part. Optuna's PED-ANOVA says how the best trials differ from
the others, and a sampler that repeats what went well makes them differ in everything.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy
import plotly.graph_objects as go

from autotune.analysis.confirmed_speed import measured_alone
from autotune.analysis.counting_perplexity import counts
from autotune.errors import InvalidInput
from autotune.reporting import style
from autotune.reporting.figures import FigureOptions
from autotune.reporting.figures.axes import Axis, AxisName, make_axis, memory_unit
from autotune.reporting.study_view import StudyView
from autotune.spec.config import FIELD_ORDER
from autotune.spec.result import TrialRecord

OBJECTIVES: tuple[AxisName, ...] = ("memory", "speed", "perplexity")
FEWEST_TRIALS = 20
SAME = 1e-6
"""Relative differences below this are rounding errors."""


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Share of each technique in one objective; empty if all trials have the same value.

    The shares add up to 1 at most: the rest is the interaction of techniques, and noise.
    """

    objective: str
    trials: int
    shares: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class ImportanceFigure:
    """All data of the figure, ready to draw."""

    techniques: tuple[str, ...]
    """Sorted by their largest share, descending."""
    objectives: tuple[Importance, ...]
    note: str


def compute(view: StudyView) -> ImportanceFigure:
    """Compute the figure.

    Raises InvalidInput for too few trials, and if the trials do not differ.
    """
    result = view.result
    unit = memory_unit(result.trials, cap_bytes=result.cap_bytes)
    objectives = tuple(_importance(view, make_axis(name, unit=unit)) for name in OBJECTIVES)
    techniques = {technique for objective in objectives for technique in objective.shares}
    if not techniques:
        raise InvalidInput(
            f"the trials of study {result.study!r} have the same choices or the same results",
            hint="search a space with more values",
        )
    largest = {
        technique: max(objective.shares.get(technique, 0.0) for objective in objectives)
        for technique in techniques
    }
    return ImportanceFigure(
        techniques=tuple(
            sorted(techniques, key=lambda technique: (-largest[technique], technique))
        ),
        objectives=objectives,
        note=_note(objectives),
    )


def _importance(view: StudyView, axis: Axis) -> Importance:
    measured = [
        (record, value)
        for record in map(measured_alone, view.result.trials)
        if counts(record, axis.name) and (value := axis.of(replace(record, counted="tokens")))
    ]
    study, name = view.result.study, view.result.terms.worded(axis.name)
    hint = f"continue with autotune search --name {study} --trials "
    if len(measured) < FEWEST_TRIALS:
        raise InvalidInput(
            f"importance needs at least {FEWEST_TRIALS} trials with a measured {name}, "
            f"study {study!r} has {len(measured)}",
            hint=hint + str(2 * FEWEST_TRIALS),
        )
    losses = [(record, math.log(value)) for record, value in measured]
    logarithms = [logarithm for _, logarithm in losses]
    if max(logarithms) - min(logarithms) <= SAME:
        return Importance(objective=name, trials=len(losses), shares={})
    tried = _tried(losses)
    effects = 1 + sum(len(values) - 1 for values in tried.values())
    if len(losses) <= effects:
        raise InvalidInput(
            f"importance needs more trials with a measured {name} than the {effects} effects "
            f"of the values that were tried, study {study!r} has {len(losses)}",
            hint=hint + str(2 * effects),
        )
    return Importance(objective=name, trials=len(losses), shares=_shares(losses))


def _tried(losses: Sequence[tuple[TrialRecord, float]]) -> dict[str, tuple[object, ...]]:
    """Returns the values of each technique of which at least two were tried."""
    tried = {
        field: tuple(dict.fromkeys(getattr(record.config, field) for record, _ in losses))
        for field in FIELD_ORDER
    }
    return {field: values for field, values in tried.items() if len(values) > 1}


def _shares(losses: Sequence[tuple[TrialRecord, float]]) -> dict[str, float]:
    """Returns the importance of each technique of which at least two values were tried."""
    tried = _tried(losses)
    columns = [(field, value) for field, values in tried.items() for value in values]
    if not columns:
        return {}
    # One column for each value, and the constant. Effects are known but for a constant for each
    # technique, and `lstsq` returns the smallest ones.
    chosen = numpy.array(
        [
            [1.0, *(float(getattr(record.config, field) == value) for field, value in columns)]
            for record, _ in losses
        ]
    )
    logarithms = numpy.array([loss for _, loss in losses])
    effects, _, rank, _ = numpy.linalg.lstsq(chosen, logarithms, rcond=None)
    left = logarithms - chosen @ effects
    rest = float(left @ left) / max(1, len(losses) - int(rank))
    covariance = rest * numpy.linalg.pinv(chosen.T @ chosen)
    variances = {}
    for field, values in tried.items():
        first = 1 + columns.index((field, values[0]))
        own = slice(first, first + len(values))
        centered = numpy.eye(len(values)) - 1 / len(values)
        by_chance = float(numpy.trace(centered @ covariance[own, own])) / len(values)
        variances[field] = max(0.0, float(numpy.var(effects[own])) - by_chance)
    whole = sum(variances.values()) + rest
    return {field: variance / whole for field, variance in variances.items()}


def _note(objectives: Sequence[Importance]) -> str:
    numbers = ", ".join(
        f"{importance.trials} for {importance.objective}" for importance in objectives
    )
    sentences = [
        "Share of the variance that each technique explains alone (analysis of variance on "
        f"logarithms; trials: {numbers}). The rest up to 100 % is the interaction of techniques, "
        "and noise. A share says how much a technique matters, not in which direction."
    ]
    same = [importance.objective for importance in objectives if not importance.shares]
    return " ".join(sentences + [f"All trials have the same {name}." for name in same])


def plot(view: StudyView, _: FigureOptions) -> go.Figure:
    """Compute the figure of a study and draw it."""
    return draw(compute(view))


def draw(figure: ImportanceFigure) -> go.Figure:
    """Draw horizontal bars, three per technique."""
    drawing = style.styled(go.Figure(), note=figure.note)
    names = [technique.removesuffix("_size").replace("_", " ") for technique in figure.techniques]
    for number, importance in enumerate(figure.objectives):
        pattern = {
            "shape": ("", "/", "x")[number],
            "fillmode": "overlay",
            "solidity": 0.3,
            "size": 6,
        }
        drawing.add_trace(
            go.Bar(
                x=[100 * importance.shares.get(technique, 0.0) for technique in figure.techniques],
                y=names,
                orientation="h",
                name=importance.objective,
                marker={"color": style.PALETTE[number], "pattern": pattern},
                hovertemplate="%{y}: %{x:.2~r} %<extra>" + importance.objective + "</extra>",
            )
        )
    drawing.update_layout(
        barmode="group",
        xaxis={"title": "share of the variance, %", "rangemode": "tozero"},
        yaxis={"autorange": "reversed", "showgrid": False},
        legend=style.LEGEND_ABOVE,
        height=160 + 62 * len(names),
    )
    return drawing
