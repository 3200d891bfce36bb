"""Comparison of several studies: fronts in one figure, picks in one table, and what differs."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import plotly.graph_objects as go

from autotune.errors import InvalidInput
from autotune.reporting import style
from autotune.reporting.columns import BLANK, text_or_blank
from autotune.reporting.figures.axes import capped_axis, make_axis
from autotune.reporting.study_view import StudyView
from autotune.reporting.trial_text import (
    format_perplexity,
    format_speed,
    full_hover,
    no_pick_reason,
    trial_label,
)
from autotune.spec.result import TrialRecord
from autotune.spec.script_files import files_of
from autotune.spec.terms import ROWS, TOKENS, Terms
from autotune.units import format_percent, format_size

INCOMPARABLE = "perplexities and speeds cannot be compared"


@dataclass(frozen=True, kw_only=True)
class TrialOnFront:
    """One trial of a front; memory in the unit of the figure."""

    number: int
    memory: float
    tokens_per_second: float
    hover: str


@dataclass(frozen=True, kw_only=True)
class Side:
    """One study and its result. Fields are None without a pick, or without a baseline."""

    study: str
    device: str
    torch: str
    cap_bytes: int
    workload: str
    trials: int
    front: tuple[TrialOnFront, ...]
    pick: int | None
    pick_words: str
    """The configuration of the pick, or why there is none."""
    peak_memory_bytes: int | None
    tokens_per_second: float | None
    tokens_per_second_spread: float | None
    perplexity: float | None
    perplexity_words: str
    """With its spread, and a mark if it was measured in another trial."""
    saved_share: float | None
    """Share of the peak memory of its baseline, which may be predicted."""
    baseline_is_predicted: bool
    devices: int
    """Devices of one trial."""
    communication_share: float | None = None
    """Of a profiled step of the pick on several devices, the share with collectives in flight."""
    speedup: float | None = None
    """Tokens per second of the pick, relative to that of the study with the fewest devices; None
    unless the studies differ in the number of devices and in nothing that changes speeds."""
    scaling_efficiency: float | None = None
    """`speedup` over the ratio of devices: 1 where twice as many are twice as fast."""

    @property
    def pick_text(self) -> str:
        return self.pick_words if self.pick is None else f"#{self.pick} {self.pick_words}"

    @property
    def cap_text(self) -> str:
        return format_size(self.cap_bytes)

    @property
    def peak_text(self) -> str:
        return text_or_blank(self.peak_memory_bytes, format_size)

    @property
    def speed_text(self) -> str:
        return format_speed(self.tokens_per_second, self.tokens_per_second_spread) or BLANK

    @property
    def saved_text(self) -> str:
        """How much less memory the pick needs than the baseline of its study."""
        if self.saved_share is None:
            return BLANK
        predicted = " (predicted)" if self.baseline_is_predicted else ""
        return f"{format_percent(self.saved_share)} %{predicted}"

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready dictionary, with the front as trial numbers."""
        return {**dataclasses.asdict(self), "front": [point.number for point in self.front]}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    sides: tuple[Side, ...]
    unit: style.Unit
    memory_is: str
    scaling: tuple[str, ...]
    """A sentence for each study with more devices than another: what they gain."""
    differences: tuple[str, ...]
    """One sentence each."""
    terms: Terms
    """The words of the studies; where they differ, those for tokens."""
    workloads_differ: bool


def compute(views: Sequence[StudyView]) -> Comparison:
    """Compare studies. Raises InvalidInput for fewer than two, and for one study twice."""
    names = [view.result.study for view in views]
    hint = "name at least two different studies; autotune studies lists them"
    if len(set(names)) < len(names):
        raise InvalidInput(
            f"{' and '.join(dict.fromkeys(names))} cannot be compared with itself", hint=hint
        )
    if len(names) < 2:
        named = names[0] if names else "no study"
        raise InvalidInput(f"{named} alone cannot be compared", hint=hint)
    unit = style.unit_for(max(_largest(view) for view in views))
    axes = {capped_axis(view.result.device.type) for view in views}
    if len(axes) == 1:
        memory_is = make_axis(axes.pop(), unit=unit).title
    else:
        memory_is = f"memory compared with the cap, {unit.name}"
    sides = [_side(view, unit) for view in views]
    workloads = {view.definition.workload.on_devices(1).fingerprint for view in views}
    if len(workloads) == 1 and len({view.result.device.name for view in views}) == 1:
        sides = _scaled(sides)
    return Comparison(
        sides=tuple(sides),
        unit=unit,
        memory_is=memory_is,
        scaling=tuple(_scaling(sides)),
        differences=tuple(_differences(views)),
        terms=ROWS if all(view.result.terms == ROWS for view in views) else TOKENS,
        workloads_differ=len(workloads) > 1,
    )


