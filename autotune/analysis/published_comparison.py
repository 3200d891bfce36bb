"""Compares a study with the published table of its search space: memory, savings and speed.

Savings and speeds are relative to a control row, in the study and in the table. What was not
measured stays None, and a peak that was only predicted is marked.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.analysis.confirmed_speed import on_one_scale
from autotune.spec.published_table import Figures, Reference
from autotune.spec.result import TrialRecord
from autotune.spec.search_space import SearchSpace
from autotune.spec.study import StudyDefinition
from autotune.spec.workload import Workload

_SIZES = (
    "model",
    "layers",
    "width",
    "heads",
    "feed_forward_width",
    "vocab_size",
    "sequence_length",
    "global_batch",
)
"""The fields of a workload that decide its memory."""


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """One row of the table: the study's numbers, the published ones and how they differ."""

    name: str
    trial: int | None = None
    peak_memory_bytes: int | None = None
    peak_is_predicted: bool = False
    published_peak_memory_bytes: int | None = None
    peak_ratio: float | None = None
    """The study's peak over the published one; None if the two workloads differ in size."""
    saved: float | None = None
    """Share of the control's peak memory that is saved; negative if the row needs more."""
    published_saved: float | None = None
    saved_difference: float | None = None
    speed: float | None = None
    """Tokens per second, relative to the control's."""
    published_speed: float | None = None
    speed_ratio: float | None = None
    perplexity: float | None = None
    published_perplexity: float | None = None
    remark: str = ""
    """How the trial ended if it failed, or why there is none."""

    def to_dict(self) -> dict[str, Any]:
        """Returns a flat dictionary, ready for JSON."""
        return dataclasses.asdict(self)


def is_of_published_size(space: SearchSpace, workload: Workload) -> bool:
    """Returns whether `workload` has the published sizes: those of the space without a scale."""
    scaled = {} if space.scale is None else space.scales.get(space.scale, {})
    if any(name in scaled for name in _SIZES):
        return False
    # None is the model's default, which applies where the space specifies no width.
    published = {"feed_forward_width": None, **space.workload}
    return all(getattr(workload, name) == published[name] for name in _SIZES if name in published)


def compare_with_published(
    reference: Reference, definition: StudyDefinition, trials: Sequence[TrialRecord]
) -> tuple[ComparedRow, ...]:
    """Returns every row of the table, in its order, with the study's results.

    A trial belongs to the row of the same configuration. All rows have speeds of one scale.
    """
    named = definition.legal_space().named
    records = {record.config.fingerprint: record for record in trials}
    tried = {
        name: records[config.fingerprint]
        for name, config in named.items()
        if name in reference.rows and config.fingerprint in records
    }
    timed = on_one_scale(*(record for record in tried.values() if record.tokens_per_second))
    speeds = {record.number: record.tokens_per_second for record in timed}
    figures = {name: _figures(record, speeds) for name, record in tried.items()}
    control = figures.get(reference.control, Figures())
    published_control = reference.rows[reference.control]
    has_published_size = is_of_published_size(definition.space, definition.workload)
    compared = []
    for name, published in reference.rows.items():
        own = figures.get(name, Figures())
        saved, published_saved = _saved(own, control), _saved(published, published_control)
        speed = _ratio(own.tokens_per_second, control.tokens_per_second)
        published_speed = _ratio(published.tokens_per_second, published_control.tokens_per_second)
        peak_ratio = None
        if has_published_size:
            peak_ratio = _ratio(own.peak_memory_bytes, published.peak_memory_bytes)
        saved_difference = None
        if saved is not None and published_saved is not None:
            saved_difference = saved - published_saved
        remark = "not tried" if name in named else "cannot be trained here"
        if name in tried:
            outcome = tried[name].outcome
            remark = "" if outcome == "ok" else outcome.replace("_", " ")
        compared.append(
            ComparedRow(
                name=name,
                trial=tried[name].number if name in tried else None,
                peak_memory_bytes=own.peak_memory_bytes,
                peak_is_predicted=name in tried and _peak_is_predicted(tried[name]),
                published_peak_memory_bytes=published.peak_memory_bytes,
                peak_ratio=peak_ratio,
                saved=saved,
                published_saved=published_saved,
                saved_difference=saved_difference,
                speed=speed,
                published_speed=published_speed,
                speed_ratio=_ratio(speed, published_speed),
                perplexity=own.perplexity,
                published_perplexity=published.perplexity,
                remark=remark,
            )
        )
    return tuple(compared)


def _figures(record: TrialRecord, speeds: Mapping[int, float | None]) -> Figures:
    # What a training held when it ran out of memory is not its peak: it would have needed more.
    measured = record.peak_memory_bytes if record.was_trained else None
    return Figures(
        peak_memory_bytes=record.predicted_peak_memory_bytes if measured is None else measured,
        tokens_per_second=speeds.get(record.number),
        perplexity=record.perplexity,
    )


def _peak_is_predicted(record: TrialRecord) -> bool:
    is_measured = record.was_trained and record.peak_memory_bytes is not None
    return not is_measured and record.predicted_peak_memory_bytes is not None


def _saved(figures: Figures, control: Figures) -> float | None:
    share = _ratio(figures.peak_memory_bytes, control.peak_memory_bytes)
    return None if share is None else 1 - share


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    if numerator is None or not denominator:
        return None
    return numerator / denominator
