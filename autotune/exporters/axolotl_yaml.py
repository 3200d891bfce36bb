"""axolotl: a YAML file for fine-tuning a Hugging Face model.

axolotl differs from other trainers in three ways. `bf16: true` means weights in bfloat16 under
autocast, so neither mixed precision with float32 weights nor plain bfloat16 is possible; only with
FSDP2 the weights are in float32. Expandable segments are on unless the environment turns them off.
Unknown keys are silently ignored.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from autotune.exporters.adapters import EXPERTS_NOTE, lacks_saved_dtype, lora_arguments
from autotune.exporters.deepspeed_config import AUTO_FILE, automatic, json_text
from autotune.exporters.devices import (
    Closest,
    divides_weights,
    fit_deepspeed,
    fsdp_keys,
)
from autotune.exporters.export import Export, Target
from autotune.exporters.filled_rows import fill_rows
from autotune.exporters.launch import FILE as LAUNCHER
from autotune.exporters.launch import is_needed, launcher
from autotune.exporters.named_schedule import named_schedule, warmup_reasons
from autotune.exporters.reasons import WITH_EXPERTS, WITH_MODES, Reason, Table, reasons_in
from autotune.exporters.recipe import Recipe
from autotune.exporters.script_lines import text_notes, user_script_note
from autotune.exporters.several_nodes import note, torchrun
from autotune.exporters.trainer_keys import OF_OTHER_PACKAGES
from autotune.exporters.transformers.training_script import LOADERS
from autotune.exporters.yaml_text import yaml_text
from autotune.spec.config import (
    CUDA_GRAPHS,
    QUANTIZED_WEIGHTS,
    SELECTIVE,
    Loss,
    TrainingConfig,
)
from autotune.spec.prompt_format import PromptFormat, columns_of, of_axolotl, template_of
from autotune.spec.workload import SHAREGPT_COLUMN, STANDARD_LIBRARY_TEXT, Workload
from autotune.system.allocator_settings import assignments

FILE = "axolotl.yaml"


def write(recipe: Recipe, version: str) -> Export:
    filled = fill_rows(recipe, "axolotl", is_expressed=_rows(recipe.workload) is not None)
    recipe = filled.recipe
    closest = _closest(recipe)
    _fit_optimizer(closest)
    closest.lacks({"precision": _precision(closest.config)})
    closest.lacks({"base_weights": _base_weights(closest.config)})
    lacking = reasons_in(_LACKING, closest.config)
    if closest.config.kernels == "liger":
        lacking.pop("loss", None)  # of the same plugin
    if closest.config.offload == "frozen" and "compile" in lacking:
        why = "axolotl compiles the model as a whole, and layer_offloading works between its blocks"
        for technique, off in _NOT_COMPILED.items():
            closest.change(technique, off, why)
        lacking.pop("compile")
    closest.lacks(lacking)
    if QUANTIZED_WEIGHTS.get(closest.config.base_weights) == "int8":
        why = "axolotl's kernels of adapters do not take weights of LLM.int8()"
        closest.change("adapter_kernels", "none", why)
    closest.lacks(_saved_dtype(closest))
    closest.lacks(warmup_reasons(closest.recipe, least=_LEAST_WARMUP))
    recipe, effective = closest.recipe, closest.effective()
    files = {FILE: _text(recipe, effective)}
    if recipe.config.engine == "deepspeed":
        # `bf16` turns the 16-bit weights of DeepSpeed on: beside autocast it would stop.
        config = dataclasses.replace(recipe.config, precision="fp32")
        files[AUTO_FILE] = json_text(automatic(dataclasses.replace(recipe, config=config)))
    command = f"axolotl train {FILE}"
    if recipe.devices > 1:
        options = torchrun(recipe, f"--nproc_per_node={recipe.devices}")
        command += f" --launcher torchrun -- {options}"
    # Without what axolotl makes itself: tf32, the settings of the allocator, and of the modes of
    # torch.compile those that it has.
    precision = "fp32" if recipe.config.precision == "tf32" else recipe.config.precision
    launcher_config = dataclasses.replace(recipe.config, precision=precision, allocator="default")
    if launcher_config.compile_mode in CUDA_GRAPHS:
        launcher_config = dataclasses.replace(launcher_config, compile_mode="default")
    if is_needed(launcher_config):
        files[LAUNCHER] = launcher(dataclasses.replace(recipe, config=launcher_config))
        start = "accelerate launch"
        if recipe.devices > 1:
            options = torchrun(recipe, f"--standalone --nproc_per_node={recipe.devices}")
            start = f"torchrun {options}"
        command = f"{start} {LAUNCHER} -m axolotl.cli.train {FILE}"
    if effective["allocator"] == "default":
        command = f"{assignments(expandable=False)} {command}"
    return Export(
        files={**files, **filled.files},
        command=command,
        before_use=filled.before_use,
        unsupported=closest.unsupported(),
        notes=(*_notes(recipe, effective), *note(recipe), *filled.notes),
    )


def _closest(recipe: Recipe) -> Closest:
    """Returns the closest recipe that axolotl can share out among devices."""
    closest = Closest(recipe, "axolotl", _HAS)
    if recipe.config.engine == "deepspeed":
        fit_deepspeed(closest)
        return closest
    closest.leave_out_zero1()
    if closest.config.sharding == "ddp":
        why = "axolotl splits matrices where FSDP2 shares out the rest, or among all devices"
        closest.leave_out_tensor_parallel(why)
    closest.offload_by_fsdp2()
    config = closest.config
    if divides_weights(config):
        why = "with FSDP2 axolotl adds up gradients in the number format of the computation"
        closest.differs("gradient_reduction", _reduced_in(config), why)
    else:
        closest.change("gradient_reduction", "fp32", "axolotl has no key for it")
    return closest


def _reduced_in(config: TrainingConfig) -> str:
    """Returns the number format in which FSDP2 adds up gradients."""
    if config.precision == "fp16-mixed":
        return "fp32" if config.adapter == "none" else "fp16"
    return "fp32" if config.precision in ("fp32", "tf32") else "bf16"


_WEIGHTS = "axolotl loads the weights in bfloat16 wherever it computes in it"
_PRECISIONS = {
    "bf16-mixed": (
        "bf16-true under autocast",
        f"{_WEIGHTS}: half the memory for them, but small updates are lost",
    ),
    "bf16-true": (
        "bf16-true under autocast",
        "axolotl turns transformers' autocast on with every bfloat16 model",
    ),
    "bf16-stochastic": (
        "bf16-true under autocast",
        f"{_WEIGHTS}, and updates are rounded to nearest",
    ),
    "int8-mixed": ("bf16-true under autocast", f"{_WEIGHTS}, and has no products in int8"),
    "fp16-mixed": (
        "fp32",
        "axolotl loads the weights in float16 wherever it computes in it, and the gradients of "
        "float16 weights cannot be scaled",
    ),
}
"""{precision that it does not support: (what the file does instead, why)}."""


_MASTERS = (
    "bf16-true with a float32 copy",
    "axolotl turns the 16-bit weights of DeepSpeed on, beside which its optimizer has float32 ones",
)
_BY_FSDP2 = (
    "bf16-mixed by FSDP2",
    "with FSDP2 axolotl trains weights in float32, and rounds what goes into a block and comes out "
    "of it to bfloat16",
)


def _precision(config: TrainingConfig) -> Reason | None:
    if config.precision.startswith("bf16") or config.precision == "int8-mixed":
        if config.engine == "deepspeed":
            return _MASTERS
        if divides_weights(config):
            return _BY_FSDP2
    is_mixed = config.precision in ("bf16-mixed", "fp16-mixed")
    if config.adapter != "none" and is_mixed:
        # Adapters are in float32 beside the 16-bit weights: nothing is lost, gradients are scaled.
        return None
    return _PRECISIONS.get(config.precision)


def _base_weights(config: TrainingConfig) -> Reason | None:
    """Returns what the file does instead, and why; None if it expresses the base weights."""
    number_format = QUANTIZED_WEIGHTS.get(config.base_weights)
    if number_format == "int8":
        why = "axolotl has LLM.int8() of bitsandbytes, which treats outliers apart, for torchao"
        return f"{config.base_weights} by bitsandbytes", why
    if number_format == "fp8":
        return _frozen_in_16_bits(config), f"{_WEIGHTS}, and has no format of 8-bit floats"
    if config.engine == "deepspeed" and config.base_weights in ("bf16", "trained"):
        why = "DeepSpeed's autocast takes the place of its bf16: frozen weights are in float32"
        return ("trained", why) if config.base_weights == "bf16" else None
    if config.adapter == "none" or config.base_weights != "trained":
        return None
    if config.precision in ("bf16-mixed", "fp16-mixed"):
        return _frozen_in_16_bits(config), f"{_WEIGHTS}: half the memory for frozen ones"
    if config.precision.startswith("bf16") and divides_weights(config):
        return "bf16", f"{_WEIGHTS}, and with FSDP2 has adapters in float32 beside frozen ones"
    return None


def _frozen_in_16_bits(config: TrainingConfig) -> str:
    return "fp16" if config.precision == "fp16-mixed" else "bf16"


def _saved_dtype(closest: Closest) -> dict[str, Reason]:
    """Returns where axolotl trains whole modules in another number format than a trial."""
    precision = closest.config.precision
    made = "float32"
    if precision == "fp16-mixed":
        made = "float16"
    elif precision not in ("fp32", "tf32"):
        made = "bfloat16"
    why = "axolotl trains modules_to_save in the number format of the frozen weights"
    return lacks_saved_dtype(closest.config, closest.recipe.workload, made=made, why=why)


_LACKING: Table = {
    "checkpointing": {
        "selective-2": ("selective", "it saves what an operator computes each time, or never"),
        "attention": ("block", "axolotl checkpoints whole blocks, not their attention parts alone"),
        "sqrt": ("block", "axolotl checkpoints blocks one by one, not in segments"),
    },
    "compile": {
        "block": (
            "model",
            "transformers compiles the model as a whole; only accelerate has a key for its blocks",
        )
    },
    "loss": {
        "chunked": (
            "full",
            "axolotl's chunked_cross_entropy computes all logits at once; its plugin "
            "axolotl.integrations.liger.LigerPlugin with liger_fused_linear_cross_entropy: true "
            "does not, for the models that it supports",
        )
    },
    "activation_offload": {
        "cpu": (
            "none",
            "axolotl offloads activations only instead of checkpointing "
            "(activation_offloading: true)",
        )
    },
}
_NOT_COMPILED = {"compile": "none", "compile_mode": "default", "memory_budget": 1.0}
_LEAST_WARMUP = 2
"""axolotl turns a warm-up of 1 step into one of 2."""


def _fit_optimizer(closest: Closest) -> None:
    """Change what axolotl's form of an optimizer lacks."""
    if closest.config.optimizer == "adafactor":
        why = "transformers' Adafactor does not scale its learning rate by the size of a weight"
        closest.change("optimizer", "adafactor-fixed-rate", why)
    if closest.config.optimizer == "sgd":
        why = "transformers makes SGD without momentum: it has no state and learns more slowly"
        closest.differs("optimizer", "sgd without momentum", why)
    if closest.config.optimizer in OF_OTHER_PACKAGES:
        closest.change("optimizer", *OF_OTHER_PACKAGES[closest.config.optimizer])
    if closest.config.optimizer == "muon":
        why = "its Muon scales the update of a matrix by the norm of the matrix: tune the rate"
        closest.differs("optimizer", "muon with spectral norms", why)
    fusions = list(_NAMES[closest.effective()["optimizer"]])
    fusion = closest.config.optimizer_fusion
    if fusion not in fusions:
        closest.lacks({"optimizer_fusion": (fusions[-1], _FUSIONS[fusion])})


