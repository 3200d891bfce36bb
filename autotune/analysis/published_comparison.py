"""One's own results beside a published table: memory, savings and speed, each against its own control row.

What was not measured stays None; a peak that was only predicted says so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
"""What of a workload decides memory."""

_NOTHING_KNOWN = Figures()
LEFT_OUT = "cannot be trained here"


@dataclass(frozen=True, kw_only=True)
class OwnRow:
    """What is known here of one row of the table."""

    figures: Figures = _NOTHING_KNOWN
    peak_is_predicted: bool = False
    trial: int | None = None
    remark: str = ""
    """How the trial ended where it was not well."""


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """One row. Shares and ratios are of the control row of the same table."""

    name: str
    own: OwnRow
    published: Figures
    saved: float | None
    """Share of the control's peak memory that is saved; negative where more is needed."""
    published_saved: float | None
    speed: float | None
    """Tokens a second over the control's."""
    published_speed: float | None
    peak_ratio: float | None
    """Own over published peak; None where the two are of different sizes."""

    @property
    def saved_difference(self) -> float | None:
        """Own less published, as a share of the control."""
        return _less(self.saved, self.published_saved)

    @property
    def speed_ratio(self) -> float | None:
        """Own relative speed over the published one."""
        return _over(self.speed, self.published_speed)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, flat."""
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
    """The table that `space` holds. Raises InvalidInput, naming `what` has none."""
    if space.reference is None:
        raise InvalidInput(
            f"{what} has no published table beside it: search space {space.name!r} has no [reference]",
            hint="leave --reference out, or use a space with one: peak_memory as it is today, or your own",
        )
    return space.reference


def is_of_published_size(space: SearchSpace, workload: Workload) -> bool:
    """Whether `workload` needs the memory of the one the table was measured with: that of the space, unscaled."""
    scaled = {} if space.scale is None else space.scales.get(space.scale, {})
    said = {
        "feed_forward_width": None,
        **space.workload,
    }  # None: the model's own choice, as where nothing is said
    return not any(name in scaled for name in _SIZES) and all(
        getattr(workload, name) == said[name] for name in _SIZES if name in said
    )


def compare_with_published(
    reference: Reference, own: Callable[[str], OwnRow], *, has_published_size: bool
) -> tuple[ComparedRow, ...]:
    """Every row of the table, in its order, beside what `own` knows of the row of that name."""
    known = {name: own(name) for name in reference.rows}
    control, published_control = known[reference.control].figures, reference.rows[reference.control]
    return tuple(
        ComparedRow(
            name=name,
            own=known[name],
            published=published,
            saved=_saved(known[name].figures, control),
            published_saved=_saved(published, published_control),
            speed=_over(known[name].figures.tokens_per_second, control.tokens_per_second),
            published_speed=_over(published.tokens_per_second, published_control.tokens_per_second),
            peak_ratio=_over(known[name].figures.peak_memory_bytes, published.peak_memory_bytes)
            if has_published_size
            else None,
        )
        for name, published in reference.rows.items()
    )


def rows_of_study(
    definition: StudyDefinition, records: Mapping[str, TrialRecord]
) -> Callable[[str], OwnRow]:
    """What a study knows of a named configuration; `records` by fingerprint."""
    named: Mapping[str, TrainingConfig] = definition.legal_space().named

    def own(name: str) -> OwnRow:
        if name not in named:
            return OwnRow(remark=LEFT_OUT)
        record = records.get(named[name].fingerprint)
        return OwnRow(remark="not tried") if record is None else _own_row(record)

    return own


def _own_row(record: TrialRecord) -> OwnRow:
    # What a training held when it ran out of memory is no peak: it would have gone on to more.
    measured = None if record.outcome == "out_of_memory" else record.peak_memory_bytes
    predicted = record.predicted_peak_memory_bytes
    return OwnRow(
        figures=Figures(
            peak_memory_bytes=predicted if measured is None else measured,
            tokens_per_second=record.tokens_per_second,
            perplexity=record.perplexity,
        ),
        peak_is_predicted=measured is None and predicted is not None,
        trial=record.number,
        remark="" if record.outcome == "ok" else record.outcome.replace("_", " "),
    )


def _saved(figures: Figures, control: Figures) -> float | None:
    share = _over(figures.peak_memory_bytes, control.peak_memory_bytes)
    return None if share is None else 1 - share


def _over(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def _less(one: float | None, other: float | None) -> float | None:
    return one - other if one is not None and other is not None else None
