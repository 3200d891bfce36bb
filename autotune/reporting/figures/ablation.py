"""Ablation figure: the effect of each technique alone, on top of the others and over all pairs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from autotune.analysis.ablation import AblationStep, Effect, Pairs, Range, ablation_steps
from autotune.analysis.peak import listed
from autotune.analysis.variants import named
from autotune.reporting import style
from autotune.reporting.figures import FigureOptions
from autotune.reporting.figures.parallel import nothing_to_show
from autotune.reporting.study_view import StudyView
from autotune.spec.terms import TOKENS, Terms
from autotune.units import format_percent, format_size


@dataclass(frozen=True, kw_only=True)
class Cells:
    """One effect as table cells; the texts are empty if it is not known."""

    how: str
    """One of `HOW`: alone, on top of the others, over all pairs."""
    memory: str
    """`12.40 GiB less`"""
    memory_share: str
    speed: str
    perplexity: str
    source: str
    """The trials it comes from, or why there are none."""
    is_predicted: bool = False

    @property
    def has_numbers(self) -> bool:
        return bool(self.memory or self.speed or self.perplexity)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One value of a technique and its three effects."""

    words: str
    """Name and value, as in the description of a configuration: `micro-batch 4`."""
    cells: tuple[Cells, Cells, Cells]

    @property
    def has_numbers(self) -> bool:
        return any(cells.has_numbers for cells in self.cells)

    @property
    def why_no_numbers(self) -> str:
        """`alone: not tried; on top: not in the pick; no pair`, for a row without numbers."""
        alone, on_top, pairs = self.cells
        return f"alone: {alone.source}; on top: {on_top.source}; {pairs.source}"


@dataclass(frozen=True, kw_only=True)
class AblationFigure:
    """All data of the figure, ready to draw."""

    steps: tuple[AblationStep, ...]
    """Parallel to `rows`."""
    rows: tuple[Row, ...]
    """The rows with numbers, or all rows if none has any."""
    folded: tuple[Row, ...]
    """The rows without numbers, of which the note says why; empty if no row has any."""
    note: str
    terms: Terms = TOKENS


HOW = ("alone", "on top of the others", "over all pairs")


def compute(view: StudyView) -> AblationFigure:
    """Compute the figure. Raises InvalidInput if no trial differs from the baseline."""
    baseline = (
        view.baseline.config if view.baseline is not None else view.definition.baseline_config()
    )
    steps = ablation_steps(
        (*view.result.trials, *view.result.variants),
        plain=baseline,
        pick=view.pick,
        predicted_peak=_peaks_of(view),
        at=view.definition.workload.legality_context,
    )
    if not steps:
        raise nothing_to_show(view, "uses a technique that the baseline does not")
    all_rows = [(step, _row(step, view.result.terms)) for step in steps]
    shown = [(step, row) for step, row in all_rows if row.has_numbers]
    folded: tuple[Row, ...] = ()
    if shown:
        folded = tuple(row for _, row in all_rows if not row.has_numbers)
    else:
        shown = all_rows
    return AblationFigure(
        steps=tuple(step for step, _ in shown),
        rows=tuple(row for _, row in shown),
        folded=folded,
        note=_note(view, steps, folded),
        terms=view.result.terms,
    )


def _peaks_of(view: StudyView) -> Callable[..., int | None]:
    def peak(config: object) -> int | None:
        prediction = view.prediction_of(config)  # type: ignore[arg-type]
        return None if prediction is None else prediction.peak_memory_bytes

    return peak


def _row(step: AblationStep, terms: Terms) -> Row:
    return Row(
        words=named(step.technique, step.value),
        cells=(
            _cells(HOW[0], step.alone, terms),
            _cells(HOW[1], step.on_top, terms),
            _cells_of_pairs(step.pairs, terms),
        ),
    )


def _cells(how: str, effect: Effect | str, terms: Terms) -> Cells:
    if isinstance(effect, str):
        return Cells(how=how, memory="", memory_share="", speed="", perplexity="", source=effect)
    numbers = [n for n in (effect.with_number, effect.without_number) if n is not None]
    sources = []
    if len(numbers) == 2:
        sources.append(f"#{numbers[0]} against #{numbers[1]}")
    elif numbers:
        sources.append(style.listed_numbers(numbers))
    if effect.is_predicted:
        sources.append("memory predicted")
    return Cells(
        how=how,
        memory=_less_bytes(effect.saved_bytes),
        memory_share=_less(effect.saved_share),
        speed=_change(effect.speed_share, effect.speed_spread, digits=0),
        perplexity=_change_of_quality(effect.perplexity_share, effect.perplexity_spread, terms),
        source=", ".join(sources),
        is_predicted=effect.is_predicted,
    )


def _cells_of_pairs(pairs: Pairs, terms: Terms) -> Cells:
    if not pairs.count:
        return Cells(
            how=HOW[2], memory="", memory_share="", speed="", perplexity="", source="no pair"
        )
    return Cells(
        how=HOW[2],
        memory="" if pairs.saved_bytes is None else _less_bytes(pairs.saved_bytes.median),
        memory_share=_less_range(pairs.saved_share),
        speed=_change_range(pairs.speed_share, digits=0),
        perplexity=_range_of_quality(pairs.perplexity_share, terms),
        source="1 pair" if pairs.count == 1 else f"{pairs.count} pairs",
    )


