"""Adapters and frozen weights in the words of peft, transformers, bitsandbytes and torchao.

What a trial does is in `autotune/techniques/adapter.py` and `base_weights.py`.
"""

from collections.abc import Mapping
from typing import Any

from autotune.spec.config import QUANTIZED_WEIGHTS, TECHNIQUES, BaseWeights, TrainingConfig

ALPHA = 16
"""As in `autotune/techniques/adapter.py`."""

ATTENTION_LAYERS = (
    r".*\.(self_attn|self_attention|attention|attn)\."
    r"(\w+_proj(_with_mqa)?|query_key_value|dense|c_attn|c_proj|Wqkv)"
)
"""Regular expression of the full names of linear layers in the attention of models in transformers.
peft compares it with the whole name. A trial finds these layers by their place in the model."""

UNTRAINED: Mapping[str, Any] = {
    "adapter": "none",
    "adapter_rank": 8,
    "adapter_targets": "all-linear",
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


def lora_arguments(config: TrainingConfig) -> dict[str, Any]:
    """Returns the arguments of peft's LoraConfig, for a model of transformers."""
    arguments: dict[str, Any] = {
        "r": config.adapter_rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "target_modules": "all-linear"
        if config.adapter_targets == "all-linear"
        else ATTENTION_LAYERS,
    }
    if config.adapter == "dora":
        arguments["use_dora"] = True
    return arguments


def quantization_settings(config: TrainingConfig) -> dict[str, Any]:
    """Returns `quantization_config` of `from_pretrained` as JSON has it."""
    if config.base_weights == "nf4":
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": base_dtype(config),
        }
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
    return _TORCHAO_CLASSES[config.base_weights]


def quantization_expression(config: TrainingConfig) -> str:
    """Returns `quantization_config` of `from_pretrained` as an expression."""
    if config.base_weights == "nf4":
        return (
            'transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", '
            "bnb_4bit_use_double_quant=True, "
            f"bnb_4bit_compute_dtype=torch.{base_dtype(config)})"
        )
    return f"transformers.TorchAoConfig(torchao.quantization.{torchao_class(config)}())"


def loading_arguments(config: TrainingConfig) -> str:
    """Returns the arguments of `from_pretrained` about number formats, as they are typed."""
    dtype = f"dtype=torch.{base_dtype(config)}"
    if not is_quantized(config):
        return dtype
    return f"{dtype}, quantization_config={quantization_expression(config)}"


def adapter_lines(config: TrainingConfig) -> str:
    """Returns the statements that add adapters to a model of transformers, on one line."""
    arguments = ", ".join(
        f"{name}={_quoted(value)}" for name, value in lora_arguments(config).items()
    )
    return (
        f"model = peft.get_peft_model(model, peft.LoraConfig({arguments})) and "
        "for weight in model.parameters(): "
        f"weight.data = weight.data.to(torch.{trained_dtype(config)}) "
        "if weight.requires_grad else weight.data"
    )


def _quoted(value: Any) -> str:
    return f'r"{value}"' if isinstance(value, str) and "\\" in value else repr(value)


def left_to_script(config: TrainingConfig, *, before: str) -> dict[str, tuple[None, str]]:
    """Returns {setting: (None, the line to write)} of a trainer whose model is made by a script.

    `before` is what the adapters must be added before, such as "the optimizer".
    """
    if config.adapter == "none":
        return {}
    reasons = {
        "adapter": (
            None,
            f"the script makes the model: for one of transformers write {adapter_lines(config)} "
            f"before {before}",
        ),
        "adapter_rank": (None, "it is part of the adapter's lines"),
        "adapter_targets": (None, "it is part of the adapter's lines"),
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
