"""What a configuration and its workload say of adapters, as arguments of peft's LoraConfig."""

from typing import Any

from autotune.spec.config import TrainingConfig
from autotune.spec.workload import Workload

PISSA = "pissa_niter_16"
"""The fast start of PiSSA: sixteen iterations of a randomized decomposition (arXiv:2404.02948)."""


def lora_arguments(config: TrainingConfig, workload: Workload) -> dict[str, Any]:
    """Returns the arguments but `target_modules`, without those that are peft's defaults.

    Source: https://huggingface.co/docs/peft/package_reference/lora
    """
    others = {
        "use_rslora": workload.adapter_scaling == "rslora",
        "init_lora_weights": PISSA if workload.adapter_init == "pissa" else None,
        "rank_pattern": dict(workload.adapter_rank_pattern),
        "alpha_pattern": dict(workload.adapter_alpha_pattern),
        "modules_to_save": list(workload.modules_to_save),
        "use_dora": config.adapter == "dora",
    }
    return {
        "r": config.adapter_rank,
        "lora_alpha": workload.adapter_alpha,
        "lora_dropout": workload.adapter_dropout,
        **{name: value for name, value in others.items() if value},
    }