_FUSIONS = {
    "none": "transformers has no key for it, and torch's default on CUDA batches the update",
    "foreach": "transformers has only one form of this optimizer",
    "kernel": "transformers has a fused kernel only for adamw",
    "backward": "transformers has no step in backward, so all gradients are in memory at once",
}


_NAMES: Mapping[str, Mapping[str, str]] = {
    "adamw": {"foreach": "adamw_torch", "kernel": "adamw_torch_fused"},
    "sgd without momentum": {"foreach": "sgd"},
    "adafactor-fixed-rate": {"none": "adafactor"},
    "adamw-8bit": {"none": "adamw_torch_8bit"},
    "adamw-4bit": {"none": "adamw_torch_4bit"},
    "adamw-fp8": {"none": "ao_adamw_fp8"},
    "muon with spectral norms": {"none": "muon"},
    "paged-adamw": {"none": "paged_adamw_32bit"},
    "paged-adamw-8bit": {"none": "paged_adamw_8bit"},
}
"""{optimizer: {fusion: value of the key}}. The default of torch on CUDA is foreach."""
_HAS = {
    **WITH_MODES,
    **WITH_EXPERTS,
    "optimizer": (*_NAMES, *OF_OTHER_PACKAGES, "sgd", "adafactor", "muon"),
    "kernels": ("liger",),
    "adapter_kernels": ("fused",),
    "feed_forward": ("tiled",),
    "offload": (*WITH_MODES["offload"], "frozen"),
}