def _scaled(sides: Sequence[Side]) -> list[Side]:
    """Returns the sides with their speedup, where they have different numbers of devices."""
    picked = [side for side in sides if side.tokens_per_second]
    fewest = min(picked, key=lambda side: side.devices, default=None)
    if fewest is None or len({side.devices for side in picked}) == 1:
        return list(sides)
    scaled = []
    for side in sides:
        if side.tokens_per_second and fewest.tokens_per_second:
            speedup = side.tokens_per_second / fewest.tokens_per_second
            efficiency = speedup * fewest.devices / side.devices
            side = dataclasses.replace(side, speedup=speedup, scaling_efficiency=efficiency)
        scaled.append(side)
    return scaled


def _scaling(sides: Sequence[Side]) -> Iterator[str]:
    picked = [side for side in sides if side.speedup is not None]
    fewest = min(picked, key=lambda side: side.devices, default=None)
    for side in picked:
        if fewest is None or side.devices == fewest.devices:
            continue
        efficiency = format_percent(side.scaling_efficiency or 0.0)
        collectives = ""
        if side.communication_share is not None:
            share = format_percent(side.communication_share)
            collectives = f"; {share} % of a profiled step is in collectives"
            if fewest.communication_share is not None:
                collectives += (
                    f", with {fewest.devices} {format_percent(fewest.communication_share)} %"
                )
        yield (
            f"{side.study}: {side.devices} devices train {side.speedup:.2f} times as fast as "
            f"{fewest.devices} (scaling efficiency {efficiency} %), with "
            f"{format_size(side.peak_memory_bytes or 0)} on each instead of "
            f"{format_size(fewest.peak_memory_bytes or 0)}{collectives}."
        )


def _largest(view: StudyView) -> int:
    front = (view.result.trial(number).device_bytes or 0 for number in view.result.front)
    return max(front, default=view.result.cap_bytes)


def _side(view: StudyView, unit: style.Unit) -> Side:
    result, pick, baseline = view.result, view.pick, view.baseline
    peak = None if pick is None else pick.peak_memory_bytes
    baseline_peak = None
    if baseline is not None:
        baseline_peak = baseline.peak_memory_bytes or baseline.predicted_peak_memory_bytes
    return Side(
        study=result.study,
        device=result.device.describe(
            devices=result.workload.devices_per_trial, nodes=result.workload.nodes_per_trial
        ),
        torch=result.device.versions.get("torch", "?"),
        cap_bytes=result.cap_bytes,
        workload=f"{result.workload.describe(counted=result.terms.counted)}, "
        f"{result.workload.steps} steps",
        trials=len(result.trials),
        front=tuple(_point(view, result.trial(number), unit) for number in result.front),
        pick=None if pick is None else pick.number,
        pick_words=no_pick_reason(result) if pick is None else trial_label(pick),
        peak_memory_bytes=peak,
        tokens_per_second=None if pick is None else pick.tokens_per_second,
        tokens_per_second_spread=None if pick is None else pick.tokens_per_second_spread,
        perplexity=None if pick is None else pick.perplexity,
        perplexity_words="" if pick is None else format_perplexity(pick),
        saved_share=1 - peak / baseline_peak if peak and baseline_peak else None,
        baseline_is_predicted=baseline is not None and baseline.peak_memory_bytes is None,
        devices=result.workload.devices_per_trial,
        communication_share=None if pick is None else pick.communication_share,
    )


def _point(view: StudyView, record: TrialRecord, unit: style.Unit) -> TrialOnFront:
    axis = make_axis(capped_axis(view.result.device.type), unit=unit)
    study = style.wrapped(view.result.study, width=40)
    return TrialOnFront(
        number=record.number,
        memory=axis.of(record) or 0.0,
        tokens_per_second=record.tokens_per_second or 0.0,
        hover=f"<i>{study}</i><br>{full_hover(record, view.baseline)}",
    )


def _differences(views: Sequence[StudyView]) -> Iterator[str]:
    # The global batch is the same on any number of devices, so that they can be compared.
    workloads = [_flat(view.definition.workload.on_devices(1).to_dict()) for view in views]
    for workload, known in zip(workloads, _files(views), strict=True):
        workload |= known
    fields = dict.fromkeys(name for workload in workloads for name in workload)
    parts = []
    for name in fields:
        if len({str(workload.get(name)) for workload in workloads}) > 1:
            values = " / ".join(_short(workload.get(name)) for workload in workloads)
            parts.append(f"{_field_name(name)} {values}")
    if parts:
        yield f"The workloads differ, so {INCOMPARABLE}: {', '.join(parts)}."
    settings: list[tuple[str, list[str]]] = [
        ("device", [f"{view.result.device.type} ({view.result.device.name})" for view in views]),
        ("cap", [format_size(view.result.cap_bytes) for view in views]),
        ("search space", [view.definition.space.name for view in views]),
        ("sampler", [view.definition.sampler for view in views]),
        (
            "number of devices",
            [str(view.definition.workload.devices_per_trial) for view in views],
        ),
        (
            "number of nodes",
            [str(view.definition.workload.nodes_per_trial) for view in views],
        ),
    ]
    for package in views[0].result.device.versions:
        versions = [view.result.device.versions.get(package, "") for view in views]
        if all(versions):  # a study of an earlier release does not know all of them
            settings.append((package, versions))
    for what, of_studies in settings:
        if len(set(of_studies)) > 1:
            yield f"Different {what}: {' / '.join(of_studies)}."


