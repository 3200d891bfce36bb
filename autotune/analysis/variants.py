"""A configuration to explain beside what was predicted for changes of it: what each saves, and which go well together.

Pure functions over predictions and records.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.spec.config import FIELD_ORDER, Circumstances, TrainingConfig
from autotune.spec.prediction import Prediction
from autotune.spec.result import TrialRecord

NOTHING = 0.01
"""A saving below this share of the peak is none."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The configuration with one technique changed; `prediction` is None where it was refused."""

    technique: str
    value: Any
    config: TrainingConfig
    is_removal: bool = False
    """The technique is in use, and this is the configuration without it."""
    prediction: Prediction | None = None
    refusal: str = ""

    @property
    def words(self) -> str:
        return named(self.technique, self.value)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A technique that saves nothing by itself, with a partner: the partner alone, and both together."""

    technique: str
    value: Any
    partner: Variant
    alone: TrainingConfig
    together: TrainingConfig
    alone_peak_bytes: int | None = None
    together_peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Explained:
    """The configuration to explain, its prediction, and what is known of it as a trial of a study."""

    config: TrainingConfig
    prediction: Prediction
    at: Circumstances
    """What of the workload decides which configurations are legal."""
    record: TrialRecord | None = None
    records: Sequence[TrialRecord] = ()
    """All trials of the study."""

    def saved_by(self, variant: Variant) -> int:
        """Bytes that a variant saves; for a removal those that the technique in use saves."""
        assert variant.prediction is not None
        saved = self.prediction.peak_memory_bytes - variant.prediction.peak_memory_bytes
        return -saved if variant.is_removal else saved

    def trains_other_numbers(self, variant: Variant) -> bool:
        return variant.config.numerics_class != self.config.numerics_class

    def is_worth_a_word(self, saved_bytes: int) -> bool:
        return saved_bytes >= NOTHING * self.prediction.peak_memory_bytes


def named(technique: str, value: Any) -> str:
    """`optimizer-fusion backward`, as in a configuration's description."""
    return f"{technique.removesuffix('_size').replace('_', '-')} {value}"


def techniques_without_effect(
    explained: Explained, variants: Sequence[Variant]
) -> Iterator[Variant]:
    """One variant of each technique that saves nothing by itself: its removal if in use, else its smallest value."""
    for technique in FIELD_ORDER:
        mine = [v for v in variants if v.technique == technique and v.prediction is not None]
        removals = [variant for variant in mine if variant.is_removal]
        if removals:
            yield from (v for v in removals if not explained.is_worth_a_word(explained.saved_by(v)))
        elif mine and not any(
            explained.is_worth_a_word(explained.saved_by(variant)) for variant in mine
        ):
            yield max(reversed(mine), key=explained.saved_by)  # of equals the last, which does most


def best_partner(
    explained: Explained, variants: Sequence[Variant], *, beside: str
) -> Variant | None:
    """The variant of another technique than `beside` that saves most and trains the same numbers."""
    candidates = [
        v
        for v in variants
        if v.prediction is not None
        and not v.is_removal
        and v.technique != beside
        and not explained.trains_other_numbers(v)
        and explained.is_worth_a_word(explained.saved_by(v))
    ]
    return max(candidates, key=explained.saved_by, default=None)
