"""The smallest change that makes a configuration fit a cap: predicted one after the other.

Changes that compute the same numbers come first, those that cost least time before the others; what
trains other numbers comes last. Where no single one is enough, they are added up in this order.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from autotune.errors import PredictionImpossible, PreparationFailed
from autotune.spec.config import LegalityContext, TrainingConfig, rule_violations
from autotune.spec.prediction import Prediction
from autotune.study.explain.alternatives import Unavailable, unavailable_on
from autotune.study.prediction.predictions import Forecaster

_CHANGES: tuple[tuple[str, Any], ...] = (
    ("loss", "chunked"),
    ("optimizer_fusion", "kernel"),
    ("micro_batch_size", 0.5),
    ("checkpointing", "selective"),
    ("checkpointing", "block"),
    ("micro_batch_size", 1),
    ("base_weights", "bf16"),
    ("base_weights", "fp16"),
    ("base_weights", "nf4"),
    ("base_weights", "nf4-experts"),
    ("optimizer", "paged-adamw-8bit"),
    ("precision", "bf16-true"),
)
"""Techniques and values in the order in which they are tried; 0.5: half of the micro batch."""


_KEEP_LESS = {
    "selective": ("selective-2", "save-attention", "block", "sqrt"),
    "block": ("block", "sqrt"),
}
"""{checkpointing that is tried: those that it would not improve}."""


@dataclass(frozen=True, kw_only=True)
class SmallestChange:
    """A configuration that fits, or the smallest that was found where none does."""

    changes: tuple[tuple[str, Any], ...]
    """The techniques that differ, each with its value."""
    prediction: Prediction
    fits: bool

    def describe(self) -> str:
        """Returns `loss chunked and micro_batch_size 1`."""
        return " and ".join(f"{technique} {value}" for technique, value in self.changes)


def smallest_change(
    forecaster: Forecaster,
    config: TrainingConfig,
    *,
    fits: Callable[[Prediction], bool],
    progress: Callable[[str], None] = lambda what: None,
) -> SmallestChange | None:
    """Returns the smallest change after which `fits` is true of the prediction.

    Returns None where nothing can be changed. `progress` gets what is predicted next.
    """
    at = forecaster.workload.legality_context
    unavailable = unavailable_on(forecaster.device_type, {})
    found: list[SmallestChange] = []

    def predicted(changed: TrainingConfig) -> SmallestChange | None:
        change = _differences(config, changed)
        progress(" and ".join(f"{technique} {value}" for technique, value in change))
        try:
            prediction = forecaster.predict(changed)
        except (PredictionImpossible, PreparationFailed):
            return None
        return SmallestChange(changes=change, prediction=prediction, fits=fits(prediction))

    singles = list(_changed(config, at=at, unavailable=unavailable))
    for changed in singles:
        one = predicted(changed)
        if one is not None and one.fits:
            return one
        if one is not None:
            found.append(one)
    together = config
    # Of what saves most alone first: the fewest changes are enough then.
    for one in sorted(found, key=lambda change: change.prediction.peak_memory_bytes):
        for technique, value in one.changes:
            is_chosen = getattr(together, technique) != getattr(config, technique)
            changed = replace(together, **{technique: value})
            if is_chosen or rule_violations(changed.to_dict(), at):
                continue
            is_first = together == config
            together = changed
            added = None if is_first else predicted(together)
            if added is not None and added.fits:
                return added
            if added is not None:
                found.append(added)
    return min(found, key=lambda change: change.prediction.peak_memory_bytes, default=None)


def _changed(
    config: TrainingConfig, *, at: LegalityContext, unavailable: Unavailable
) -> Iterator[TrainingConfig]:
    """Yield the legal configurations with one change, in the order of `_CHANGES`."""
    seen = {config}
    for technique, wanted in _CHANGES:
        value = wanted
        if technique == "micro_batch_size":
            value = _micro_batch(config.micro_batch_size, wanted, at=at)
        if technique == "base_weights" and config.adapter == "none":
            continue
        if str(value) in unavailable.get(technique, {}):
            continue
        if technique == "checkpointing" and config.checkpointing in _KEEP_LESS[value]:
            continue
        changed = replace(config, **{technique: value})
        if changed in seen or rule_violations(changed.to_dict(), at):
            continue
        seen.add(changed)
        yield changed


def _micro_batch(size: int, wanted: float, *, at: LegalityContext) -> int:
    """Returns the largest divisor of the global batch up to a share of a micro batch, or 1."""
    most = max(1, int(size * wanted)) if wanted < 1 else 1
    return next(smaller for smaller in range(most, 0, -1) if at.global_batch % smaller == 0)


def _differences(before: TrainingConfig, after: TrainingConfig) -> tuple[tuple[str, Any], ...]:
    values = before.to_dict()
    return tuple((name, value) for name, value in after.to_dict().items() if value != values[name])
