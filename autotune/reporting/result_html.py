"""A study's result as HTML for the output of a notebook's cell: the pick, the front, the trials.

The figure is plain SVG, a few kilobytes that need no script, so that it is still drawn in a
notebook that is only read. It takes its colours from the page, in light and in dark themes.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from autotune.reporting import style
from autotune.reporting.figures.axes import Axis, capped_axis, make_axis, memory_unit
from autotune.reporting.html_text import html_text
from autotune.reporting.outcomes import outcome_counts, outcome_label
from autotune.reporting.trial_text import (
    BEFORE_TRAINING,
    BeforeTraining,
    about,
    answer_of,
    before_training,
    confirmed_mark,
    format_perplexity,
    format_speed,
    perplexity_notes,
    perplexity_warning,
    trial_label,
)
from autotune.spec.result import StudyResult, TrialRecord
from autotune.units import format_size

MOST_ROWS = 200
"""A table of more trials makes a notebook slow; `show` and `to_pandas` have all of them."""

_WIDTH, _HEIGHT = 680, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 16, 14, 44
_TICKS = 5
_CONFIGURATION = 1
"""Column of the configuration, which, like the last one, holds words that may be folded."""
_LABELLED = 12
"""Numbers at more marks than this would hide each other."""
_ROOM = 1.06
"""The axes end this factor beyond the largest value."""


def result_html(result: StudyResult) -> str:
    """Return the pick with its reason, the front as a figure and a table, and all trials."""
    shown = [result.trial(number) for number in result.front]
    baseline = [record for record in result.trials if record.number == result.baseline]
    shown += [record for record in baseline if record not in shown]
    cap = format_size(result.cap_bytes)
    parts = [
        f"<p><b>{html_text(result.study)}</b>: {html_text(about(result))}, cap {cap}. "
        f"{outcome_counts(result.trials)}.</p>",
        f"<p><b>{html_text(answer_of(result))}</b></p>",
        front_svg(result),
    ]
    if shown:
        parts += [f"<p>Front under {cap}, and the baseline</p>", _table(result, shown)]
    if any(record not in shown for record in result.trials):
        parts.append(_all_trials(result))
    parts += [f"<p><small>{note}</small></p>" for note in perplexity_notes(result.trials)]
    return f"<div>{''.join(parts)}</div>"


# -- tables ----------------------------------------------------------------------------------------


def trials_table(
    records: Sequence[TrialRecord],
    marks: Sequence[str],
    *,
    is_cuda: bool,
    first: BeforeTraining | None = None,
) -> str:
    """Return one row for each trial after the `first`; `marks` are the texts of the last column."""
    device = ["on device"] if is_cuda else []
    heads = ["#", "configuration", "peak memory", *device, "tokens/s", "perplexity", ""]
    rows = "".join(
        _row(_cells(record, mark, is_cuda=is_cuda))
        for record, mark in zip(records, marks, strict=True)
    )
    if first is not None:
        known = {"configuration": BEFORE_TRAINING, "perplexity": first.perplexity, "": first.remark}
        rows = _row(known.get(head, "") for head in heads) + rows
    return f"<table><thead>{_row(heads, tag='th')}</thead><tbody>{rows}</tbody></table>"


def _table(result: StudyResult, records: Sequence[TrialRecord]) -> str:
    marks = [", ".join(_marks(result, record)) for record in records]
    is_cuda = result.device.type == "cuda"
    return trials_table(records, marks, is_cuda=is_cuda, first=before_training(result))


def _all_trials(result: StudyResult) -> str:
    records = result.trials[:MOST_ROWS]
    title = "All trials"
    if len(records) < len(result.trials):
        title = f"The first {len(records)} of {len(result.trials):,} trials"
    return f"<details><summary>{title}</summary>{_table(result, records)}</details>"


def _row(cells: Iterable[str], *, tag: str = "td") -> str:
    texts, aligned = list(cells), []
    for place, text in enumerate(texts):
        look = "text-align: right; white-space: nowrap"
        if place in (_CONFIGURATION, len(texts) - 1):
            look = "text-align: left"
        aligned.append(f'<{tag} style="{look}">{html_text(text)}</{tag}>')
    return f"<tr>{''.join(aligned)}</tr>"


def _cells(record: TrialRecord, mark: str, *, is_cuda: bool) -> Iterator[str]:
    yield str(record.number)
    yield trial_label(record)
    yield _size(record.peak_memory_bytes)
    if is_cuda:
        yield _size(record.device_bytes)
    yield format_speed(record.tokens_per_second, record.tokens_per_second_spread)
    yield format_perplexity(record)
    yield mark


def _marks(result: StudyResult, record: TrialRecord) -> Iterator[str]:
    if result.pick is not None and record.number == result.pick.number:
        yield "pick"
    if record.number in result.front:
        yield "front"
    if record.number == result.baseline:
        yield "baseline"
    if record.outcome != "ok":
        yield outcome_label(record)
    if mark := confirmed_mark(record):
        yield mark
    if record.reused_from:
        yield f"from {record.reused_from}"
    if warning := perplexity_warning(result, record):
        yield f"perplexity: {warning}"


def _size(size_bytes: int | None) -> str:
    return "" if size_bytes is None else format_size(size_bytes)


# -- the figure ------------------------------------------------------------------------------------


def front_svg(result: StudyResult) -> str:
    """Return memory against speed with the cap, front, pick and baseline; empty without a speed."""
    unit = memory_unit(result.trials, cap_bytes=result.cap_bytes)
    x, y = make_axis(capped_axis(result.device.type), unit=unit), make_axis("speed", unit=unit)
    points = [
        (across, up, record)
        for record in result.trials
        if (across := x.of(record)) is not None and (up := y.of(record)) is not None
    ]
    if not points:
        return ""
    cap = unit.of(result.cap_bytes)
    largest_x = _ROOM * max([cap, *(across for across, _, _ in points)])
    largest_y = _ROOM * max(up for _, up, _ in points)

    def at_x(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / largest_x

    def at_y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / largest_y

    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    shapes = [
        *_vertical_lines(x, largest_x, at_x),
        *_horizontal_lines(y, largest_y, at_y),
        f'<rect x="{at_x(cap):.1f}" y="{_TOP}" width="{right - at_x(cap):.1f}" '
        f'height="{bottom - _TOP}" fill="{style.VERMILLION}" opacity="0.09"/>',
        f'<line x1="{at_x(cap):.1f}" x2="{at_x(cap):.1f}" y1="{_TOP}" y2="{bottom}" '
        f'stroke="{style.VERMILLION}" stroke-width="1.5" stroke-dasharray="6 4"/>',
        _cap_label(at_x(cap), f"cap {format_size(result.cap_bytes)}"),
    ]
    # The front last, so that nothing hides it.
    points.sort(key=lambda point: point[2].number in result.front)
    for across, up, record in points:
        shapes += _mark(result, record, at_x(across), at_y(up))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" style="max-width: 100%" '
        'role="img" font-family="sans-serif" font-size="11" xmlns="http://www.w3.org/2000/svg">'
        f"<title>Memory against speed</title>{''.join(shapes)}</svg>"
    )


def _cap_label(x: float, text: str) -> str:
    if x < _WIDTH / 3:
        return _text(x + 5, _TOP + 11, text, anchor="start")
    return _text(x - 5, _TOP + 11, text, anchor="end")


def _vertical_lines(axis: Axis, largest: float, at: Callable[[float], float]) -> Iterator[str]:
    bottom = _HEIGHT - _BOTTOM
    for value in _ticks(largest):
        yield _grid(x1=at(value), x2=at(value), y1=_TOP, y2=bottom)
        yield _text(at(value), bottom + 15, f"{value:,g}", anchor="middle")
    yield _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, axis.title, anchor="middle")


def _horizontal_lines(axis: Axis, largest: float, at: Callable[[float], float]) -> Iterator[str]:
    for value in _ticks(largest):
        yield _grid(x1=_LEFT, x2=_WIDTH - _RIGHT, y1=at(value), y2=at(value))
        yield _text(_LEFT - 6, at(value) + 4, f"{value:,g}", anchor="end")
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    yield (
        f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle" '
        f'fill="currentColor">{html_text(axis.title)}</text>'
    )


def _ticks(largest: float) -> list[float]:
    """Return round values from 0 to `largest`, at most one more than `_TICKS`."""
    power = 10.0 ** math.floor(math.log10(largest / _TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if largest <= power * factor * _TICKS)
    return [step * place for place in range(math.floor(largest / step) + 1)]


def _grid(*, x1: float, x2: float, y1: float, y2: float) -> str:
    return (
        f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" '
        'stroke="currentColor" opacity="0.15"/>'
    )


def _text(x: float, y: float, text: str, *, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor">'
        f"{html_text(text)}</text>"
    )


def _mark(result: StudyResult, record: TrialRecord, x: float, y: float) -> Iterator[str]:
    """Yield the shapes of a trial: filled on the front, a ring if feasible, grey otherwise."""
    is_pick = result.pick is not None and record.number == result.pick.number
    is_on_front = record.number in result.front
    look = f'r="4" fill="{style.GREY}" opacity="0.6"'
    if is_pick:
        look = f'r="8" fill="{style.VERMILLION}"'
    elif is_on_front:
        look = f'r="6" fill="{style.BLUE}"'
    elif record.is_within_cap:
        look = f'r="5" fill="none" stroke="{style.BLUE}" stroke-width="1.5"'
    marks = ", ".join(_marks(result, record))
    speed = format_speed(record.tokens_per_second, record.tokens_per_second_spread)
    words = [
        f"#{record.number} {trial_label(record)}",
        _size(record.peak_memory_bytes),
        f"{speed} tokens/s",
        f"perplexity {format_perplexity(record) or '-'}",
        marks,
    ]
    hover = html_text("\n".join(filter(None, words)))
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" {look}><title>{hover}</title></circle>'
    name = f"#{record.number}"
    if is_pick:
        name += " pick"
    if record.number == result.baseline:
        name += " baseline"
    is_labelled = is_on_front and len(result.front) <= _LABELLED
    if is_labelled or is_pick or record.number == result.baseline:
        yield _text(x, y - 11, name, anchor="middle")