def _text(recipe: Recipe, effective: Mapping[str, Any]) -> str:
    keys = {
        **_model_and_text(recipe.workload),
        **_numbers(recipe, effective),
        **_techniques(effective),
        **(liger_keys(recipe.config.loss) if recipe.config.kernels == "liger" else {}),
        **_adapter(recipe, effective),
        **_devices(recipe),
    }
    dumped = yaml_text(keys, width=100)
    return f"# {recipe.origin}\n# For axolotl 0.19.\n{dumped}"


def _devices(recipe: Recipe) -> dict[str, Any]:
    """Returns the keys on what devices share out among them."""
    config = recipe.config
    if config.engine == "deepspeed":
        return {"deepspeed": AUTO_FILE}
    keys: dict[str, Any] = {}
    if config.tensor_parallel > 1:
        keys["tensor_parallel_size"] = config.tensor_parallel
    if divides_weights(config):
        keys["fsdp_version"] = 2
        keys["fsdp_config"] = fsdp_keys(config, offload="offload_params")
    if config.sharding == "hsdp":
        keys["dp_replicate_size"] = recipe.replicas // config.sharding_group
        keys["dp_shard_size"] = config.sharding_group
    return keys


def _model_and_text(workload: Workload) -> dict[str, Any]:
    is_packed = workload.packing == "packed"
    return {
        "base_model": workload.model_source or "PUT-YOUR-MODEL-HERE",
        "reinit_weights": not workload.pretrained,
        "attn_implementation": "sdpa",
        "datasets": [_dataset(workload)],
        **({"train_on_inputs": True} if _learns_prompts(workload) else {}),
        "val_set_size": 0.0,
        "sequence_len": workload.sequence_length,
        "sample_packing": is_packed,
        "eval_sample_packing": is_packed,
        "multipack_real_batches": is_packed,
        "pad_to_sequence_len": True,
    }


