"""Selects the configurations to compare with the explained one: single changes, and pairs of them.

Only legal ones that work on the device, and a handful for each technique. Nothing is predicted
here.
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
from autotune.spec.config import (
    DEPENDENT_FIELDS,
    FIELD_ORDER,
    HELD_BY_THE_HOST,
    OF_SEVERAL_DEVICES,
    QUANTIZED_WEIGHTS,
    SEARCHED,
    LegalityContext,
    TrainingConfig,
    reverted,
    rule_violations,
)
from autotune.spec.optimizers import OPTIMIZERS, algorithm_of
from autotune.spec.prediction import Prediction
from autotune.units import exact_size, format_size

_WORTH_A_PREDICTION: Mapping[str, Sequence[Any]] = {
    # tf32 stores the same bytes as fp32, fp16 and 8 bits as bf16, and stochastic as bf16-true.
    "precision": ("bf16-mixed", "bf16-true"),
    "checkpointing": ("attention", "selective", "every-2", "block", "sqrt"),
    "attention": (),  # torch's default stores least on every device
    "memory_budget": (0.5, 0.0),
    "compile_mode": (),  # the others are faster, and none needs less
    "gradient_accumulation_dtype": (),  # the other one needs more
    "adapter": (),  # it is another training: its own weights stay as they are
    "base_weights": ("bf16", "fp16", "int8", "nf4"),
    "sharding": ("zero1", "zero2", "zero3"),
    "tensor_parallel": (2,),
    "engine": (),
}
"""{technique: the values whose effect is predicted}, where these are not all."""
CHECKPOINTINGS_OF_A_COMPILED_MODEL = ("selective", "block")
"""Fewer, because each compiles the whole model."""
SMALLEST_BUDGET = 0.0
_MOSTLY = 0.5
"""Quantized layers that leave a larger share of the weights in 16 bits hardly can be all matrices:
others may be those of experts."""

Unavailable = Mapping[str, Mapping[str, str]]
"""What does not work on the device: {technique: {value: reason}}."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The single changes to predict."""

    variants: tuple[Variant, ...]
    impossible: Mapping[str, str]
    """{technique: why none of its values is possible}; these are not predicted."""


def unavailable_on(device_type: str, unavailable: Unavailable) -> Unavailable:
    """Returns what does not work on a type of device, and besides what is known `unavailable`."""
    if device_type == "cpu":
        return {**HELD_BY_THE_HOST, **unavailable}
    return unavailable


def wanted_variants(
    config: TrainingConfig,
    prediction: Prediction,
    *,
    at: LegalityContext,
    unavailable: Unavailable,
) -> Wanted:
    """Returns the changes to predict: each technique removed if in use, and set to other values."""
    variants: list[Variant] = []
    impossible: dict[str, str] = {}
    for technique in FIELD_ORDER:
        if technique == "allocator":  # it changes what is reserved, not what is allocated
            continue
        without = without_technique(config, technique, at)
        if without is not None:
            plain = getattr(without, technique)
            variants.append(
                Variant(technique=technique, value=plain, config=without, is_removal=True)
            )
        values = _values(technique, config, prediction, at=at, unavailable=unavailable)
        reasons = []
        known = [variant.config for variant in variants]
        for value in values:
            reason = _why_not(config, technique, value, at, unavailable)
            if reason:
                reasons.append(reason)
                continue
            changed = replace(config, **{technique: value})
            if changed not in known:
                variants.append(Variant(technique=technique, value=value, config=changed))
        if reasons and len(reasons) == len(values) and without is None:
            impossible[technique] = reasons[0]
        if technique == "optimizer" and not values:
            state = format_size(prediction.bytes_by_category.get("optimizer_state", 0))
            impossible[technique] = (
                f"no other optimizer saves anything here: of the peak its state is {state}"
            )
    return Wanted(variants=tuple(variants), impossible=impossible)


def wanted_pairs(
    explained: Explained, variants: Sequence[Variant], *, unavailable: Unavailable
) -> list[Pair]:
    """Returns pairs of a technique that saves nothing alone with a partner that saves most.

    Both train the same numbers as the explained configuration.
    """
    pairs = []
    for variant in techniques_without_effect(explained, variants):
        partner = _partner(explained, variants, variant)
        if partner is None or variant.config.numerics_class != explained.config.numerics_class:
            continue
        pair = _pair(explained, variant, partner)
        if not rule_violations(pair.together.to_dict(), explained.at):
            pairs.append(pair)
    return [*pairs, *_budget_with_compilation(explained, variants, unavailable)]


def without_technique(
    config: TrainingConfig, technique: str, at: LegalityContext
) -> TrainingConfig | None:
    """Returns `config` without a technique; None if it has not the technique or needs it."""
    plain = TrainingConfig(micro_batch_size=at.global_batch)
    if technique == "optimizer" or getattr(config, technique) == getattr(plain, technique):
        return None
    without = reverted(config, technique, plain=plain)
    return None if rule_violations(without.to_dict(), at) else without


