"""Adapters and frozen weights in the words of peft, transformers, bitsandbytes and torchao.

What a trial does is in `autotune/techniques/adapter.py` and `base_weights.py`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from autotune.exporters.reasons import Reason
from autotune.spec import adapters
from autotune.spec.config import (
    QUANTIZED_WEIGHTS,
    SHARDED_WEIGHTS,
    TECHNIQUES,
    BaseWeights,
    TrainingConfig,
)
from autotune.spec.workload import BESIDE_ADAPTERS, Workload

PATTERNS = ("adapter_rank_pattern", "adapter_alpha_pattern")
"""Settings that few trainers have keys for."""

ATTENTION_LAYERS = (
    r".*\.(self_attn|self_attention|attention|attn)\."
    r"(\w+_proj(_with_mqa)?|query_key_value|dense|c_attn|c_proj|Wqkv)"
)
"""Regular expression of the full names of linear layers in the attention of models in transformers.
peft compares it with the whole name. A trial finds these layers by their place in the model."""

EXPERT_WEIGHTS = ("experts.gate_up_proj", "experts.down_proj")
"""Ends of the names of the weights of experts in most models of transformers. A trial finds them by
their dimensions."""

EXPERTS_NOTE = (
    "lora_target_parameters are the names that most models of transformers have for the weights of "
    "their experts, and peft takes all-linear of some, such as Mixtral, to be the routers as well: "
    "compare the number of trained parameters with the trial's"
)

UNTRAINED: Mapping[str, Any] = {
    "adapter": "none",
    "adapter_rank": 8,
    "adapter_targets": "all-linear",
    "adapter_kernels": "none",
    "base_weights": "trained",
}
"""The settings of a training without an adapter."""

_LONG_NAMES = {"fp16-mixed": "float16", "bf16-mixed": "bfloat16", "fp8": "bfloat16"}
_OF_WEIGHTS = {"bf16-true": "bfloat16", "bf16-stochastic": "bfloat16"}


def trained_dtype(config: TrainingConfig) -> str:
    """Returns the name of torch's dtype of what is trained: adapters, or all weights."""
    return _OF_WEIGHTS.get(config.precision, "float32")


def base_dtype(config: TrainingConfig) -> str:
    """Returns the name of torch's dtype of the model's own weights that are not quantized."""
    if config.base_weights == "trained":
        return trained_dtype(config)
    return _LONG_NAMES.get(config.precision, trained_dtype(config))


def is_quantized(config: TrainingConfig) -> bool:
    """Returns whether the linear layers of the blocks have fewer than 16 bits a weight."""
    return config.base_weights in QUANTIZED_WEIGHTS


def saved_dtype(config: TrainingConfig, workload: Workload) -> str:
    """Returns the name of torch's dtype of modules that are trained whole beside adapters."""
    base = base_dtype(config)
    is_base = workload.modules_to_save_dtype == "base" and base != "float16"
    return base if is_base else trained_dtype(config)


def beside_adapters(config: TrainingConfig, workload: Workload) -> dict[str, Any]:
    """Returns what the workload says of adapters, as far as the configuration trains by it."""
    if config.adapter == "none":
        return dict(BESIDE_ADAPTERS)
    is_base = workload.modules_to_save and saved_dtype(config, workload) != trained_dtype(config)
    of_workload = {name: getattr(workload, name) for name in BESIDE_ADAPTERS}
    return {**of_workload, "modules_to_save_dtype": "base" if is_base else "adapter"}


def lacks_beside_adapters(
    config: TrainingConfig,
    workload: Workload,
    why: str,
    *,
    settings: Iterable[str] = BESIDE_ADAPTERS,
) -> dict[str, Reason]:
    """Returns {setting: reason} of a trainer that has no such `settings` of adapters."""
    wanted = beside_adapters(config, workload)
    return {
        setting: (BESIDE_ADAPTERS[setting], why)
        for setting in settings
        if wanted[setting] != BESIDE_ADAPTERS[setting]
    }


def lacks_saved_dtype(
    config: TrainingConfig, workload: Workload, *, made: str, why: str
) -> dict[str, Reason]:
    """Returns {setting: reason} of a trainer that trains modules whole in the dtype `made`."""
    wanted = beside_adapters(config, workload)
    if not wanted["modules_to_save"] or made == saved_dtype(config, workload):
        return {}
    instead = "adapter" if wanted["modules_to_save_dtype"] == "base" else "base"
    return {"modules_to_save_dtype": (instead, why)}


def lora_arguments(config: TrainingConfig, workload: Workload) -> dict[str, Any]:
    """Returns the arguments of peft's LoraConfig, for a model of transformers."""
    layers = ATTENTION_LAYERS if config.adapter_targets == "attention" else "all-linear"
    arguments = {**adapters.lora_arguments(config, workload), "target_modules": layers}
    if config.adapter_targets == "experts":
        arguments["target_parameters"] = list(EXPERT_WEIGHTS)
    return arguments


