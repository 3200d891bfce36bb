"""A study's result as HTML for the output of a notebook's cell: the pick, the front, the trials."""

from collections.abc import Iterable, Iterator, Sequence

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

_CONFIGURATION = 1
"""Column of the configuration, which, like the last one, holds words that may be folded."""


def result_html(result: StudyResult) -> str:
    """Returns the pick with its reason, the front and all trials."""
    shown = [result.trial(number) for number in result.front]
    baseline = [record for record in result.trials if record.number == result.baseline]
    shown += [record for record in baseline if record not in shown]
    cap = format_size(result.cap_bytes)
    parts = [
        f"<p><b>{html_text(result.study)}</b>: {html_text(about(result))}, cap {cap}. "
        f"{outcome_counts(result.trials)}.</p>",
        f"<p><b>{html_text(answer_of(result))}</b></p>",
    ]
    if shown:
        parts += [f"<p>Front under {cap}, and the baseline</p>", _table(result, shown)]
    if any(record not in shown for record in result.trials):
        parts.append(_all_trials(result))
    parts += [f"<p><small>{note}</small></p>" for note in perplexity_notes(result.trials)]
    return f"<div>{''.join(parts)}</div>"


def trials_table(
    records: Sequence[TrialRecord],
    marks: Sequence[str],
    *,
    is_cuda: bool,
    first: BeforeTraining | None = None,
) -> str:
    """Returns a row for each trial after the `first`; `marks` are the texts of the last column."""
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