# -- text ------------------------------------------------------------------------------------------


def _less_bytes(saved_bytes: float | None) -> str:
    if saved_bytes is None:
        return ""
    if not saved_bytes:
        return "the same"
    direction = "less" if saved_bytes >= 0 else "more"
    return f"{format_size(abs(saved_bytes))} {direction}"


def _less(share: float | None) -> str:
    if share is None:
        return ""
    percent = format_percent(abs(share))
    if percent == "0":
        return "0 %"
    return f"{percent} % {'less' if share > 0 else 'more'}"


def _less_range(shares: Range | None) -> str:
    if shares is None:
        return ""
    if shares.lowest == shares.highest:
        return _less(shares.median)
    return f"{_less(shares.median)} ({_signed(-shares.highest, 0)} to {_signed(-shares.lowest, 0)})"


def _change(share: float | None, spread: float | None, *, digits: int) -> str:
    if share is None:
        return ""
    around = f" ± {100 * spread:.{digits}f}" if spread is not None else ""
    return f"{_signed(share, digits).removesuffix(' %')}{around} %"


def _change_of_quality(share: float | None, spread: float | None, terms: Terms) -> str:
    if share is None or terms.quality == "perplexity":
        return _change(share, spread, digits=2)
    around = f" ± {spread:.4f}" if spread is not None else ""
    return f"{math.log1p(share):+.4f}{around}"


def _range_of_quality(shares: Range | None, terms: Terms) -> str:
    if shares is None or terms.quality == "perplexity":
        return _change_range(shares, digits=2)
    middle = f"{math.log1p(shares.median):+.4f}"
    if shares.lowest == shares.highest:
        return middle
    return f"{middle} ({math.log1p(shares.lowest):+.4f} to {math.log1p(shares.highest):+.4f})"


def _change_range(shares: Range | None, *, digits: int) -> str:
    if shares is None:
        return ""
    if shares.lowest == shares.highest:
        return _signed(shares.median, digits)
    lowest = _signed(shares.lowest, digits)
    highest = _signed(shares.highest, digits)
    return f"{_signed(shares.median, digits)} ({lowest} to {highest})"


def _signed(share: float, digits: int) -> str:
    return f"{format_percent(share, digits=digits, sign=True)} %"


def _note(view: StudyView, steps: Sequence[AblationStep], folded: Sequence[Row]) -> str:
    baseline = "the baseline" if view.baseline is None else f"the baseline, #{view.baseline.number}"
    pick = (
        "there is no pick"
        if view.pick is None
        else f"the pick, #{view.pick.number}, against the pick without it"
    )
    sentences = [
        f"Alone: {baseline}, with this one choice. On top of the others: {pick}. Over all pairs: "
        "median and range over the pairs of measured trials that differ in this choice only."
    ]
    if view.pick is not None and not any(isinstance(step.on_top, Effect) for step in steps):
        sentences.append(
            "The effect on top of the others is unknown: no trial is the pick without one of its "
            "choices."
        )
    effects = [effect for step in steps for effect in (step.alone, step.on_top)]
    if any(isinstance(effect, Effect) and effect.is_predicted for effect in effects):
        sentences.append("Hatched: both peaks are predicted.")
    sentences += [f"Not known for {names} ({reason})." for names, reason in by_reason(folded)]
    return " ".join(sentences)