def _values(
    technique: str,
    config: TrainingConfig,
    prediction: Prediction,
    *,
    at: LegalityContext,
    unavailable: Unavailable,
) -> list[Any]:
    """Returns the values worth a prediction, except that of `config` and the plain value."""
    current = getattr(config, technique)
    values: Sequence[Any] = _WORTH_A_PREDICTION.get(technique, SEARCHED.get(technique, ()))
    is_off = technique in DEPENDENT_FIELDS["adapter"] and config.adapter == "none"
    if is_off or (technique in OF_SEVERAL_DEVICES and at.devices == 1):
        values = []
    elif technique == "precision" and "bf16-mixed" in unavailable.get(technique, {}):
        values = [*values, "fp16-mixed"]
    elif technique == "checkpointing" and config.compile == "model":
        values = CHECKPOINTINGS_OF_A_COMPILED_MODEL
    elif (
        technique == "optimizer_fusion" and config.compile == "model" and prediction.phase != "step"
    ):
        values = ["backward"]  # the others change only the optimizer step
    elif technique == "activation_budget":
        values = [_without_half_of_activations(prediction)]
    elif technique == "base_weights" and (prediction.unquantized_share or 0.0) > _MOSTLY:
        values = [*values, f"{QUANTIZED_WEIGHTS[current]}-experts"]
    elif technique == "adapter_rank":
        values = [current // 2] if current > 1 else []
    elif technique == "offload" and config.compile == "model":
        values = []  # it is the compiled code that needs the memory there
    elif technique == "micro_batch_size":
        smaller = [size for size in range(current - 1, 0, -1) if at.global_batch % size == 0]
        values = list(dict.fromkeys([*smaller[:1], *smaller[-1:]]))
    elif (
        technique == "optimizer"
        and _optimizer_bytes(prediction) < NOTHING * prediction.peak_memory_bytes
    ):
        values = []
    elif technique == "optimizer":
        possible = [
            name for name in values if not _why_not(config, technique, name, at, unavailable)
        ]
        values = _with_least_state(possible or values)
    return [value for value in values if value not in (current, "none", "full", "whole")]


def _without_half_of_activations(prediction: Prediction) -> str:
    """Returns the peak, in whole MiB, if half of the activations at it were recomputed."""
    saved_bytes = prediction.bytes_by_category.get("activations", 0) // 2
    return exact_size(-(-(prediction.peak_memory_bytes - saved_bytes) // 2**20) * 2**20)


MOST_OPTIMIZERS = 5
"""As many optimizers are predicted as alternatives: each takes a prediction."""


def _with_least_state(optimizers: Sequence[str]) -> list[str]:
    """Returns the optimizer with the least state of each algorithm, and the least paged one.

    Of more than `MOST_OPTIMIZERS` they are those with the least state.
    """
    least: dict[tuple[str, bool], str] = {}
    for name in sorted(optimizers, key=lambda name: OPTIMIZERS[name].state):
        least.setdefault((algorithm_of(name), OPTIMIZERS[name].is_paged), name)
    return list(least.values())[:MOST_OPTIMIZERS]


def _optimizer_bytes(prediction: Prediction) -> int:
    """Returns the bytes at the peak that another optimizer could save.

    They are its state and, if an update is running then, its temporaries.
    """
    sizes = prediction.bytes_by_category
    is_updating = prediction.phase == "step" or not prediction.module
    return sizes.get("optimizer_state", 0) + (sizes.get("temporaries", 0) if is_updating else 0)


def _why_not(
    config: TrainingConfig,
    technique: str,
    value: Any,
    at: LegalityContext,
    unavailable: Unavailable,
) -> str:
    """Returns why `technique` cannot have `value` here; empty if it can."""
    if reason := unavailable.get(technique, {}).get(str(value)):
        return f"{named(technique, value)} does not work on this device: {reason}"
    chosen = {**config.to_dict(), technique: value}
    broken = rule_violations(chosen, at)
    return broken[0] if broken else ""


# -- pairs -----------------------------------------------------------------------------------------


def _partner(explained: Explained, variants: Sequence[Variant], variant: Variant) -> Variant | None:
    """Returns the variant that saves most, to combine with `variant`.

    A graph of the whole model keeps optimizer fusion from saving anything, so its partner is the
    compilation of each block.
    """
    if variant.technique == "optimizer_fusion" and explained.config.compile == "model":
        for partner in variants:
            is_block = (partner.technique, partner.value) == ("compile", "block")
            if is_block and partner.prediction is not None:
                return partner
        return None
    return best_partner(explained, variants, other_than=variant.technique)


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


def _budget_with_compilation(
    explained: Explained, variants: Sequence[Variant], unavailable: Unavailable
) -> Iterator[Pair]:
    """Yield a memory budget with each block compiled: without torch.compile it is illegal."""
    if str(SMALLEST_BUDGET) in unavailable.get("memory_budget", {}):
        return
    if explained.config.compile != "none" or explained.config.checkpointing != "none":
        return
    for partner in variants:
        is_block = (partner.technique, partner.value) == ("compile", "block")
        if is_block and partner.prediction is not None:
            yield Pair(
                technique="memory_budget",
                value=SMALLEST_BUDGET,
                partner=partner,
                alone=partner.config,
                together=replace(partner.config, memory_budget=SMALLEST_BUDGET),
            )
