"""All trials as columns of JSON, small enough for a page with ten thousand trials.

Repeated values are stored once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.analysis.reasons import left_in_16_bits
from autotune.reporting.outcomes import OUTCOME_LABELS
from autotune.reporting.study_view import StudyView
from autotune.reporting.trial_text import communication_text
from autotune.spec.config import FIELD_ORDER
from autotune.spec.provenance import PerplexitySource, TrialReference

_PLAIN = (
    "number",
    "peak_memory_bytes",
    "device_bytes",
    "predicted_peak_memory_bytes",
    "tokens_per_second",
    "tokens_per_second_spread",
    "model_flops_utilization",
    "perplexity",
    "perplexity_spread",
    "compile_seconds",
    "seconds",
)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the table on the page; `key` is its name in the JSON of `trial_table`."""

    key: str
    title: str
    is_number: bool = True
    on_phones: bool = True


_COLUMNS = (
    Column(key="number", title="trial", is_number=False),
    Column(key="words", title="configuration", is_number=False),
    Column(key="peak_memory_bytes", title="peak"),
    Column(key="device_bytes", title="on device", on_phones=False),
    Column(key="predicted_peak_memory_bytes", title="predicted", on_phones=False),
    Column(key="tokens_per_second", title="tokens/s"),
    Column(key="model_flops_utilization", title="MFU", on_phones=False),
    Column(key="perplexity", title="perplexity"),
    Column(key="outcome", title="outcome, message", is_number=False),
    Column(key="seconds", title="took", on_phones=False),
)
_REPEATING = (
    "name",
    "outcome",
    "message",
    "perplexity_source",
    "shares_perplexity",
    "peak_phase",
    "parity",
    "parity_message",
    "reused_from",
)
_DIGITS = 7
"""Significant digits: enough for all numbers shown, and for sorting."""


def trial_table(view: StudyView) -> dict[str, Any]:
    """Returns the trials as JSON-ready columns.

    A column is a list with a value for each trial, or an object with the distinct `values` and, in
    `of`, the index of each trial's value.
    """
    result = view.result
    records = result.trials
    return {
        "count": len(records),
        "plain": {name: [_short(getattr(record, name)) for record in records] for name in _PLAIN},
        "repeating": {
            name: _indexed([getattr(record, name) for record in records]) for name in _REPEATING
        },
        "config": {
            name: _indexed([getattr(record.config, name) for record in records])
            for name in FIELD_ORDER
        },
        "words": [record.config.describe() for record in records],
        "outcomes": dict(OUTCOME_LABELS),
        "front": list(result.front),
        "pick": None if result.pick is None else result.pick.number,
        "baseline": result.baseline,
        "peaks_by_rank": {
            record.number: list(record.peak_memory_bytes_by_rank)
            for record in records
            if record.peak_memory_bytes_by_rank
        },
        "communication": {
            record.number: text for record in records if (text := communication_text(record))
        },
        "weights": {
            record.number: text
            for record in records
            if (text := left_in_16_bits(record.unquantized_share))
        },
        "is_cuda": result.device.type == "cuda",
        "has_predictions": any(record.predicted_peak_memory_bytes for record in result.trials),
        "has_utilization": any(record.model_flops_utilization for record in result.trials),
    }


def _indexed(column: Sequence[Any]) -> dict[str, Any]:
    values = list(dict.fromkeys(column))
    index_of = {value: index for index, value in enumerate(values)}
    return {"values": list(map(_text, values)), "of": [index_of[value] for value in column]}


def _text(value: Any) -> Any:
    """Returns the sentence for where a result comes from, and any other value as it is."""
    return str(value) if isinstance(value, PerplexitySource | TrialReference) else value


def _short(value: Any) -> Any:
    """Round a float; one that is not finite becomes null, as in the JSON of a trial."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


def columns_of(table: Mapping[str, Any]) -> tuple[Column, ...]:
    """Returns the columns of the table, without those that no trial of the study has."""
    missing: set[str] = set()
    if not table["is_cuda"]:
        missing.add("device_bytes")
    if not table["has_predictions"]:
        missing.add("predicted_peak_memory_bytes")
    if not table["has_utilization"]:
        missing.add("model_flops_utilization")
    return tuple(column for column in _COLUMNS if column.key not in missing)
