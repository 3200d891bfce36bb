"""Unsloth: a script with `FastLanguageModel` and trl's SFTTrainer.

Unsloth replaces much of transformers and trl when it is imported. What matters here (versions
2026.10.9 of `unsloth` and `unsloth_zoo`):

- it computes in 16 bits in any case: without `bf16` and `fp16` it turns one of them on
  (`unsloth/models/rl.py`);
- what is trained is in float32 under autocast, or with `float32_mixed_precision=False` all weights
  are in bfloat16 without it; the weights beside adapters are in 16, 8 or 4 bits
  (`unsloth_zoo/training_utils.py`);
- it checkpoints every block unless `use_gradient_checkpointing=False`, and computes the loss in
  chunks (`unsloth/models/llama.py`);
- it chooses its attention among flash-attn, xformers and torch, and turns expandable segments on
  unless the environment turns them off (`unsloth_zoo/__init__.py`).

It needs a GPU to be imported, so that none of this was ever run here.
"""

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from autotune.exporters.adapters import (
    PATTERNS,
    lacks_beside_adapters,
    lacks_saved_dtype,
    lora_arguments,
    packages_note,
)
from autotune.exporters.devices import Closest
from autotune.exporters.export import Export, Target
from autotune.exporters.filled_rows import fill_rows
from autotune.exporters.reasons import OF_EXPERTS, Reason, Table, Values, reasons_in
from autotune.exporters.recipe import Recipe, in_docstring
from autotune.exporters.script_lines import text_notes, user_script_note
from autotune.exporters.trainer_keys import HAS, KEY_NOTES, closest_config, training_keys
from autotune.exporters.transformers.training_script import LOADERS
from autotune.spec.config import CHOICES, TrainingConfig
from autotune.spec.workload import SHAREGPT_COLUMN, STANDARD_LIBRARY_TEXT, Workload
from autotune.system.allocator_settings import for_any_torch

FILE = "unsloth_train.py"
_HAS: Values = {**HAS, "adapter_kernels": ("fused",), "adapter_targets": OF_EXPERTS}


def write(recipe: Recipe, version: str) -> Export:
    filled = fill_rows(recipe, "Unsloth", is_expressed=_reads(recipe.workload))
    on_devices = Closest(filled.recipe, "Unsloth", _HAS)
    on_devices.change("kernels", "none", "Unsloth has kernels of its own for them")
    why = "this script is for one device"
    on_devices.use_torch(why)
    on_devices.use_one_device(why)
    on_devices.leave_out_offload(why)
    recipe = on_devices.recipe
    closest, lacking_keys = closest_config(recipe, has_every_n_layers=False, has=_HAS)
    on_devices.lacks(_lacking(recipe, closest))
    on_devices.lacks(lacking_keys)
    return Export(
        files={FILE: _script(recipe, closest, on_devices.effective()), **filled.files},
        command=f"python {FILE}",
        before_use=(*filled.before_use, *_before_use(recipe)),
        unsupported=on_devices.unsupported(),
        notes=(*_notes(recipe), *filled.notes),
    )


_KERNELS = "Unsloth chooses its attention itself, among flash-attn, xformers and torch"
_COMPILES = "Unsloth compiles what it wants of the model itself"
_LACKING: Table = {
    "checkpointing": {
        "every-4": ("block", "it checkpoints every block or none"),
        "every-2": ("block", "it checkpoints every block or none"),
    },
    "compile": {"block": ("none", _COMPILES), "model": ("none", _COMPILES)},
    "compile_mode": {
        mode: ("default", _COMPILES) for mode in CHOICES["compile_mode"] if mode != "default"
    },
    "attention": dict.fromkeys(("flash", "efficient", "cudnn", "math"), ("auto", _KERNELS)),
    "loss": {
        "full": ("chunked", "it computes the loss in chunks of the logits, which takes less memory")
    },
    "activation_offload": {
        "cpu": (
            "none",
            'its use_gradient_checkpointing="unsloth" moves only what a block begins with',
        )
    },
}
_FUSED: Table = {
    "adapter_kernels": {
        "none": ("fused", "it computes layers with their LoRA as one, which takes less memory")
    }
}
"""Of LoRA without dropout: unsloth/models/llama.py, patch_peft_model."""
_IN_16_BITS = "Unsloth computes in 16 bits in any case, and has what is trained in float32"


_WHOLE = ("embed_tokens", "lm_head")
"""The modules that its get_peft_model trains whole; any other is an error."""


