"""Compares results with a published table: memory, savings and speed.

Savings and speeds are relative to a control row, here and in the table. What was not measured stays
None, and a peak that was only predicted is marked.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.analysis.confirmed_speed import on_one_scale
from autotune.errors import InvalidInput
from autotune.spec.config import TrainingConfig
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

_NOTHING_KNOWN = Figures()
EXCLUDED = "cannot be trained here"


@dataclass(frozen=True, kw_only=True)
class StudyRow:
    """The user's results for one row of the table."""

    figures: Figures = _NOTHING_KNOWN
    peak_is_predicted: bool = False
    trial: int | None = None
    remark: str = ""
    """How the trial ended, if it failed."""


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """One row of the comparison. Shares and speeds are relative to the control row."""

    name: str
    own: StudyRow
    published: Figures
    saved: float | None
    """Share of the control's peak memory that is saved; negative if the row needs more."""
    published_saved: float | None
    speed: float | None
    """Tokens per second, relative to the control's."""
    published_speed: float | None
    peak_ratio: float | None
    """The user's peak over the published one; None if the two workloads differ in size."""

    @property
    def saved_difference(self) -> float | None:
        """The user's saving less the published one, each a share of its control."""
        return _difference(self.saved, self.published_saved)

    @property
    def speed_ratio(self) -> float | None:
        """The user's relative speed over the published one."""
        return _ratio(self.speed, self.published_speed)

    def to_dict(self) -> dict[str, Any]:
        """Return a flat dictionary, ready for JSON."""
        return {
            "name": self.name,
            "trial": self.own.trial,
            "peak_memory_bytes": self.own.figures.peak_memory_bytes,
            "peak_is_predicted": self.own.peak_is_predicted,
            "published_peak_memory_bytes": self.published.peak_memory_bytes,
            "peak_ratio": self.peak_ratio,
            "saved": self.saved,
            "published_saved": self.published_saved,
            "saved_difference": self.saved_difference,
            "speed": self.speed,
            "published_speed": self.published_speed,
            "speed_ratio": self.speed_ratio,
            "perplexity": self.own.figures.perplexity,
            "published_perplexity": self.published.perplexity,
            "remark": self.own.remark,
        }


def reference_of(space: SearchSpace, *, what: str) -> Reference:
    """Return the published table of `space`. Raises InvalidInput, naming `what`, if it has none."""
    if space.reference is None:
        raise InvalidInput(
            f"{what} has no published table to compare with: search space {space.name!r} has no "
            "[reference]",
            hint="leave --reference out, or use a space with one: peak_memory as it is today, or "
            "your own",
        )
    return space.reference


def is_of_published_size(space: SearchSpace, workload: Workload) -> bool:
    """Return whether `workload` has the published sizes: those of the space without a scale."""
    scaled = {} if space.scale is None else space.scales.get(space.scale, {})
    if any(name in scaled for name in _SIZES):
        return False
    # None is the model's default, which applies where the space specifies no width.
    published = {"feed_forward_width": None, **space.workload}
    return all(getattr(workload, name) == published[name] for name in _SIZES if name in published)


def compare_with_published(
    reference: Reference, own: Callable[[str], StudyRow], *, has_published_size: bool
) -> tuple[ComparedRow, ...]:
    """Return every row of the table, in its order, with the user's results from `own(name)`."""
    own_rows = {name: own(name) for name in reference.rows}
    control = own_rows[reference.control].figures
    published_control = reference.rows[reference.control]
    compared = []
    for name, published in reference.rows.items():
        figures = own_rows[name].figures
        peak_ratio = None
        if has_published_size:
            peak_ratio = _ratio(figures.peak_memory_bytes, published.peak_memory_bytes)
        published_speed = _ratio(published.tokens_per_second, published_control.tokens_per_second)
        compared.append(
            ComparedRow(
                name=name,
                own=own_rows[name],
                published=published,
                saved=_saved(figures, control),
                published_saved=_saved(published, published_control),
                speed=_ratio(figures.tokens_per_second, control.tokens_per_second),
                published_speed=published_speed,
                peak_ratio=peak_ratio,
            )
        )
    return tuple(compared)


def rows_of_study(
    definition: StudyDefinition, records: Mapping[str, TrialRecord]
) -> Callable[[str], StudyRow]:
    """Return a function from the name of a configuration to the study's results for it.

    `records` are the study's trials by fingerprint. All rows have speeds of one scale.
    """
    named: Mapping[str, TrainingConfig] = definition.legal_space().named
    rows = {config.fingerprint for config in named.values()}
    timed = [record for record in records.values() if record.tokens_per_second]
    comparable = on_one_scale(*(one for one in timed if one.config.fingerprint in rows))
    speeds = {record.config.fingerprint: record.tokens_per_second for record in comparable}

    def own(name: str) -> StudyRow:
        if name not in named:
            return StudyRow(remark=EXCLUDED)
        record = records.get(named[name].fingerprint)
        if record is None:
            return StudyRow(remark="not tried")
        return _own_row(record, tokens_per_second=speeds.get(record.config.fingerprint))

    return own


def _own_row(record: TrialRecord, *, tokens_per_second: float | None) -> StudyRow:
    # What a training held when it ran out of memory is not its peak: it would have needed more.
    measured = record.peak_memory_bytes if record.was_trained else None
    predicted = record.predicted_peak_memory_bytes
    return StudyRow(
        figures=Figures(
            peak_memory_bytes=predicted if measured is None else measured,
            tokens_per_second=tokens_per_second,
            perplexity=record.perplexity,
        ),
        peak_is_predicted=measured is None and predicted is not None,
        trial=record.number,
        remark="" if record.outcome == "ok" else record.outcome.replace("_", " "),
    )


def _saved(figures: Figures, control: Figures) -> float | None:
    share = _ratio(figures.peak_memory_bytes, control.peak_memory_bytes)
    return None if share is None else 1 - share


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    if numerator is None or not denominator:
        return None
    return numerator / denominator


def _difference(minuend: float | None, subtrahend: float | None) -> float | None:
    if minuend is None or subtrahend is None:
        return None
    return minuend - subtrahend