def _dataset(workload: Workload) -> dict[str, Any]:
    if workload.dataset == STANDARD_LIBRARY_TEXT:
        return {
            "path": "PUT-YOUR-TEXT-HERE.txt",
            "ds_type": "text",
            "type": "completion",
            "field": "text",
        }
    kind = LOADERS.get(PurePath(workload.dataset).suffix.lower())
    keys: dict[str, Any] = {"path": workload.dataset}
    if kind is not None:
        keys["ds_type"] = kind
    if workload.dataset_config is not None:
        keys["name"] = workload.dataset_config
    if kind is None or workload.dataset_split != "train":
        keys["split"] = workload.dataset_split
    return {**keys, **(_rows(workload) or {})}


def _rows(workload: Workload) -> dict[str, Any] | None:
    """Returns the keys that say what a row is; None for prompts that axolotl cannot make."""
    format = workload.prompts
    if workload.chat_column is not None:
        return _conversations(workload.chat_column)
    if format is None:
        return {"type": "completion", "field": workload.text_column or "text"}
    if of_axolotl(format.name):
        return {"type": format.name}
    if format.messages and not format.system and format.learned == "answers":
        return _renamed_messages(format)
    own = None if format.makes_messages else _own_type(format)
    return None if own is None else {"type": own}


def _learns_prompts(workload: Workload) -> bool:
    return workload.prompts is not None and workload.prompts.learned == "all"


def _own_type(format: PromptFormat) -> dict[str, str] | None:
    """Returns a `type` that describes the format; None for more columns than it can have.

    That are one of an instruction, one of an input, one of a system and one of the answer.
    """
    shorter = format.shorter_prompt or format.prompt
    always, asked = set(columns_of(shorter)), set(columns_of(format.prompt))
    if len(always) == 2 and not format.shorter_prompt:
        always -= {columns_of(shorter)[-1]}  # with nothing for an input that a row lacks
    inputs, systems = asked - always, set(columns_of(format.system))
    is_answer = format.answer == f"{{{''.join(columns_of(format.answer))}}}"
    if not always or max(len(always), len(inputs), len(systems)) > 1 or not is_answer:
        return None
    begins, _, ends = format.system.partition(f"{{{''.join(systems)}}}")
    default = format.default_system
    if default and not (default.startswith(begins) and default.endswith(ends) and systems):
        return None
    names = {**dict.fromkeys(always, "instruction"), **dict.fromkeys(inputs, "input")}
    without = {**names, **dict.fromkeys(inputs, "")}
    keys = {
        "field_instruction": "".join(always),
        "field_output": "".join(columns_of(format.answer)),
        "format": template_of(format.prompt, names),
        "no_input_format": template_of(shorter, without),
        "system_format": template_of(format.system, dict.fromkeys(systems, "system")),
    }
    if inputs:
        keys["field_input"] = "".join(inputs)
    if systems:
        keys["field_system"] = "".join(systems)
    if default:
        own = default.removeprefix(begins).removesuffix(ends)
        keys["system_prompt"] = own.replace("{{", "{").replace("}}", "}")
    return keys


