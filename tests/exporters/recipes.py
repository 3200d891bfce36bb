"""Recipes for the contract of all exporters: every technique value in a legal configuration."""

from typing import Any

from autotune.exporters.recipe import Recipe
from autotune.spec.config import (
    SEARCHED,
    LegalityContext,
    TrainingConfig,
    rule_violations,
)
from autotune.spec.workload import make_workload

MIB = 1024**2

NEEDED = {
    "memory_budget": {"compile": "block"},
    "attention": {"precision": "bf16-mixed"},
    "adapter_rank": {"adapter": "lora"},
    "adapter_targets": {"adapter": "lora"},
    "base_weights": {"adapter": "lora", "precision": "bf16-mixed"},
}
"""{technique: other settings that it needs in a legal configuration}."""


ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA in 16 bits": {"precision": "bf16-true", "adapter": "lora", "adapter_rank": 16},
    "DoRA over nf4, paged": {
        "precision": "bf16-mixed",
        "adapter": "dora",
        "adapter_targets": "attention",
        "base_weights": "nf4",
        "optimizer": "paged-adamw-8bit",
        "checkpointing": "block",
    },
    "int8 in fp16": {"precision": "fp16-mixed", "adapter": "lora", "base_weights": "int8"},
    "rounded": {"precision": "bf16-stochastic", "adapter": "lora", "optimizer": "sgd"},
}
"""Combinations in which trainers have other number formats."""


ON_SEVERAL_DEVICES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"sharding": "ddp"}),
    "ddp, added up in bf16": (
        2,
        {"sharding": "ddp", "precision": "bf16-mixed", "gradient_reduction": "bf16"},
    ),
    "zero1": (2, {"sharding": "zero1", "optimizer_fusion": "kernel"}),
    "zero2": (2, {"sharding": "zero2"}),
    "zero3 of 16-bit weights": (2, {"sharding": "zero3", "precision": "bf16-true"}),
    "hsdp, added up in bf16": (
        4,
        {
            "sharding": "hsdp",
            "sharding_group": 2,
            "precision": "bf16-mixed",
            "checkpointing": "block",
            "gradient_reduction": "bf16",
        },
    ),
    "split matrices": (2, {"tensor_parallel": 2, "precision": "bf16-mixed"}),
    "zero3 of split matrices": (4, {"sharding": "zero3", "tensor_parallel": 2}),
    "ddp of split matrices": (4, {"sharding": "ddp", "tensor_parallel": 2}),
    "zero3, on the host": (2, {"sharding": "zero3", "offload": "all"}),
    "the optimizer on the host": (1, {"offload": "optimizer"}),
    "DeepSpeed": (2, {"engine": "deepspeed", "sharding": "zero1", "precision": "bf16-mixed"}),
    "DeepSpeed, on the host": (2, {"engine": "deepspeed", "sharding": "zero3", "offload": "all"}),
    "DeepSpeed, the optimizer on the host": (
        2,
        {
            "engine": "deepspeed",
            "sharding": "zero2",
            "offload": "optimizer",
            "gradient_reduction": "bf16",
        },
    ),
}
"""{case: (devices, settings)} in which trainers share out a training in other ways."""


def recipe(config=None, *, device_type="cuda", **workload):
    """Returns a recipe for the built-in model unless `workload` names another."""
    settled = make_workload("cpu", {"steps": 20, **workload})
    config = config or TrainingConfig(micro_batch_size=settled.global_batch)
    return Recipe(
        config=config,
        workload=settled,
        device_type=device_type,
        origin="study tour, trial 12",
        peak_memory_bytes=40 * MIB,
        device_bytes=44 * MIB,
        tokens_per_second=9000.0,
        perplexity=21.7,
    )


def configurations(global_batch=8):
    """Returns {`technique=value`: a legal configuration that has it, otherwise with defaults}."""
    values = {
        **SEARCHED,
        "memory_budget": (1.0, 0.5, 0.0),
        "micro_batch_size": (global_batch, global_batch // 2, 1),
        "adapter_rank": (8, 64),
    }
    found = {}
    for technique, options in values.items():
        if technique in _OF_SEVERAL_DEVICES:
            continue
        for value in options:
            settings = {
                "micro_batch_size": global_batch,
                **NEEDED.get(technique, {}),
                technique: value,
            }
            if technique == "memory_budget" and value == 1.0:
                settings["compile"] = "none"
            config = TrainingConfig(**settings)
            assert not rule_violations(
                config.to_dict(), LegalityContext(global_batch=global_batch)
            ), settings
            found[f"{technique}={value}"] = config
    for name, settings in ADAPTERS.items():
        found[name] = TrainingConfig(micro_batch_size=global_batch, **settings)
    return found


_OF_SEVERAL_DEVICES = ("sharding", "offload", "gradient_reduction", "engine")


def recipe_on_devices(case, **options):
    """Returns the recipe of a case of `ON_SEVERAL_DEVICES`, with micro batches of 2."""
    devices, settings = ON_SEVERAL_DEVICES[case]
    config = TrainingConfig(micro_batch_size=2, **settings)
    made = recipe(config, devices_per_trial=devices, **options)
    context = made.workload.legality_context
    assert not rule_violations(config.to_dict(), context), settings
    return made