def by_reason(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Returns names and reason of the rows without numbers, those with the same reason as one."""
    reasons = dict.fromkeys(row.why_no_numbers for row in rows)
    return [
        (listed(*(row.words for row in rows if row.why_no_numbers == reason)), reason)
        for reason in reasons
    ]


# -- drawing ---------------------------------------------------------------------------------------

_PANELS = (
    ("saved_share", "less memory, %"),
    ("speed_share", "change of speed, %"),
    ("perplexity_share", "change of perplexity, %"),
)
_LABEL_WIDTH = 30
_ZERO = 0.0005
"""A bar with a smaller share cannot be seen and gets a number instead."""


def plot(view: StudyView, _: FigureOptions) -> go.Figure:
    """Compute the figure of a study and draw it."""
    return draw(compute(view))


def draw(figure: AblationFigure) -> go.Figure:
    """Draw three panels with a group of bars for each value: side by side, stacked on a phone."""
    panels = make_subplots(rows=1, cols=3, shared_yaxes=True, horizontal_spacing=0.03)
    drawing = style.styled(panels, note=figure.note)
    # A kind of bars of which there is none would be an entry of the legend and an empty space.
    kinds = [
        kind for kind in range(len(HOW)) if any(row.cells[kind].has_numbers for row in figure.rows)
    ]
    for column, (number, title) in enumerate(_PANELS, start=1):
        for kind in kinds:
            drawing.add_trace(
                _bars(figure, kind, number, name=HOW[kind], legend=column == 1), row=1, col=column
            )
        drawing.update_xaxes(
            title={"text": _title(figure, title), "standoff": 8},
            row=1,
            col=column,
            zeroline=True,
            zerolinewidth=2,
        )
    drawing.update_xaxes(autorange="reversed", row=1, col=3)  # what is better is on the right
    rows = len(figure.rows)
    names = [style.wrapped(row.words, width=_LABEL_WIDTH, lines=2) for row in figure.rows]
    drawing.update_yaxes(
        tickvals=list(range(rows)),
        ticktext=names,
        range=[rows - 0.5, -0.5],
        showgrid=False,
        showticklabels=False,
    )
    drawing.update_layout(
        barmode="group",
        legend=style.LEGEND_ABOVE,
        height=140 + 46 * rows,
        yaxis_showticklabels=True,
    )
    for position, row in enumerate(figure.rows):
        if not row.has_numbers:
            drawing.add_annotation(
                x=0,
                y=position,
                text=f" {row.why_no_numbers}",
                showarrow=False,
                xanchor="left",
                font_size=11,
            )
    narrow = {
        f"annotations[{number}].text": " not known"
        for number in range(len(drawing.layout.annotations))
    }
    style.on_narrow_screens(
        drawing, {**narrow, **_below_each_other(figure, height=3 * (80 + 36 * rows))}
    )
    return drawing


def _title(figure: AblationFigure, title: str) -> str:
    if figure.terms.quality == "loss" and "perplexity" in title:
        return "change of exp(loss), %"
    return title


def _below_each_other(figure: AblationFigure, *, height: int) -> dict[str, object]:
    changes: dict[str, object] = {"height": height}
    for number, suffix in enumerate(("", "2", "3")):
        top = 1 - number / 3
        changes[f"xaxis{suffix}.title.text"] = _title(figure, _PANELS[number][1]).removeprefix(
            "change of "
        )
        changes[f"xaxis{suffix}.domain"] = [0, 1]
        changes[f"yaxis{suffix}.domain"] = [top - 0.28, top]
        changes[f"yaxis{suffix}.showticklabels"] = True
    return changes


def _bars(figure: AblationFigure, kind: int, number: str, *, name: str, legend: bool) -> go.Bar:
    effects = [(step.alone, step.on_top, step.pairs)[kind] for step in figure.steps]
    values = [_middle(effect, number) for effect in effects]
    predicted = [
        number == "saved_share" and isinstance(e, Effect) and e.is_predicted for e in effects
    ]
    return go.Bar(
        x=[None if value is None else 100 * value for value in values],
        y=list(range(len(effects))),
        orientation="h",
        text=[
            _zero_label(value, is_predicted)
            for value, is_predicted in zip(values, predicted, strict=True)
        ],
        textposition="outside",
        cliponaxis=False,
        name=name,
        legendgroup=name,
        showlegend=legend,
        error_x=_whiskers(effects, number),
        marker={
            "color": style.PALETTE[kind],
            "pattern": {
                "shape": ["/" if is_predicted else "" for is_predicted in predicted],
                "fillmode": "overlay",
                "size": 6,
            },
        },
        customdata=[figure.terms.worded(_hover(row, kind)) for row in figure.rows],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _zero_label(value: float | None, is_predicted: bool) -> str:
    """Returns the text instead of a bar that is too small to be seen."""
    if value is None or abs(value) >= _ZERO:
        return ""
    text = format_percent(value, digits=2)
    return f"{text} predicted" if is_predicted else text


def _middle(effect: Effect | Pairs | str, number: str) -> float | None:
    if isinstance(effect, str):
        return None
    found: float | Range | None = getattr(effect, number)
    return found.median if isinstance(found, Range) else found


def _whiskers(effects: Sequence[Effect | Pairs | str], number: str) -> dict[str, object] | None:
    """Returns error bars in percent: the spread of one effect, or the range over pairs."""
    up, down = [], []
    for effect in effects:
        above = below = 0.0
        if isinstance(effect, Pairs) and (found := getattr(effect, number)) is not None:
            above, below = found.highest - found.median, found.median - found.lowest
        elif isinstance(effect, Effect) and number != "saved_share":
            above = below = getattr(effect, number.replace("share", "spread")) or 0.0
        up.append(100 * above)
        down.append(100 * below)
    if not any(up) and not any(down):
        return None
    return {
        "array": [size or None for size in up],
        "arrayminus": [size or None for size in down],
        "symmetric": False,
        "thickness": 1,
        "width": 2,
        "color": style.GREY,
    }


def _hover(row: Row, kind: int) -> str:
    cells = row.cells[kind]
    lines = [f"<b>{style.wrapped(row.words, width=40)}</b>, {cells.how} ({cells.source})"]
    lines += [f"memory: {cells.memory}, {cells.memory_share}"] if cells.memory_share else []
    lines += [f"speed: {cells.speed}"] if cells.speed else []
    lines += [f"perplexity: {cells.perplexity}"] if cells.perplexity else []
    return "<br>".join(lines)
