"""Which configurations to predict beside one that is to be explained: single changes of it, and pairs of them.

Only what is legal and works on the device, and a handful a technique. Nothing is predicted here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.analysis.variants import (
    NOTHING,
    Explained,
    Pair,
    Variant,
    best_partner,
    named,
    techniques_without_effect,
)
from autotune.spec.config import CHOICES, FIELD_ORDER, Circumstances, TrainingConfig, broken_rules
from autotune.spec.prediction import Prediction
from autotune.units import format_size

BUDGETS = (0.5, 0.0)
CHECKPOINTINGS = ("attention", "selective", "every-2", "block", "sqrt")
CHECKPOINTINGS_OF_A_COMPILED_MODEL = ("selective", "block")
"""Fewer, since each compiles the whole model."""
SMALLEST_BUDGET = 0.0

Unavailable = Mapping[str, Mapping[str, str]]
"""What does not work on the device: {technique: {value: reason}}."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    variants: tuple[Variant, ...]
    impossible: Mapping[str, str]
    """{technique: why none of its values can be had}; not predicted."""


def wanted_variants(
    config: TrainingConfig,
    prediction: Prediction,
    *,
    at: Circumstances,
    unavailable: Unavailable,
) -> Wanted:
    """Each technique taken out where it is in use, and changed to each of a handful of its other values."""
    variants: list[Variant] = []
    impossible: dict[str, str] = {}
    for technique in FIELD_ORDER:
        if technique == "allocator":  # decides what is reserved, not what is allocated
            continue
        without = without_technique(config, technique, at)
        if without is not None:
            plain = getattr(without, technique)
            variants.append(
                Variant(technique=technique, value=plain, config=without, is_removal=True)
            )
        values = _values(
            technique, config, prediction, global_batch=at.global_batch, unavailable=unavailable
        )
        reasons = {v: _why_not(config, technique, v, at, unavailable) for v in values}
        possible = [value for value, reason in reasons.items() if not reason]
        taken = [variant.config for variant in variants]
        changed = [(value, replace(config, **{technique: value})) for value in possible]
        variants += [
            Variant(technique=technique, value=v, config=c) for v, c in changed if c not in taken
        ]
        if reasons and not possible and without is None:
            impossible[technique] = next(iter(reasons.values()))
        if technique == "optimizer" and not values:
            state = format_size(prediction.bytes_by_category.get("optimizer_state", 0))
            impossible[technique] = (
                f"no other optimizer saves anything here: of the peak its state is {state}"
            )
    return Wanted(variants=tuple(variants), impossible=impossible)


def wanted_pairs(
    explained: Explained, variants: Sequence[Variant], *, unavailable: Unavailable
) -> list[Pair]:
    """What saves nothing alone, beside what saves most and trains the same numbers."""
    pairs = []
    for variant in techniques_without_effect(explained, variants):
        partner = _partner(explained, variants, variant)
        if partner is None or variant.config.numerics_class != explained.config.numerics_class:
            continue
        pair = _pair(explained, variant, partner)
        if not broken_rules(pair.together.to_dict(), explained.at):
            pairs.append(pair)
    return [*pairs, *_budget_beside_compilation(explained, variants, unavailable)]


def without_technique(
    config: TrainingConfig, technique: str, at: Circumstances
) -> TrainingConfig | None:
    """`config` as plain training has it in `technique`; None where it is so already, or where that is illegal."""
    plain = TrainingConfig(micro_batch_size=at.global_batch)
    if technique == "optimizer" or getattr(config, technique) == getattr(plain, technique):
        return None
    changes: dict[str, Any] = {technique: getattr(plain, technique)}
    if technique == "compile":
        changes["memory_budget"] = plain.memory_budget
    without = replace(config, **changes)
    return None if broken_rules(without.to_dict(), at) else without


