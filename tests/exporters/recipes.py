"""Recipes for the contract of all exporters: every technique value in a legal configuration."""

import dataclasses
import functools
from typing import Any

from autotune.exporters.recipe import Recipe
from autotune.spec.config import (
    FIELD_ORDER,
    SEARCHED,
    LegalityContext,
    TrainingConfig,
    rule_violations,
)
from autotune.spec.prediction import KeptOfBlock
from autotune.spec.search_space import SearchSpace, bind_space
from autotune.spec.workload import make_workload

MIB = 1024**2

NEEDED: dict[str, dict[str, Any]] = {
    "memory_budget": {"compile": "block"},
    "compile_mode": {"compile": "model"},
    "gradient_accumulation_dtype": {"precision": "bf16-true", "micro_batch_size": 1},
    "attention": {"precision": "bf16-mixed"},
    "adapter_rank": {"adapter": "lora"},
    "adapter_targets": {"adapter": "lora"},
    "adapter_kernels": {"adapter": "lora"},
    "base_weights": {"adapter": "lora", "precision": "bf16-mixed"},
    "base_weights fp16": {"adapter": "lora", "precision": "fp16-mixed"},
}
"""{technique or `technique value`: other settings that it needs in a legal configuration}."""


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
    "fused over int8": {
        "precision": "bf16-mixed",
        "adapter": "lora",
        "adapter_kernels": "fused",
        "base_weights": "int8",
    },
}
"""Combinations in which trainers have other number formats."""


QLORA = {"precision": "bf16-mixed", "adapter": "lora", "base_weights": "nf4"}
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
    "zero3, adapters": (2, {"sharding": "zero3", "adapter": "lora"}),
    "zero3, adapters in 16 bits": (
        2,
        {"sharding": "zero3", "adapter": "lora", "precision": "bf16-true"},
    ),
    "zero2, adapters of fp16 beside nf4": (
        2,
        {"sharding": "zero2", **QLORA, "precision": "fp16-mixed"},
    ),
    "zero3, adapters beside nf4": (2, {"sharding": "zero3", **QLORA}),
    "zero3, adapters beside nf4 on the host": (2, {"sharding": "zero3", "offload": "all", **QLORA}),
    "hsdp, adapters beside nf4": (4, {"sharding": "hsdp", "sharding_group": 2, **QLORA}),
    "the optimizer on the host": (1, {"offload": "optimizer"}),
    "frozen weights on the host": (1, {"offload": "frozen", **QLORA}),
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


KEPT = (
    KeptOfBlock(operators=()),
    *[KeptOfBlock(operators=("aten.mm 0",))] * 2,
    KeptOfBlock(),
)
"""What the four blocks of the recipes keep for an activation budget."""


def plan_of(config):
    """Returns what blocks keep in a recipe with this configuration."""
    return () if config.activation_budget == "none" else KEPT


def recipe(config=None, *, device_type="cuda", **workload):
    """Returns a recipe for the built-in model unless `workload` names another."""
    planned = config is not None and plan_of(config)
    shape = {"layers": len(KEPT)} if planned else {}
    settled = make_workload("cpu", {"steps": 20, **shape, **workload})
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
        kept=plan_of(config),
    )


def configurations(global_batch=8):
    """Returns {`technique=value`: a legal configuration that has it, otherwise with defaults}."""
    values = {
        **SEARCHED,
        "memory_budget": (1.0, 0.5, 0.0),
        "activation_budget": ("none", "1GiB"),
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
                **NEEDED.get(f"{technique} {value}", NEEDED.get(technique, {})),
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


def any_recipe(choose):
    """Returns a recipe of the whole legal space, of which `choose` takes one value after another.

    Half of the techniques are at their defaults: trainers have most of one at a time.
    """
    devices = choose((1, 1, 2, 4))
    made = recipe(
        global_batch=8 * devices,
        devices_per_trial=devices,
        sequence_length=choose((64, 512)),
        schedule=choose(("constant", "cosine")),
        learning_rate_warmup_steps=choose((1, 3, 10)),
        learning_rates=choose(({}, {"adamw": 0.004, "lora/adamw": 0.03})),
        gradient_clipping=choose((None, 0.5)),
        seed=choose((0, 7)),
        packing=choose(("packed", "padded")),
    )
    legal, chosen = _legal_space(made.workload.legality_context), {}
    for technique in FIELD_ORDER:
        values = legal.legal_values(technique, chosen)
        default = made.workload.legality_context.default_of(technique)
        chosen[technique] = choose((default, choose(values)) if default in values else values)
    config = TrainingConfig(**chosen)
    workload = made.workload
    if plan_of(config):
        workload = dataclasses.replace(workload, layers=len(KEPT))
    return dataclasses.replace(made, config=config, workload=workload, kept=plan_of(config))


@functools.cache
def _legal_space(at):
    techniques = {
        **{name: values for name, values in SEARCHED.items() if values},
        "micro_batch_size": (1, 2, 8),
        "memory_budget": (1.0, 0.5, 0.0),
        "activation_budget": ("none", "1GiB"),
        "adapter_rank": (8, 64),
        "tensor_parallel": (1, 2),
        "sharding_group": (1, 2),
    }
    return bind_space(SearchSpace(name="all", techniques=techniques), at, unavailable={})


_OF_SEVERAL_DEVICES = ("sharding", "offload", "gradient_reduction", "engine")


def recipe_on_devices(case, **options):
    """Returns the recipe of a case of `ON_SEVERAL_DEVICES`, with micro batches of 2."""
    devices, settings = ON_SEVERAL_DEVICES[case]
    config = TrainingConfig(micro_batch_size=2, **settings)
    made = recipe(config, devices_per_trial=devices, **options)
    context = made.workload.legality_context
    assert not rule_violations(config.to_dict(), context), settings
    return made
