"""The table of trials: what each column is called and says, and the rows with marks and remarks.

A column stands here once. The terminal (`cli/tables.py`), every page and notebook
(`templates/trials.html`), Markdown and CSV (`plain_tables.py`) write the same columns; how wide a
cell is and where a text is folded is theirs to decide.
"""

import math
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from autotune.analysis.reasons import left_in_16_bits
from autotune.reporting.outcomes import outcome_label, outcome_reason
from autotune.reporting.trial_text import (
    format_perplexity,
    format_speed,
    format_utilization,
    perplexity_notes,
    perplexity_remarks,
    trial_label,
)
from autotune.spec.result import Pick, StudyResult, TrialRecord
from autotune.spec.terms import Terms
from autotune.units import format_decimal, format_duration, format_size

T = TypeVar("T")

BLANK = "-"
"""Stands where there is no value."""
MARKS = ("front", "pick", "baseline")
"""What a trial can be in its study; the JSON has these as numbers of trials."""
PREDICTIONS = ("predicted_peak_memory_bytes", "predicted_to_measured")
"""Optional columns: the predicted peak, and its ratio to the measured one."""
ON_PAGES = ("predicted_peak_memory_bytes", "seconds")
"""Optional columns of the table of all trials on a page."""


def text_or_blank(value: T | None, form: Callable[[T], str]) -> str:
    """Returns the text of a value, or the blank of a value that is not known."""
    return BLANK if value is None else form(value)


class StudyOfTrials(Protocol):
    """What a table has to know of the study of its trials: of a result, or of one that runs."""

    @property
    def is_cuda(self) -> bool: ...
    @property
    def front(self) -> tuple[int, ...]: ...
    @property
    def pick(self) -> Pick | None: ...
    @property
    def baseline(self) -> int | None: ...
    @property
    def terms(self) -> Terms: ...
    @property
    def initial_perplexity(self) -> float | None: ...
    @property
    def initial_perplexity_remark(self) -> str: ...


def _every_table(study: StudyOfTrials, records: Sequence[TrialRecord]) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the table of trials."""

    key: str
    """Its name in addresses and in CSV: where it is a field of the record, that field's."""
    title: str
    short_title: str = ""
    """The title where there is little room, if it is another one."""
    text: Callable[[StudyOfTrials, TrialRecord], str]
    """Returns what it says of a trial; empty where that is not known."""
    computed: Callable[[TrialRecord], Any] | None = None
    """Returns what a table is sorted by, where that is not the field of the record."""
    is_number: bool = True
    on_phones: bool = True
    """Whether a phone and a narrow terminal have it as well."""
    is_optional: bool = False
    """Whether only tables that ask for it have it."""
    has_values: Callable[[StudyOfTrials, Sequence[TrialRecord]], bool] = _every_table
    """Returns whether any of the trials has something to say here."""

    def value(self, record: TrialRecord) -> Any:
        """Returns what a table is sorted by; None where it is not known or not finite."""
        value = getattr(record, self.key) if self.computed is None else self.computed(record)
        return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_cuda(study: StudyOfTrials, records: Sequence[TrialRecord]) -> bool:
    return study.is_cuda


def _has_predictions(study: StudyOfTrials, records: Sequence[TrialRecord]) -> bool:
    return any(record.predicted_peak_memory_bytes for record in records)


def _has_utilization(study: StudyOfTrials, records: Sequence[TrialRecord]) -> bool:
    return any(record.model_flops_utilization is not None for record in records)


def _peak_text(study: StudyOfTrials, record: TrialRecord) -> str:
    """Returns the measured peak; of the baseline, to which savings are relative, or the predicted.

    The baseline may not fit on the device.
    """
    if record.peak_memory_bytes is not None:
        return format_size(record.peak_memory_bytes)
    if record.number == study.baseline and record.predicted_peak_memory_bytes:
        return f"{format_size(record.predicted_peak_memory_bytes)} predicted"
    return ""


def _size_text(size_bytes: int | None) -> str:
    return "" if size_bytes is None else format_size(size_bytes)


def _predicted_to_measured(record: TrialRecord) -> float | None:
    if not record.peak_memory_bytes or not record.predicted_peak_memory_bytes:
        return None
    return record.predicted_peak_memory_bytes / record.peak_memory_bytes


def _ratio_text(record: TrialRecord) -> str:
    ratio = _predicted_to_measured(record)
    return "" if ratio is None else f"{ratio:.4f}"


def _label_in_lower_case(record: TrialRecord) -> str:
    return trial_label(record).lower()