def _files(views: Sequence[StudyView]) -> Iterator[dict[str, str]]:
    """Yield {`file` with its path: SHA-256} of each study, for files that they may differ in.

    Data, and what trials have read late, is among them only where each study knows it.
    """
    workloads = [view.definition.workload for view in views]
    by_study = [files_of(workload) for workload in workloads]
    known_to_all = set(by_study[0]).intersection(*by_study)
    for workload, files in zip(workloads, by_study, strict=True):
        names = known_to_all | (workload.script_files or {}).keys()
        yield {f"file {name}": files[name] for name in sorted(names)}


def _flat(workload: Mapping[str, Any]) -> dict[str, Any]:
    """Replace nested dictionaries by their entries.

    Of a whole dictionary only the beginning could be shown, which may be the same in all studies.
    """
    flat: dict[str, Any] = {}
    for name, value in workload.items():
        if name in ("script_files", "script_files_after_apply"):
            continue  # `_files` has them
        if isinstance(value, Mapping):
            flat |= {f"{name} {key}": entry for key, entry in value.items()}
        else:
            flat[name] = value
    return flat


def _field_name(field: str) -> str:
    if field.startswith("file "):
        return field
    return {"text_sha256": "text", "model_sha256": "file of the model"}.get(
        field, field.replace("_", " ")
    )


def _short(value: object) -> str:
    text = "none" if value in (None, "") else str(value)
    return text if len(text) <= 24 else f"{text[:12]}…"


# -- drawing ---------------------------------------------------------------------------------------


def draw(comparison: Comparison) -> go.Figure:
    """Draw each front with its own colour, symbol and dash, the picks as stars, caps as lines."""
    drawing = style.styled(go.Figure(), note=" ".join(comparison.differences))
    caps = {side.cap_bytes for side in comparison.sides}
    for index, side in enumerate(comparison.sides):
        color = style.PALETTE[index % len(style.PALETTE)]
        dash = style.DASHES[index % len(style.DASHES)]
        name = style.wrapped(side.study, width=40)
        drawing.add_trace(_line(side.front, name=name, color=color, dash=dash))
        drawing.add_trace(
            go.Scatter(
                x=[point.memory for point in side.front],
                y=[point.tokens_per_second for point in side.front],
                mode="markers",
                name=name,
                legendgroup=name,
                marker={
                    "symbol": style.SYMBOLS[index % len(style.SYMBOLS)],
                    "size": 10,
                    "color": color,
                },
                customdata=[point.hover for point in side.front],
                hovertemplate="%{customdata}<extra></extra>",
            )
        )
        drawing.add_trace(
            _star(
                [point for point in side.front if point.number == side.pick], name=name, color=color
            )
        )
        if len(caps) > 1 or index == 0:
            _draw_cap(
                drawing, comparison.unit, side, color=color if len(caps) > 1 else style.VERMILLION
            )
    drawing.update_layout(
        xaxis={"title": comparison.memory_is, "rangemode": "tozero"},
        yaxis={"title": comparison.terms.speed_in_words, "rangemode": "tozero"},
        legend=style.LEGEND_ABOVE,
    )
    return drawing


def _line(front: Sequence[TrialOnFront], *, name: str, color: str, dash: str) -> go.Scatter:
    """Returns a stepped line through the fastest trials by memory.

    Trials that are on the front for their perplexity lie below it.
    """
    by_memory = sorted(front, key=lambda point: point.memory)
    fastest = accumulate((point.tokens_per_second for point in by_memory), max)
    return go.Scatter(
        x=[point.memory for point in by_memory],
        y=list(fastest),
        mode="lines",
        name=f"line of {name}",
        legendgroup=name,
        showlegend=False,
        line={"color": color, "dash": dash, "width": 1.5, "shape": "hv"},
        hoverinfo="skip",
    )


def _star(points: Sequence[TrialOnFront], *, name: str, color: str) -> go.Scatter:
    return go.Scatter(
        x=[point.memory for point in points],
        y=[point.tokens_per_second for point in points],
        mode="markers",
        name=f"pick of {name}",
        legendgroup=name,
        marker={
            "symbol": "star",
            "size": 20,
            "color": color,
            "line": {"width": 1, "color": style.GREY},
        },
        hoverinfo="skip",
    )


def _draw_cap(drawing: go.Figure, unit: style.Unit, side: Side, *, color: str) -> None:
    drawing.add_vline(
        x=unit.of(side.cap_bytes), line={"color": color, "dash": "dash", "width": 1.5}
    )
    drawing.add_annotation(
        x=unit.of(side.cap_bytes),
        y=1,
        yref="paper",
        text=f"cap {format_size(side.cap_bytes)}",
        showarrow=False,
        xanchor="right",
        yanchor="top",
        textangle=-90,
    )