def _lacking(recipe: Recipe, closest: TrainingConfig) -> dict[str, Reason]:
    """Returns what Unsloth does differently, in addition to what transformers does."""
    config, workload = recipe.config, recipe.workload
    reasons = reasons_in(_LACKING, config)
    if config.memory_budget != 1.0:
        reasons["memory_budget"] = (1.0, f"{_COMPILES}: a budget is for blocks as a whole")
    is_mixed = closest.precision in ("bf16-mixed", "fp16-mixed")
    if not is_mixed and (config.adapter != "none" or closest.precision != "bf16-true"):
        reasons["precision"] = ("bf16-mixed", _IN_16_BITS)
    if config.adapter == "none":
        return reasons
    if config.adapter == "lora" and workload.adapter_dropout == 0:
        reasons |= reasons_in(_FUSED, config)
    whole = tuple(name for name in workload.modules_to_save if name in _WHOLE)
    if whole != workload.modules_to_save:
        why = f"its modules_to_save takes {' and '.join(_WHOLE)} alone"
        reasons["modules_to_save"] = (whole, why)
    why = "its adapters have one rank and one alpha, and begin at random"
    lacking = (*PATTERNS, "adapter_init")
    reasons |= lacks_beside_adapters(config, workload, why, settings=lacking)
    why = "it has all that is trained in float32"
    reasons |= lacks_saved_dtype(config, workload, made="float32", why=why)
    in_16_bits = "fp16" if closest.precision == "fp16-mixed" else "bf16"
    if config.base_weights == "int8":
        why = "its load_in_8bit is LLM.int8() of bitsandbytes, which treats outliers apart"
        reasons["base_weights"] = ("int8 by bitsandbytes", why)
    elif config.base_weights in ("trained", "fp8"):
        why = "Unsloth has frozen weights in 16 bits, unless they are quantized by bitsandbytes"
        reasons["base_weights"] = (in_16_bits, why)
    return reasons