COLUMNS = (
    Column(key="number", title="trial", text=lambda _, record: str(record.number)),
    Column(
        key="name",
        title="configuration",
        text=lambda _, record: trial_label(record),
        computed=_label_in_lower_case,
        is_number=False,
    ),
    Column(
        key="peak_memory_bytes",
        title="peak memory",
        short_title="peak",
        text=_peak_text,
    ),
    Column(
        key="predicted_peak_memory_bytes",
        title="predicted",
        text=lambda _, record: _size_text(record.predicted_peak_memory_bytes),
        on_phones=False,
        is_optional=True,
        has_values=_has_predictions,
    ),
    Column(
        key="predicted_to_measured",
        title="ratio",
        text=lambda _, record: _ratio_text(record),
        computed=_predicted_to_measured,
        on_phones=False,
        is_optional=True,
        has_values=_has_predictions,
    ),
    Column(
        key="device_bytes",
        title="on device",
        text=lambda _, record: _size_text(record.device_bytes),
        has_values=_is_cuda,
    ),
    Column(
        key="tokens_per_second",
        title="tokens/s",
        text=lambda _, record: format_speed(
            record.tokens_per_second, record.tokens_per_second_spread
        ),
    ),
    Column(
        key="model_flops_utilization",
        title="MFU",
        text=lambda _, record: format_utilization(record),
        on_phones=False,
        has_values=_has_utilization,
    ),
    Column(
        key="perplexity",
        title="perplexity",
        short_title="perpl.",
        text=lambda _, record: format_perplexity(record),
    ),
    Column(
        key="outcome",
        title="it is",
        text=lambda study, record: ", ".join(_marks(study, record)),
        computed=outcome_label,
        is_number=False,
    ),
    Column(
        key="seconds",
        title="took",
        text=lambda _, record: "" if record.seconds is None else format_duration(record.seconds),
        on_phones=False,
        is_optional=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table: a trial, or what pretrained weights do before any training."""

    record: TrialRecord | None
    """None for the row before training."""
    name: str
    words: str
    """The configuration."""
    texts: Mapping[str, str]
    """The cell of each column, by its key."""
    marks: tuple[str, ...]
    """pick, front, baseline, how often it was confirmed, and an outcome that is not ok."""
    remarks: tuple[str, ...]
    """Sentences on where its numbers come from, or why it has none."""
    is_pick: bool


@dataclass(frozen=True, kw_only=True)
class TrialTable:
    """Rows of trials under the columns for which they have something to say."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    """What explains the marks at perplexities."""


def trial_table(
    study: StudyOfTrials,
    records: Sequence[TrialRecord],
    *,
    optional: Collection[str] = (),
    with_before_training: bool = False,
) -> TrialTable:
    """Returns the table of these trials, with the `optional` columns of these keys.

    `with_before_training` adds a first row with the perplexity of pretrained weights, for a study
    that has such weights.
    """
    columns = tuple(
        _in_terms(column, study.terms)
        for column in COLUMNS
        if (not column.is_optional or column.key in optional) and column.has_values(study, records)
    )
    rows = [_row(study, record, columns) for record in records]
    if with_before_training:
        rows[:0] = _rows_before_training(study, columns)
    return TrialTable(columns=columns, rows=tuple(rows), notes=tuple(perplexity_notes(records)))


def _in_terms(column: Column, terms: Terms) -> Column:
    """Returns the column with the title that its quantity has in this study."""
    short = terms.short_quality if column.key == "perplexity" else column.short_title
    return replace(column, title=terms.worded(column.title), short_title=short)


def front_records(result: StudyResult) -> tuple[TrialRecord, ...]:
    """Returns the trials of the front, sorted by memory, and the baseline if it is not on it."""
    front = [result.trial(number) for number in result.front]
    baseline = baseline_of(result)
    if baseline is not None and baseline not in front:
        front.append(baseline)
    return tuple(front)


def front_title(result: StudyResult) -> str:
    """Returns the title of the table of `front_records`."""
    return f"Front under {format_size(result.cap_bytes)}, and the baseline"


def baseline_of(result: StudyResult) -> TrialRecord | None:
    """Returns the record of the baseline; None where the study has none."""
    return next((record for record in result.trials if record.number == result.baseline), None)


def _row(study: StudyOfTrials, record: TrialRecord, columns: Sequence[Column]) -> Row:
    return Row(
        record=record,
        name=record.name or "",
        words=record.config.describe(),
        texts={column.key: column.text(study, record) or BLANK for column in columns},
        marks=_marks(study, record),
        remarks=tuple(_remarks(study, record)),
        is_pick=_is_pick(study, record),
    )


BEFORE_TRAINING = "before training"
"""Stands in the row before training where trials have their configuration."""
_LONGEST_REASON = 100
"""Characters; the log of the study has the rest."""


def _rows_before_training(study: StudyOfTrials, columns: Sequence[Column]) -> Iterator[Row]:
    """Yields the row before training; nothing for a study without pretrained weights."""
    perplexity, remark = study.initial_perplexity, study.initial_perplexity_remark
    if perplexity is None and not remark:
        return
    if perplexity is None:
        reason = f"not measured: {remark}"
        remark = textwrap.shorten(reason, width=_LONGEST_REASON, placeholder="…")
    known = {"name": BEFORE_TRAINING, "perplexity": text_or_blank(perplexity, format_decimal)}
    yield Row(
        record=None,
        name="",
        words=BEFORE_TRAINING,
        texts={column.key: known.get(column.key, "") for column in columns},
        marks=(),
        remarks=(remark,) if remark else (),
        is_pick=False,
    )


def _is_pick(study: StudyOfTrials, record: TrialRecord) -> bool:
    return study.pick is not None and record.number == study.pick.number


def marks_of(study: StudyOfTrials, record: TrialRecord) -> tuple[str, ...]:
    """Returns what a trial is in its study, and how often it was confirmed.

    Its speed and ± are then of all these measurements.
    """
    marks = []
    if _is_pick(study, record):
        marks.append("pick")
    if record.number in study.front:
        marks.append("front")
    if record.number == study.baseline:
        marks.append("baseline")
    if record.confirmations:
        marks.append(f"confirmed {record.confirmations}x")
    return tuple(marks)


def _marks(study: StudyOfTrials, record: TrialRecord) -> tuple[str, ...]:
    marks = marks_of(study, record)
    return marks if record.outcome == "ok" else (*marks, outcome_label(record))


def _remarks(study: StudyOfTrials, record: TrialRecord) -> Iterator[str]:
    if reason := outcome_reason(record):
        yield reason
    if record.compile_seconds is not None:
        yield f"compiled in {record.compile_seconds:.0f} s"
    if left := left_in_16_bits(record.unquantized_share):
        yield left
    if record.reused_from:
        yield f"from {record.reused_from}"
    if remarks := perplexity_remarks(record, study.initial_perplexity):
        yield f"{record.terms.quality}: {remarks}"
