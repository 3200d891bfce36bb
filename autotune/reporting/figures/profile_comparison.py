"""Two profiled trials side by side: the time of a step by phase, the bytes at the peak by kind."""

from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from autotune.analysis.profile_comparison import ProfileComparison
from autotune.reporting import style
from autotune.reporting.profile_text import format_milliseconds
from autotune.spec.prediction import CATEGORIES, Category
from autotune.spec.profile import Profile
from autotune.units import format_size


@dataclass(frozen=True, kw_only=True)
class ProfileComparisonFigure:
    """All data of the figure, ready to draw."""

    names: tuple[str, str]
    """Of the two trials."""
    phases: tuple[tuple[str, tuple[float, float]], ...]
    """Milliseconds of a step."""
    unit: style.Unit
    categories: tuple[tuple[Category, tuple[float, float]], ...]
    """Sizes in `unit`."""


def compute(
    comparison: ProfileComparison, first: Profile, second: Profile, *, names: tuple[str, str]
) -> ProfileComparisonFigure:
    """Compute the figure of a comparison."""
    unit = style.unit_for(max(first.peak_memory_bytes, second.peak_memory_bytes))
    categories = []
    for category in CATEGORIES:
        sizes = (
            unit.of(first.bytes_by_category.get(category, 0)),
            unit.of(second.bytes_by_category.get(category, 0)),
        )
        if any(sizes):
            categories.append((category, sizes))
    return ProfileComparisonFigure(
        names=names,
        phases=tuple(
            (one.name, (1000 * one.first, 1000 * one.second)) for one in comparison.phases
        ),
        unit=unit,
        categories=tuple(categories),
    )


def draw(figure: ProfileComparisonFigure) -> go.Figure:
    """Draw two groups of stacked bars, one for the time and one for the memory."""
    drawing = make_subplots(
        rows=1,
        cols=2,
        subplot_titles=("time of a step", "memory at the peak"),
        column_widths=[1, 1],
    )
    colors = (style.BLUE, style.ORANGE, style.GREEN)
    for index, (name, milliseconds) in enumerate(figure.phases):
        drawing.add_trace(
            go.Bar(
                x=figure.names,
                y=milliseconds,
                name=name,
                legendgroup="time",
                legendgrouptitle_text="time",
                marker_color=colors[index % len(colors)],
                text=[format_milliseconds(one / 1000) for one in milliseconds],
                hovertemplate="%{text}",
            ),
            row=1,
            col=1,
        )
    for category, sizes in figure.categories:
        drawing.add_trace(
            go.Bar(
                x=figure.names,
                y=sizes,
                name=category.replace("_", " "),
                legendgroup="memory",
                legendgrouptitle_text="memory",
                marker={
                    "color": style.CATEGORY_COLORS[category],
                    "pattern": {"shape": style.CATEGORY_PATTERNS[category]},
                },
                text=[format_size(round(size * figure.unit.size_bytes)) for size in sizes],
                hovertemplate="%{text}",
            ),
            row=1,
            col=2,
        )
    style.styled(drawing)
    drawing.update_layout(barmode="stack")
    drawing.update_yaxes(title_text="milliseconds", row=1, col=1)
    drawing.update_yaxes(title_text=figure.unit.name, row=1, col=2)
    return drawing
