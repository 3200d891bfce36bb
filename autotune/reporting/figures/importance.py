"""Importance of each technique for each objective: fANOVA over the trials, by optuna.importance.

A random forest learns the logarithm of each objective from the techniques. The importance of a
technique is the share of the variance between trials that its values alone explain. This needs
scikit-learn. Optuna's PED-ANOVA does not, but it was wrong on a real study of 46 trials: it gave
checkpointing 18 % of perplexity, although checkpointing computes the same numbers whatever its
value (fANOVA: 0 %, and 95 % to precision). PED-ANOVA says how the best trials differ from the
others, and a sampler that repeats what went well makes them differ in everything.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import optuna
import plotly.graph_objects as go

from autotune.errors import InvalidInput
from autotune.reporting import style
from autotune.reporting.figures import FigureOptions
from autotune.reporting.figures.axes import Axis, AxisName, make_axis, memory_unit
from autotune.reporting.study_view import StudyView
from autotune.spec.config import FIELD_ORDER
from autotune.spec.result import TrialRecord

EVALUATOR = "fANOVA"
OBJECTIVES: tuple[AxisName, ...] = ("memory", "speed", "perplexity")
FEWEST_TRIALS = 20
TREES, DEPTH = 16, 8
"""Twice as many trees take more than twice as long and change no share by more than a few
hundredths. Trees deeper than 8 take minutes for hundreds of trials and learn their noise."""
MOST_TRIALS = 200
"""Of more trials, evenly spaced ones are used: the time grows faster than their number."""
SAME = 1e-6
"""Relative differences below this are rounding errors."""


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Share of each technique in one objective; empty if all trials have the same value.

    The shares add up to less than 1: the rest is the interaction of techniques.
    """

    objective: AxisName
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

    Raises InvalidInput for too few trials, if the trials do not differ, and without scikit-learn.
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
        (record, value) for record in view.result.trials if (value := axis.of(record)) is not None
    ]
    if len(measured) < FEWEST_TRIALS:
        study = view.result.study
        raise InvalidInput(
            f"importance needs at least {FEWEST_TRIALS} trials with a measured {axis.name}, "
            f"study {study!r} has {len(measured)}",
            hint=f"continue with autotune search --name {study} --trials {2 * FEWEST_TRIALS}",
        )
    every = math.ceil(len(measured) / MOST_TRIALS)
    used = [(record, math.log(value)) for record, value in measured[::every]]
    logarithms = [logarithm for _, logarithm in used]
    differ = max(logarithms) - min(logarithms) > SAME
    return Importance(objective=axis.name, trials=len(used), shares=_shares(used) if differ else {})


def _shares(losses: Sequence[tuple[TrialRecord, float]]) -> dict[str, float]:
    """Return the importance of each technique of which at least two values were tried."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    tried = {
        field: tuple(dict.fromkeys(getattr(record.config, field) for record, _ in losses))
        for field in FIELD_ORDER
    }
    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        field: optuna.distributions.CategoricalDistribution(values)
        for field, values in tried.items()
        if len(values) > 1
    }
    if not distributions:
        return {}
    study = optuna.create_study(direction="minimize")
    for record, loss in losses:
        parameters = {field: getattr(record.config, field) for field in distributions}
        study.add_trial(
            optuna.trial.create_trial(params=parameters, distributions=distributions, value=loss)
        )
    return {field: float(share) for field, share in _evaluated(study).items()}


def _evaluated(study: optuna.Study) -> Mapping[str, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about values that few trials have
        try:
            evaluator = optuna.importance.FanovaImportanceEvaluator(
                n_trees=TREES, max_depth=DEPTH, seed=0
            )
        except ImportError:
            raise InvalidInput(
                "importance needs the package scikit-learn",
                hint="pip install 'autotune[importance]'",
            ) from None
        # Normalized shares would add up to 1 even if only an interaction of techniques mattered.
        return optuna.importance.get_param_importances(study, evaluator=evaluator, normalize=False)


def _note(objectives: Sequence[Importance]) -> str:
    numbers = ", ".join(
        f"{importance.trials} for {importance.objective}" for importance in objectives
    )
    sentences = [
        "Share of the variance between trials that each technique explains alone "
        f"({EVALUATOR} on logarithms; trials: {numbers}). The rest up to 100 % is the interaction "
        "of techniques. A share says how much a technique matters, not in which direction."
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
