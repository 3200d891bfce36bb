"""Sentences on why a technique saves nothing: what it could remove is not part of the peak.

Pure functions over a prediction.
"""

from typing import Any

from autotune.analysis.peak import (
    HARDLY_ANY,
    MOMENT_DESCRIPTIONS,
    burden,
    gradient_share,
    moment_of,
)
from autotune.spec.config import QUANTIZED_EXPERTS, TrainingConfig
from autotune.spec.prediction import Prediction
from autotune.units import format_percent, format_size

FEW = 0.1
"""Activations below this share of the peak count as few."""


def why_nothing(
    technique: str,
    value: Any,
    *,
    config: TrainingConfig,
    prediction: Prediction,
    prediction_with_it: Prediction,
    sequences_per_step: int,
) -> str:
    """Returns why `technique` with `value` saves nothing.

    `config` and `prediction` are those without the technique: it would have to save at their peak.
    """
    sizes = prediction.bytes_by_category
    activations = format_size(sizes.get("activations", 0))
    if technique == "optimizer_fusion":
        return _why_no_fusion(
            value, config=config, prediction=prediction, sequences_per_step=sequences_per_step
        )
    if technique == "optimizer":
        return (
            f"at the peak the optimizer's state is {format_size(sizes.get('optimizer_state', 0))}"
        )
    if technique == "micro_batch_size":
        gradients = format_size(sizes.get("parameters", 0))
        return (
            f"it shrinks activations, {activations}, and keeps about {gradients} of gradients "
            "from one to the next"
        )
    has_same_plan = prediction.plan and prediction.plan == prediction_with_it.plan
    if technique == "memory_budget" and has_same_plan:
        return "the compiler makes the same plan of what to keep"
    if technique == "loss":
        moment = moment_of(prediction, config, sequences_per_step=sequences_per_step)
        return f"the logits are no part of the peak, which is {MOMENT_DESCRIPTIONS[moment]}"
    if technique == "precision" and value == "tf32":
        return "it computes faster and keeps four bytes a number"
    if sizes.get("activations", 0) >= FEW * prediction.peak_memory_bytes:
        return (
            f"at the peak with it, {burden(prediction_with_it)} are alive, where there were "
            f"{burden(prediction)}"
        )
    if technique == "precision":
        return (
            "it keeps weights, gradients and optimizer state in fp32, and only "
            f"{activations} are activations"
        )
    return f"it reduces activations, and only {activations} of the peak are activations"


def unquantized_share(unquantized: int, quantized: int) -> float | None:
    """Returns the share of numbers that are not quantized; None where none is."""
    return unquantized / (unquantized + quantized) if quantized else None


def left_in_16_bits(share: float | None) -> str:
    """Returns how many weights quantization leaves as they are; empty without quantization."""
    return "" if share is None else f"{format_percent(share)} % of the weights in 16 bits"


def why_left_in_16_bits(config: TrainingConfig, share: float | None) -> str:
    """Returns a sentence with the reason for that; empty without quantization."""
    if share is None:
        return ""
    taken = "linear layers of the blocks, not embeddings, norms or experts that are one parameter "
    taken += f"together, as base_weights {config.base_weights}-experts does"
    if config.base_weights in QUANTIZED_EXPERTS:
        taken = "linear layers of the blocks and experts, not embeddings or norms"
    return f"base_weights {config.base_weights} leaves {left_in_16_bits(share)}: it takes {taken}"


def _why_no_fusion(
    value: str, *, config: TrainingConfig, prediction: Prediction, sequences_per_step: int
) -> str:
    moment = moment_of(prediction, config, sequences_per_step=sequences_per_step)
    where = MOMENT_DESCRIPTIONS[moment]
    leaves_together = config.compile == "model" and value == "backward"
    if moment != "step" and gradient_share(prediction) <= HARDLY_ANY:
        size = prediction.bytes_by_category.get("gradients", 0)
        gradients = "before any gradient exists"
        if size:
            gradients = f"when only {format_size(size)} of gradients exist"
        sentence = f"the peak is {where}, {burden(prediction)}, {gradients}"
        if leaves_together:
            sentence += (
                "; nor could it later: the one compiled graph returns all gradients together"
            )
        return sentence
    if leaves_together:
        return (
            "the whole model is one compiled graph, which returns all gradients together when it "
            "ends"
        )
    if value in ("foreach", "kernel"):
        return f"it changes how the update runs, and the peak is {where}"
    return f"the peak is {where} and holds {burden(prediction)}"