def _renamed_messages(format: PromptFormat) -> dict[str, Any]:
    roles: dict[str, list[str]] = {}
    for source, target in format.roles.items():
        roles.setdefault(target, []).append(source)
    return {
        **_conversations(format.messages),
        "message_property_mappings": {"role": format.role, "content": format.content},
        **({"roles": roles} if roles else {}),
    }


def _conversations(column: str) -> dict[str, Any]:
    """Returns the keys of a dataset whose answers are learned, as the chat template has them."""
    keys: dict[str, Any] = {
        "type": "chat_template",
        "chat_template": "tokenizer_default",
        "field_messages": column,
        "roles_to_train": ["assistant"],
        "train_on_eos": "turn",
    }
    if column == SHAREGPT_COLUMN:
        keys["message_property_mappings"] = {"role": "from", "content": "value"}
    return keys


def _numbers(recipe: Recipe, effective: Mapping[str, Any]) -> dict[str, Any]:
    schedule = named_schedule(effective)
    adam_keys = {}
    settings = recipe.optimizer.settings
    if "betas" in settings:
        adam_keys = {
            "adam_beta1": settings["betas"][0],
            "adam_beta2": settings["betas"][1],
            "adam_epsilon": settings["eps"],
        }
    return {
        "micro_batch_size": effective["micro_batch_size"],
        "gradient_accumulation_steps": recipe.accumulation_steps,
        "max_steps": effective["steps"],
        "seed": effective["seed"],
        "optimizer": _NAMES[effective["optimizer"]][effective["optimizer_fusion"]],
        "learning_rate": effective["learning_rate"],
        "weight_decay": effective["weight_decay"],
        **adam_keys,
        "lr_scheduler": schedule.name,
        "lr_scheduler_kwargs": dict(schedule.keywords),
        "warmup_steps": schedule.warmup_steps,
        "max_grad_norm": effective["gradient_clipping"] or 0.0,
    }


def _techniques(effective: Mapping[str, Any]) -> dict[str, Any]:
    precision = effective["precision"]
    # All precisions are specified: the default is `auto`, which depends on the device.
    keys: dict[str, Any] = {
        "bf16": precision.startswith(("bf16-true", "bf16-mixed")),
        "fp16": precision == "fp16-mixed",
        "tf32": precision == "tf32",
        "fp8": precision == "fp8",
    }
    if effective["feed_forward"] == "tiled":
        keys["tiled_mlp"] = True
    if effective["offload"] == "frozen":
        keys["layer_offloading"] = True  # for blocks whose class is a ...DecoderLayer
    if precision == "fp8":
        keys["fp8_config"] = {"recipe": "tensorwise"}
    keys |= _checkpointing(effective["checkpointing"])
    keys["torch_compile"] = effective["compile"] == "model"
    if keys["torch_compile"]:
        keys["torch_compile_backend"] = "inductor"
    if effective["compile_mode"] in CUDA_GRAPHS:
        keys["torch_compile_mode"] = effective["compile_mode"]
    return keys


LIGER_FLAGS = ("liger_rope", "liger_rms_norm", "liger_glu_activation")


def liger_keys(loss: Loss) -> dict[str, Any]:
    """Returns the keys of kernels `liger` with that form of the loss."""
    return {
        "plugins": [LIGER_PLUGIN],
        **dict.fromkeys(LIGER_FLAGS, True),
        "liger_fused_linear_cross_entropy": loss == "chunked",
    }


LIGER_PLUGIN = "axolotl.integrations.liger.LigerPlugin"