def _loading(recipe: Recipe, effective: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `FastLanguageModel.from_pretrained`."""
    is_trained_whole = effective["adapter"] == "none"
    return {
        "model_name": recipe.workload.model_source or "PUT-YOUR-MODEL-HERE",
        "use_exact_model_name": True,
        "max_seq_length": effective["sequence_length"],
        "dtype": "float16" if effective["precision"] == "fp16-mixed" else "bfloat16",
        "load_in_4bit": effective["base_weights"] == "nf4",
        "load_in_8bit": effective["base_weights"] == "int8 by bitsandbytes",
        "full_finetuning": is_trained_whole,
        "float32_mixed_precision": effective["precision"] != "bf16-true",
        "offload_embedding": False,
        "use_gradient_checkpointing": effective["checkpointing"] == "block",
        "random_state": effective["seed"],
    }


def _adapter(
    effective: Mapping[str, Any], config: TrainingConfig, workload: Workload
) -> dict[str, Any]:
    """Returns the arguments of `FastLanguageModel.get_peft_model`; none without adapters."""
    if config.adapter == "none":
        return {}
    arguments = lora_arguments(config, workload)
    saved = effective["modules_to_save"]
    return {
        "r": arguments["r"],
        "lora_alpha": arguments["lora_alpha"],
        "lora_dropout": arguments["lora_dropout"],
        "target_modules": _ATTENTION
        if config.adapter_targets == "attention"
        else [*_ATTENTION, *_FEED_FORWARD],
        # It finds experts by gate_proj, up_proj and down_proj unless told of none.
        "target_parameters": arguments.get("target_parameters", []),
        "use_dora": config.adapter == "dora",
        "use_rslora": workload.adapter_scaling == "rslora",
        **({"modules_to_save": [*saved]} if saved else {}),
        "use_gradient_checkpointing": effective["checkpointing"] == "block",
        "random_state": effective["seed"],
    }


_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_FEED_FORWARD = ["gate_proj", "up_proj", "down_proj"]
"""Names of the linear layers in the models that Unsloth is made for."""


def _training(recipe: Recipe, closest: TrainingConfig, precision: str) -> dict[str, Any]:
    """Returns the arguments of trl's SFTConfig."""
    keys, prompts = training_keys(recipe, closest), recipe.workload.prompts
    for name in ("use_cpu", "gradient_checkpointing_kwargs", "torch_compile_backend"):
        keys.pop(name, None)
    is_packed = recipe.workload.packing == "packed" and not recipe.workload.learns_answers
    return {
        "output_dir": "trainer_output",
        **keys,
        "bf16": precision == "bf16-mixed",
        "fp16": precision == "fp16-mixed",
        "tf32": False,
        "torch_compile": False,
        "max_length": recipe.workload.sequence_length,
        "packing": is_packed,
        **({"packing_strategy": "wrapped"} if is_packed else {}),
        "padding_free": False,
        "dataset_text_field": _text_column(recipe.workload),
        **({} if prompts is None else {"completion_only_loss": prompts.learned != "all"}),
    }


def _reads(workload: Workload) -> bool:
    """Returns whether trl reads the columns of a prompt as they are."""
    return workload.prompts is not None and workload.prompts.name == "prompt-completion"


def _text_column(workload: Workload) -> str | None:
    if workload.prompt_format is not None:
        return None  # prompt and completion
    if workload.chat_column is not None:
        return "text"
    return workload.text_column or "text"


def _script(recipe: Recipe, closest: TrainingConfig, effective: Mapping[str, Any]) -> str:
    workload, config = recipe.workload, recipe.config
    is_chat = workload.chat_column is not None
    allocator = for_any_torch(expandable=config.allocator == "expandable")
    variables = "\n".join(f'os.environ["{name}"] = "{value}"' for name, value in allocator.items())
    names = "train_on_responses_only"
    if workload.chat_column == SHAREGPT_COLUMN:
        names = f"standardize_sharegpt, {names}"
    imports = f"from unsloth.chat_templates import {names}\n" if is_chat else ""
    adapter = _adapter(effective, config, workload)
    adapts = "model = FastLanguageModel.get_peft_model(model, **ADAPTER)\n" if adapter else ""
    learns = "trainer = train_on_responses_only(trainer)  # the answers alone\n" if is_chat else ""
    return f'''"""Trains with Unsloth as {in_docstring(recipe.origin)}. It needs a GPU.

For unsloth 2026.10.
"""

import os

{variables}

from unsloth import FastLanguageModel  # before trl and transformers, which it changes
{imports}
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

{_constant("MODEL", _loading(recipe, effective))}
{_constant("ADAPTER", adapter)}
{_constant("TRAINING", _training(recipe, closest, effective["precision"]))}

model, tokenizer = FastLanguageModel.from_pretrained(**MODEL)
{adapts}{_data(workload)}trainer = SFTTrainer(
    model=model, processing_class=tokenizer, train_dataset=texts, args=SFTConfig(**TRAINING)
)
{learns}trainer.train()
trainer.save_model()
'''


def _constant(name: str, values: Mapping[str, Any]) -> str:
    if not values:
        return f"{name} = {{}}"
    lines = [f"    {key!a}: {value!a}," for key, value in values.items()]
    return "\n".join([f"{name} = {{", *lines, "}"])


def _data(workload: Workload) -> str:
    """Returns the lines that make `texts`, whose text is in the column that trl reads."""
    name, split = workload.dataset, workload.dataset_split
    kind = LOADERS.get(PurePath(name).suffix.lower())
    if name == STANDARD_LIBRARY_TEXT:
        loaded = 'load_dataset("text", data_files="PUT-YOUR-TEXT-HERE.txt", split="train")'
    elif kind is not None:
        loaded = f"load_dataset({kind!r}, data_files={name!a}, split={split!a})"
    else:
        loaded = f"load_dataset({name!a}, {workload.dataset_config!a}, split={split!a})"
    if workload.chat_column is None:
        return f"texts = {loaded}\n"
    lines = [f"rows = {loaded}"]
    column = workload.chat_column
    if column == SHAREGPT_COLUMN:
        lines.append("rows = standardize_sharegpt(rows)")
    return "\n".join(
        [
            *lines,
            "texts = rows.map(",
            "    lambda row: {",
            f'        "text": tokenizer.apply_chat_template(row[{column!a}], tokenize=False)',
            "    }",
            ")\n",
        ]
    )


def _before_use(recipe: Recipe) -> tuple[str, ...]:
    if recipe.device_type == "cuda":
        return ()
    return ("Unsloth needs a GPU: on the CPU of this trial it cannot even be imported",)


def _notes(recipe: Recipe) -> Iterator[str]:
    workload, config = recipe.workload, recipe.config
    yield (
        "Unsloth 2026.10.9 needs a GPU to be imported: this script was never run, and follows its "
        "source; its kernels keep other tensors than a trial, so that memory and speed differ"
    )
    yield from KEY_NOTES
    yield from user_script_note(workload)
    yield from text_notes(workload)
    if workload.model_source is None:
        yield "name your Hugging Face model in MODEL: the study's has no folder or hub name"
    if not workload.pretrained and workload.script is None:
        yield (
            f"the trial's model was {workload.describe_model()} from random weights: Unsloth needs "
            "a model with saved weights"
        )
    if workload.packing == "padded" or workload.learns_answers:
        yield "a batch is as long as its longest text; those of a trial are all sequence_length"
    if workload.chat_column is not None:
        yield (
            "train_on_responses_only finds the answers by the chat template, and learns every one, "
            "also those with weight 0, train false or loss false"
        )
    if config.adapter != "none":
        experts = " and target_parameters those of experts in most models of transformers"
        yield (
            "target_modules has the names of linear layers in llama, mistral, qwen and gemma"
            f"{experts if config.adapter_targets == 'experts' else ''}: compare the number of "
            "trained parameters with the trial's"
        )
    yield from packages_note(config)


TARGET = Target(
    title="Unsloth",
    versions=("2026.10",),
    checked_with="unsloth 2026.10.9 and unsloth_zoo 2026.10.9, their source",
    write=write,
)