def storage_dtype(config: TrainingConfig) -> str | None:
    """Returns the name of torch's dtype in which codes of nf4 are packed, where it matters.

    Trainers have devices share out tensors of one dtype together, and so codes like the weights in
    16 bits: https://huggingface.co/docs/bitsandbytes/main/en/fsdp_qlora
    """
    is_shared_out = config.base_weights == "nf4" and config.sharding in SHARDED_WEIGHTS
    return base_dtype(config) if is_shared_out else None


def quantization_settings(config: TrainingConfig) -> dict[str, Any]:
    """Returns `quantization_config` of `from_pretrained` as JSON has it."""
    if config.base_weights == "nf4":
        settings = {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": base_dtype(config),
        }
        if (packed_in := storage_dtype(config)) is not None:
            settings["bnb_4bit_quant_storage"] = packed_in
        return settings
    name = _TORCHAO_CLASSES[config.base_weights]
    return {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": name, "_version": 2, "_data": {}}},
    }


_TORCHAO_CLASSES: Mapping[BaseWeights, str] = {
    "int8": "Int8WeightOnlyConfig",
    "fp8": "Float8WeightOnlyConfig",
}


def torchao_class(config: TrainingConfig) -> str:
    """Returns the name in torchao.quantization of the configuration of int8 or fp8 weights."""
    return _TORCHAO_CLASSES[QUANTIZED_WEIGHTS[config.base_weights]]


def quantization_expression(config: TrainingConfig) -> str:
    """Returns `quantization_config` of `from_pretrained` as an expression."""
    if config.base_weights == "nf4":
        packed_in = storage_dtype(config)
        storage = f", bnb_4bit_quant_storage=torch.{packed_in}" if packed_in is not None else ""
        return (
            'transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", '
            "bnb_4bit_use_double_quant=True, "
            f"bnb_4bit_compute_dtype=torch.{base_dtype(config)}{storage})"
        )
    return f"transformers.TorchAoConfig(torchao.quantization.{torchao_class(config)}())"


def loading_arguments(config: TrainingConfig) -> str:
    """Returns the arguments of `from_pretrained` about number formats, as they are typed."""
    dtype = f"dtype=torch.{base_dtype(config)}"
    if not is_quantized(config):
        return dtype
    return f"{dtype}, quantization_config={quantization_expression(config)}"


def adapter_lines(config: TrainingConfig, workload: Workload) -> str:
    """Returns the statements that add adapters to a model of transformers, on one line."""
    arguments = ", ".join(
        f"{name}={_quoted(value)}" for name, value in lora_arguments(config, workload).items()
    )
    adds = f"model = peft.get_peft_model(model, peft.LoraConfig({arguments})) and "
    dtype = f"torch.{trained_dtype(config)}"
    if beside_adapters(config, workload)["modules_to_save_dtype"] == "base":
        return (
            f"{adds}for name, weight in model.named_parameters(): "
            f'weight.data = weight.data.to({dtype}) if ".lora_" in name else weight.data'
        )
    return (
        f"{adds}for weight in model.parameters(): "
        f"weight.data = weight.data.to({dtype}) if weight.requires_grad else weight.data"
    )


def _quoted(value: Any) -> str:
    return f'r"{value}"' if isinstance(value, str) and "\\" in value else repr(value)


def left_to_script(
    config: TrainingConfig, workload: Workload, *, before: str
) -> dict[str, tuple[None, str]]:
    """Returns {setting: (None, the line to write)} of a trainer whose model is made by a script.

    `before` is what the adapters must be added before, such as "the optimizer".
    """
    if config.adapter == "none":
        return {}
    of_lines = (None, "it is part of the adapter's lines")
    reasons = {
        "adapter": (
            None,
            "the script makes the model: for one of transformers write "
            f"{adapter_lines(config, workload)} before {before}",
        ),
        "adapter_rank": of_lines,
        "adapter_targets": of_lines,
        **dict.fromkeys(lacks_beside_adapters(config, workload, ""), of_lines),
    }
    if config.base_weights != "trained":
        reasons["base_weights"] = (
            None,
            "the script makes the model: write transformers.AutoModelForCausalLM.from_pretrained("
            f"..., {loading_arguments(config)})",
        )
    return reasons


def packages_note(config: TrainingConfig) -> list[str]:
    """Returns what to install for adapters, base weights, precision and optimizer; if anything."""
    needed = packages(config)
    return [f"needs {', '.join(needed)}: pip install {' '.join(needed)}"] if needed else []


def packages(config: TrainingConfig) -> list[str]:
    """Returns the names of the packages that adapters, base weights and optimizer need."""
    names = []
    for technique in ("adapter", "base_weights", "precision", "optimizer", "kernels"):
        package = TECHNIQUES[technique].packages.get(getattr(config, technique))
        if package is not None:
            names.append(package.replace("_", "-"))
    return list(dict.fromkeys(names))
