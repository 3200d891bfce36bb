"""Variants of a configuration to explain: what each saves, and which to combine.

Pure functions over predictions and records.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.spec.config import FIELD_ORDER, LegalityContext, TrainingConfig, replicas
from autotune.spec.prediction import Prediction
from autotune.spec.result import TrialRecord

NOTHING = 0.01
"""A saving below this share of the peak counts as none."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The configuration with one technique changed.

    `prediction` is None where it could not be predicted; `error` then has the reason.
    """

    technique: str
    value: Any
    config: TrainingConfig
    is_removal: bool = False
    """The technique is in use, and this is the configuration without it."""
    prediction: Prediction | None = None
    error: str = ""

    @property
    def name(self) -> str:
        return named(self.technique, self.value)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A technique that saves nothing alone, and a partner: the partner alone, and both together."""

    technique: str
    value: Any
    partner: Variant
    alone: TrainingConfig
    together: TrainingConfig
    alone_peak_bytes: int | None = None
    together_peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Explained:
    """The configuration to explain, its prediction, and its trial if it is of a study."""

    config: TrainingConfig
    prediction: Prediction
    at: LegalityContext
    """The features of the workload that decide which configurations are legal."""
    record: TrialRecord | None = None
    records: Sequence[TrialRecord] = ()
    """All trials of the study."""

    @property
    def sequences_per_step(self) -> int:
        """How many sequences a device trains in an optimizer step, in one micro batch or more."""
        return self.at.global_batch // replicas(self.config.to_dict(), self.at)

    def saved_by(self, variant: Variant) -> int:
        """Returns the bytes that a variant saves; for a removal, those that the technique saves."""
        assert variant.prediction is not None
        saved = self.prediction.peak_memory_bytes - variant.prediction.peak_memory_bytes
        return -saved if variant.is_removal else saved

    def trains_other_numbers(self, variant: Variant) -> bool:
        return variant.config.numerics_class != self.config.numerics_class

    def is_notable(self, saved_bytes: int) -> bool:
        """Returns whether a saving is at least the share `NOTHING` of the peak."""
        return saved_bytes >= NOTHING * self.prediction.peak_memory_bytes


def named(technique: str, value: Any) -> str:
    """Returns `optimizer-fusion backward`, as in a configuration's description."""
    return f"{technique.removesuffix('_size').replace('_', '-')} {value}"


def techniques_without_effect(
    explained: Explained, variants: Sequence[Variant]
) -> Iterator[Variant]:
    """Yield one variant of each technique that saves nothing by itself.

    It is the removal of a technique in use, otherwise the value that saves most.
    """
    for technique in FIELD_ORDER:
        predicted = [v for v in variants if v.technique == technique and v.prediction is not None]
        removals = [variant for variant in predicted if variant.is_removal]
        if removals:
            for variant in removals:
                if not explained.is_notable(explained.saved_by(variant)):
                    yield variant
        elif predicted and not any(
            explained.is_notable(explained.saved_by(variant)) for variant in predicted
        ):
            # Of equal values the last, which has the strongest effect.
            yield max(reversed(predicted), key=explained.saved_by)


def best_partner(
    explained: Explained, variants: Sequence[Variant], *, other_than: str
) -> Variant | None:
    """Returns the variant that saves most and trains the same numbers, of another technique."""
    candidates = [
        v
        for v in variants
        if v.prediction is not None
        and not v.is_removal
        and v.technique != other_than
        and not explained.trains_other_numbers(v)
        and explained.is_notable(explained.saved_by(v))
    ]
    return max(candidates, key=explained.saved_by, default=None)
