"""What a trainer has of each technique, and tables of what it does instead of the rest."""

from collections.abc import Collection, Mapping
from typing import Any

from autotune.spec.config import CHOICES, QUANTIZED_EXPERTS, QUANTIZED_WEIGHTS, TrainingConfig
from autotune.spec.optimizers import OPTIMIZERS, algorithm_of
from autotune.spec.setting import NO_LIMIT

Reason = tuple[Any, str]
"""What the files do instead (None: the user's code decides it), and why, as `Unsupported` has it.
"""
Table = Mapping[str, Mapping[Any, Reason]]
"""{setting: {value that a trainer does not express: the reason}}."""

Values = Mapping[str, Collection[Any]]
"""{technique: values other than its default that an exporter writes, or has a reason for}."""

KNOWN: Values = {
    "precision": (
        "tf32",
        "bf16-mixed",
        "bf16-true",
        "fp16-mixed",
        "bf16-stochastic",
        "fp8",
        "int8-mixed",
    ),
    "checkpointing": (
        "attention",
        "selective",
        "selective-2",
        "save-attention",
        "every-4",
        "every-2",
        "block",
        "sqrt",
    ),
    "compile": ("block", "model"),
    "optimizer_fusion": ("foreach", "kernel", "backward"),
    "allocator": ("expandable",),
    "attention": ("flash", "efficient", "cudnn", "math"),
    "loss": ("chunked",),
    "activation_offload": ("cpu",),
    "adapter": ("lora", "dora"),
    "adapter_targets": ("attention",),
    "base_weights": ("bf16", "fp16", "int8", "fp8", "nf4"),
    "sharding": ("ddp", "zero1", "zero2", "zero3", "hsdp"),
    "offload": ("optimizer", "all"),
    "gradient_reduction": ("bf16",),
    "engine": ("deepspeed",),
}
"""What every exporter writes or has a reason for. One that has more lists it beside this."""
WITH_MODES: Values = {**KNOWN, "compile_mode": CHOICES["compile_mode"]}
"""The same of one that has a key for the mode of torch.compile, or starts by our launcher."""
MADE_BY_CLASS: Values = {**KNOWN, "optimizer": OPTIMIZERS}
"""The same of an exporter that has, or quotes, any optimizer by the name of its class."""
WITH_KERNELS: Values = {
    **MADE_BY_CLASS,
    "activation_budget": (),  # whatever its size
    "compile_mode": CHOICES["compile_mode"],
    "kernels": ("liger",),
    "adapter_kernels": ("fused",),
    "feed_forward": ("tiled",),
    "gradient_accumulation_dtype": ("fp32",),
    "offload": (*KNOWN["offload"], "frozen"),
}
"""The same of one that also changes what computes layers of the model, and what adds up gradients.
"""

OF_EXPERTS = ("attention", "experts")
"""Values of `adapter_targets` of one that has adapters of experts."""
WITH_EXPERTS: Values = {
    "adapter_targets": OF_EXPERTS,
    "base_weights": (*KNOWN["base_weights"], *QUANTIZED_EXPERTS),
}
"""Of one that has adapters of experts, and stores these in fewer than 16 bits."""


def reasons_in(table: Table, config: TrainingConfig, **words: str) -> dict[str, Reason]:
    """Returns {setting: reason} of the values of `config` that are in the table.

    A text of the table may have the `words` in braces; other braces are doubled.
    """
    reasons = {}
    for setting, of_values in table.items():
        value = getattr(config, setting)
        if value in of_values:
            instead, why = of_values[value]
            reasons[setting] = (instead, why.format(**words))
    return reasons


def unknown_values(config: TrainingConfig, has: Values, *, trainer: str) -> dict[str, Reason]:
    """Returns {technique: reason} of the values of `config` that a trainer has no key for.

    The files then do what is closest: the algorithm of which an optimizer is a form, for an
    activation budget what needs the least memory, otherwise the default of the technique.
    """
    reasons: dict[str, Reason] = {}
    if config.activation_budget != NO_LIMIT and "activation_budget" not in has:
        reasons |= without_plan(f"{trainer} has no key for it")
    for technique in CHOICES:
        value, default = getattr(config, technique), getattr(TrainingConfig(), technique)
        if value == default or value in has.get(technique, ()):
            continue
        closest = algorithm_of(value) if technique == "optimizer" else default
        if technique == "base_weights":
            closest = QUANTIZED_WEIGHTS.get(value, value)
        instead = closest if closest in has.get(technique, ()) else default
        reasons[technique] = (instead, f"{trainer} has no key for it")
    return reasons


def without_plan(why: str) -> dict[str, Reason]:
    """Returns {technique: reason} where files cannot have the plan for an activation budget."""
    instead = "it takes the place of activation_budget, in no more memory and more time"
    return {"activation_budget": (NO_LIMIT, why), "checkpointing": ("block", instead)}