def _adapter(recipe: Recipe, effective: Mapping[str, Any]) -> dict[str, Any]:
    config = recipe.config
    if config.adapter == "none":
        return {}
    arguments = lora_arguments(config, recipe.workload)
    quantizes_experts = "-experts" in effective["base_weights"]
    is_4_bit = effective["base_weights"] in ("nf4", "nf4-experts")
    keys: dict[str, Any] = {
        "adapter": "qlora" if is_4_bit else "lora",
        "lora_r": arguments["r"],
        "lora_alpha": arguments["lora_alpha"],
        "lora_dropout": arguments["lora_dropout"],
        "peft_use_dora": config.adapter == "dora",
        # Whether adapters are in float32 beside 16-bit weights.
        "peft_autocast_adapter_dtype": not effective["precision"].startswith("bf16-true"),
        "load_in_4bit": is_4_bit,
        "load_in_8bit": effective["base_weights"].endswith(" by bitsandbytes"),
        "quantize_moe_experts": quantizes_experts,
        # Its kernels are on by default. Embeddings have no adapters.
        **dict.fromkeys(_LORA_KERNELS, effective["adapter_kernels"] == "fused"),
        "lora_embedding_kernel": False,
    }
    of_peft = {
        "use_rslora": "peft_use_rslora",
        "init_lora_weights": "peft_init_lora_weights",
        "rank_pattern": "lora_rank_pattern",
        "alpha_pattern": "lora_alpha_pattern",
    }
    keys |= {key: arguments[name] for name, key in of_peft.items() if name in arguments}
    if "modules_to_save" in arguments:
        keys["lora_modules_to_save"] = arguments["modules_to_save"]
    if config.adapter_targets == "experts":
        keys["lora_target_parameters"] = arguments["target_parameters"]
    if config.adapter_targets != "attention" and not quantizes_experts:
        keys["lora_target_linear"] = True
    else:  # beside quantized experts it refuses lora_target_linear, and peft takes all-linear
        keys["lora_target_modules"] = arguments["target_modules"]
    if is_4_bit:
        keys["bnb_config_kwargs"] = {
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
        }
    return keys


_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")

_SAVED_OPERATORS = [
    "attention",
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_grouped_mm",
    "aten::_scaled_mm",
]
"""Operators whose results `selective` saves (`autotune/shipped/selective.py`), as axolotl
names them."""


def _checkpointing(value: str) -> dict[str, Any]:
    if value == "none":
        return {"gradient_checkpointing": False}
    arguments: dict[str, Any] = {"use_reentrant": False}
    if value.startswith("every-"):
        arguments["every_n_layers"] = int(value.removeprefix("every-"))
    keys: dict[str, Any] = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": arguments,
    }
    if value in SELECTIVE:
        saved = _SAVED_OPERATORS if value == "selective" else ["attention"]
        keys["selective_checkpointing"] = {"save": saved, "save_sliding_window": True}
    return keys


def _notes(recipe: Recipe, effective: Mapping[str, Any]) -> Iterator[str]:
    workload = recipe.workload
    yield from user_script_note(workload)
    yield from text_notes(workload)
    if workload.model_source is None:
        yield (
            "name your Hugging Face model in base_model: the study's model has no folder or hub "
            "name"
        )
    if not workload.pretrained:
        yield (
            "reinit_weights: true draws new weights, as the study did; remove it to start from "
            "trained weights"
        )
    if workload.dataset == STANDARD_LIBRARY_TEXT:
        yield (
            "name your text in datasets: the study used the documentation of its Python "
            "installation"
        )
    if workload.packing == "packed":
        yield (
            "sample_packing fills a sequence with whole samples; a trial cuts one stream of all "
            "texts"
        )
    yield "transformers does not decay biases and norms; the trial decayed every weight"
    if effective["checkpointing"].startswith("every-"):
        yield (
            "every_n_layers needs transformers 5.16 or newer: older versions silently checkpoint "
            "every block"
        )
    if effective["precision"] == "fp8":
        yield (
            "fp8 needs torchao; accelerate leaves the first and the last linear layer of the model "
            "in bfloat16"
        )
    if recipe.optimizer.package == "torchao":
        yield f"{_NAMES[recipe.config.optimizer]['none']} needs torchao"
    if recipe.config.tensor_parallel > 1:
        yield (
            "tensor_parallel_size needs a model of transformers that has a plan for it, such as "
            "llama, qwen3 or phi3"
        )
    if recipe.config.adapter_targets == "experts":
        yield EXPERTS_NOTE
    if recipe.config.adapter_targets == "attention":
        yield (
            "lora_target_modules is a pattern of the names that models of transformers have in "
            "their attention: compare the number of trained parameters with the trial's"
        )


TARGET = Target(title="axolotl", versions=("0.19",), checked_with="axolotl 0.19.0", write=write)
