"""What holds the memory at the peak: one bar per trial, one segment per category."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import plotly.graph_objects as go

from autotune.errors import InvalidInput
from autotune.reporting import style
from autotune.reporting.figures import FigureOptions
from autotune.reporting.figures.parallel import nothing_to_show
from autotune.reporting.study_view import StudyView
from autotune.reporting.trial_text import trial_label
from autotune.spec.prediction import CATEGORIES
from autotune.spec.result import ON_HOST, TrialRecord
from autotune.units import format_size

Source = Literal["measured", "predicted", "partly measured"]
MOST_OF_FRONT = 12
"""How many trials of the front are shown by default."""
_ORDER = (*CATEGORIES, style.OTHER)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One trial; sizes in the unit of the figure."""

    number: int
    words: str
    roles: tuple[str, ...]
    """Subset of baseline and pick."""
    source: Source
    """measured: read from the allocator's history. predicted: from the prediction. partly measured:
    what stays between two steps is measured, the rest of the measured peak is not attributed."""
    segments: Mapping[str, float]
    measured_peak: float | None


@dataclass(frozen=True, kw_only=True)
class MemoryFigure:
    """All data of the figure, ready to draw."""

    unit: str
    bars: tuple[Bar, ...]
    cap: float | None
    """None if the cap does not apply to these bytes, as on CUDA."""
    cap_words: str
    note: str


def compute(view: StudyView, *, trials: Sequence[int] | None = None) -> MemoryFigure:
    """Compute the figure for `trials`, by default the baseline, the pick and the front.

    Raises InvalidInput for an unknown trial number, and if no peak is known.
    """
    records = _chosen(view) if trials is None else [trial_of(view, number) for number in trials]
    known = [
        (record, found) for record in records if (found := _bytes_of(view, record)) is not None
    ]
    if not known:
        if trials:
            raise nothing_to_show(view, "named has a measured or predicted peak")
        raise nothing_to_show(view, "has a peak, measured or predicted")
    largest = max(
        max(sum(sizes.values()), record.peak_memory_bytes or 0) for record, (_, sizes) in known
    )
    unit = style.unit_for(largest)
    bars = tuple(_bar(view, record, source, sizes, unit) for record, (source, sizes) in known)
    is_cpu = view.result.device.type != "cuda"
    return MemoryFigure(
        unit=unit.name,
        bars=bars,
        cap=unit.of(view.result.cap_bytes) if is_cpu else None,
        cap_words=f"cap {format_size(view.result.cap_bytes)}",
        note=_note(view, bars, [record for record in records if _bytes_of(view, record) is None]),
    )


def trial_of(view: StudyView, number: int) -> TrialRecord:
    """Returns the trial of that number. Raises InvalidInput if the study has none."""
    for record in view.result.trials:
        if record.number == number:
            return record
    known = "it has none yet"
    if view.result.trials:
        known = f"its trials are 0 to {len(view.result.trials) - 1}"
    study = view.result.study
    raise InvalidInput(
        f"study {study!r} has no trial {number}", hint=f"{known}; see autotune show {study}"
    )


def _chosen(view: StudyView) -> list[TrialRecord]:
    first = [record for record in (view.baseline, view.pick) if record is not None]
    front = [view.result.trial(number) for number in view.result.front[:MOST_OF_FRONT]]
    return first + [record for record in front if record not in first]


def _bytes_of(view: StudyView, record: TrialRecord) -> tuple[Source, Mapping[str, int]] | None:
    if record.peak_bytes_by_category:
        return "measured", record.peak_bytes_by_category
    prediction = view.prediction_of(record.config)
    if prediction is not None:
        return "predicted", dict(prediction.bytes_by_category.items())
    if record.peak_memory_bytes:
        kinds = {k: v for k, v in (record.bytes_by_kind or {}).items() if k not in ON_HOST}
        rest = max(0, record.peak_memory_bytes - sum(kinds.values()))
        return "partly measured", {**kinds, style.OTHER: rest}
    return None


def _bar(
    view: StudyView, record: TrialRecord, source: Source, sizes: Mapping[str, int], unit: style.Unit
) -> Bar:
    roles = (("baseline", view.result.baseline), ("pick", view.pick.number if view.pick else None))
    return Bar(
        number=record.number,
        words=trial_label(record),
        roles=tuple(role for role, number in roles if number == record.number),
        source=source,
        segments={name: unit.of(size) for name, size in sizes.items() if size},
        measured_peak=None if not record.peak_memory_bytes else unit.of(record.peak_memory_bytes),
    )