def _values(
    technique: str,
    config: TrainingConfig,
    prediction: Prediction,
    *,
    global_batch: int,
    unavailable: Unavailable,
) -> list[Any]:
    """The values worth a prediction, without that of `config`; plain values are removals."""
    current = getattr(config, technique)
    values: Sequence[Any] = CHOICES.get(technique, ())
    if (
        technique == "precision"
    ):  # tf32 keeps what fp32 keeps, fp16 and fp8 what bf16 keeps, stochastic what true
        values = ["bf16-mixed", "bf16-true"]
        values += ["fp16-mixed"] if "bf16-mixed" in unavailable.get(technique, {}) else []
    elif technique == "checkpointing":
        values = CHECKPOINTINGS_OF_A_COMPILED_MODEL if config.compile == "model" else CHECKPOINTINGS
    elif (
        technique == "optimizer_fusion" and config.compile == "model" and prediction.phase != "step"
    ):
        values = ["backward"]  # the others change the step only
    elif technique == "attention":
        values = []  # torch's own choice keeps least wherever there is one
    elif technique == "memory_budget":
        values = BUDGETS
    elif technique == "micro_batch_size":
        smaller = [size for size in range(current - 1, 0, -1) if global_batch % size == 0]
        values = list(dict.fromkeys([*smaller[:1], *smaller[-1:]]))
    elif (
        technique == "optimizer"
        and _at_most_by_optimizer(prediction) < NOTHING * prediction.peak_memory_bytes
    ):
        values = []
    return [value for value in values if value not in (current, "none", "full")]


def _at_most_by_optimizer(prediction: Prediction) -> int:
    """Bytes at the peak that another optimizer could do without: its state, and what an update running then holds."""
    sizes = prediction.bytes_by_category
    is_updating = prediction.phase == "step" or not prediction.module
    return sizes.get("optimizer_state", 0) + (sizes.get("temporaries", 0) if is_updating else 0)


def _why_not(
    config: TrainingConfig, technique: str, value: Any, at: Circumstances, unavailable: Unavailable
) -> str:
    """Why `technique` cannot have `value` here; empty where it can."""
    if reason := unavailable.get(technique, {}).get(str(value)):
        return f"{named(technique, value)} does not work on this device: {reason}"
    chosen = {**config.to_dict(), technique: value}
    broken = broken_rules(chosen, at)
    return broken[0] if broken else ""


# -- pairs -----------------------------------------------------------------------------------------


def _partner(explained: Explained, variants: Sequence[Variant], variant: Variant) -> Variant | None:
    """What saves most; where a whole-model graph is what keeps fusion from helping, compiling each block instead."""
    if variant.technique == "optimizer_fusion" and explained.config.compile == "model":
        by_block = [v for v in variants if (v.technique, v.value) == ("compile", "block")]
        return next((v for v in by_block if v.prediction is not None), None)
    return best_partner(explained, variants, beside=variant.technique)


def _pair(explained: Explained, variant: Variant, partner: Variant) -> Pair:
    technique = variant.technique
    both = replace(partner.config, **{technique: variant.value})
    if not variant.is_removal:
        return Pair(
            technique=technique,
            value=variant.value,
            partner=partner,
            alone=partner.config,
            together=both,
        )
    value = getattr(explained.config, technique)
    return Pair(
        technique=technique, value=value, partner=partner, alone=both, together=partner.config
    )


def _budget_beside_compilation(
    explained: Explained, variants: Sequence[Variant], unavailable: Unavailable
) -> Iterator[Pair]:
    """A memory budget is illegal without torch.compile; with each block compiled it may save something."""
    if str(SMALLEST_BUDGET) in unavailable.get("memory_budget", {}):
        return
    for partner in variants:
        is_block = (partner.technique, partner.value) == (
            "compile",
            "block",
        ) and explained.config.compile == "none"
        if is_block and partner.prediction is not None and explained.config.checkpointing == "none":
            yield Pair(
                technique="memory_budget",
                value=SMALLEST_BUDGET,
                partner=partner,
                alone=partner.config,
                together=replace(partner.config, memory_budget=SMALLEST_BUDGET),
            )