def _note(view: StudyView, bars: Sequence[Bar], unknown: Sequence[TrialRecord]) -> str:
    meanings = {
        "measured": "measured, from the allocator's history",
        "predicted": "predicted, with the measured peak as a mark",
        "partly measured": "measured between two steps, the rest of the measured peak unattributed",
    }
    sources = list(dict.fromkeys(bar.source for bar in bars))
    sentences = [f"Segments are {meanings[sources[0]]}."]
    if len(sources) > 1:
        parts = []
        for source in sources:
            numbers = style.listed_numbers([bar.number for bar in bars if bar.source == source])
            parts.append(f"{meanings[source]} ({numbers})")
        sentences = [f"Segments are {'; '.join(parts)}."]
    if unknown:
        sentences.append(
            f"Not known for {style.listed_numbers([record.number for record in unknown])}."
        )
    if view.result.device.type == "cuda":
        sentences.append(
            f"The cap, {format_size(view.result.cap_bytes)}, applies to more than these bytes."
        )
    return " ".join(sentences)


# -- drawing ---------------------------------------------------------------------------------------


def plot(view: StudyView, options: FigureOptions) -> go.Figure:
    """Compute the figure of a study and draw it."""
    return draw(compute(view, trials=options.trials))


def draw(figure: MemoryFigure) -> go.Figure:
    """Draw horizontal bars, the first on top, with the measured peak as a mark."""
    drawing = style.styled(go.Figure(), note=figure.note)
    positions = list(range(len(figure.bars)))
    for category in _ORDER:
        sizes = [bar.segments.get(category, 0.0) for bar in figure.bars]
        if any(sizes):
            drawing.add_trace(_segment(category, positions, sizes, figure))
    measured = [
        (position, bar)
        for position, bar in zip(positions, figure.bars, strict=True)
        if bar.measured_peak is not None
    ]
    peaks = go.Scatter(
        x=[bar.measured_peak for _, bar in measured],
        y=[position for position, _ in measured],
        mode="markers",
        name="measured peak",
        marker={
            "symbol": "line-ns",
            "size": 26,
            "line": {"width": 3, "color": style.GREY},
            "color": style.GREY,
        },
        hovertemplate="measured peak %{x:.4g} " + figure.unit + "<extra></extra>",
    )
    drawing.add_trace(peaks)
    if figure.cap is not None:
        drawing.add_vline(x=figure.cap, line={"color": style.VERMILLION, "dash": "dash"})
        drawing.add_annotation(
            x=figure.cap,
            y=0,
            yref="paper",
            text=figure.cap_words,
            showarrow=False,
            xanchor="left",
            yanchor="bottom",
        )
    drawing.update_layout(
        barmode="stack",
        bargap=0.35,
        xaxis={"title": f"bytes at the peak, {figure.unit}", "rangemode": "tozero"},
        yaxis={
            "tickvals": positions,
            "ticktext": [_label(bar) for bar in figure.bars],
            "autorange": "reversed",
            "showgrid": False,
        },
        legend={**style.LEGEND_ABOVE, "traceorder": "normal"},
        height=150 + 58 * len(figure.bars),
    )
    style.on_narrow_screens(drawing, {"yaxis.ticktext": [_short_label(bar) for bar in figure.bars]})
    return drawing


def _segment(
    category: str, positions: Sequence[int], sizes: Sequence[float], figure: MemoryFigure
) -> go.Bar:
    name = "unattributed rest" if category == style.OTHER else category.replace("_", " ")
    color = style.CATEGORY_COLORS.get(category, style.GREY)
    pattern = {
        "shape": style.CATEGORY_PATTERNS.get(category, ""),
        "fillmode": "overlay",
        "solidity": 0.25,
        "size": 6,
    }
    return go.Bar(
        x=sizes,
        y=positions,
        orientation="h",
        name=name,
        marker={"color": color, "pattern": pattern, "line": {"width": 0}},
        customdata=[bar.source for bar in figure.bars],
        hovertemplate="%{customdata} " + name + ": %{x:.4g} " + figure.unit + "<extra></extra>",
    )


def _label(bar: Bar) -> str:
    roles = f" ({', '.join(bar.roles)})" if bar.roles else ""
    return f"<b>#{bar.number}{roles}</b><br>" + style.wrapped(bar.words, width=42, lines=2)


def _short_label(bar: Bar) -> str:
    return "<br>".join([f"<b>#{bar.number}</b>", *bar.roles])
