"""axolotl: a YAML file for fine-tuning a Hugging Face model.

Three things go their own way there. `bf16: true` means weights in bfloat16 with autocast around
them, so that neither mixed precision over float32 weights nor bfloat16 alone can be had. Expandable
segments are on unless the environment says otherwise. And unknown keys are ignored without a word.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import yaml

from autotune.exporters.export import Export, Refusal, Target
from autotune.exporters.launch import FILE as LAUNCHER
from autotune.exporters.launch import is_needed, launcher
from autotune.exporters.named_schedule import named_schedule, warmup_refusal
from autotune.exporters.recipe import OPTIMIZER_SETTINGS, Recipe
from autotune.exporters.script_lines import own_script_note, text_notes
from autotune.exporters.transformers.training_script import LOADERS
from autotune.spec.workload import STANDARD_LIBRARY_TEXT, Workload

FILE = "axolotl.yaml"


def write(recipe: Recipe, version: str) -> Export:
    refusals = tuple(_refusals(recipe))
    done = {**recipe.settings(), **{refusal.setting: refusal.instead for refusal in refusals}}
    files = {FILE: _text(recipe, done)}
    command = f"axolotl train {FILE}"
    of_the_process = _left_to_the_launcher(recipe)
    if is_needed(of_the_process.config):
        files[LAUNCHER] = launcher(of_the_process)
        command = f"accelerate launch {LAUNCHER} -m axolotl.cli.train {FILE}"
    if done["allocator"] == "default":
        command = f"PYTORCH_ALLOC_CONF=expandable_segments:False {command}"
    return Export(
        files=files, command=command, refusals=refusals, notes=tuple(_notes(recipe, done))
    )


def _left_to_the_launcher(recipe: Recipe) -> Recipe:
    """The recipe with what axolotl sets by itself at its default."""
    precision = "fp32" if recipe.config.precision == "tf32" else recipe.config.precision
    config = dataclasses.replace(recipe.config, precision=precision, allocator="default")
    return dataclasses.replace(recipe, config=config)


def _refusals(recipe: Recipe) -> Iterator[Refusal]:
    config = recipe.config
    yield from _optimizer_refusals(recipe)
    found = {
        "precision": _PRECISIONS.get(config.precision),
        "checkpointing": _CHECKPOINTING.get(config.checkpointing),
        "compile": _BY_BLOCK if config.compile == "block" else None,
        "loss": _FULL if config.loss == "chunked" else None,
        "activation_offload": _OFFLOAD if config.activation_offload == "cpu" else None,
    }
    for setting, refused in found.items():
        if refused is not None:
            instead, why = refused
            yield Refusal(
                setting=setting, value=recipe.settings()[setting], instead=instead, why=why
            )
    yield from warmup_refusal(recipe, least=_LEAST_WARMUP)


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
    "fp16-mixed": (
        "fp32",
        "axolotl loads the weights in float16 wherever it computes in it, which cannot be scaled",
    ),
}
"""{precision that it does not do: (what the file does instead, why)}."""

_CHECKPOINTING = {
    "attention": ("block", "axolotl checkpoints whole blocks, not their attention parts alone"),
    "sqrt": ("block", "axolotl checkpoints blocks one by one, not in segments"),
}
_BY_BLOCK = (
    "model",
    "transformers compiles the model as a whole; only accelerate has a key for its blocks",
)
_FULL = (
    "full",
    "axolotl's chunked_cross_entropy makes all logits at once; its plugin axolotl.integrations.liger.LigerPlugin with "
    "liger_fused_linear_cross_entropy: true does not, for the models that it knows",
)
_LEAST_WARMUP = 2
"""axolotl makes a warm-up of 1 step one of 2."""
_OFFLOAD = (
    "none",
    "axolotl offloads activations only in the place of checkpointing (activation_offloading: true)",
)


def _optimizer_refusals(recipe: Recipe) -> Iterator[Refusal]:
    config = recipe.config
    optimizer, why = _OPTIMIZERS.get(config.optimizer, (config.optimizer, ""))
    if why:
        yield Refusal(setting="optimizer", value=config.optimizer, instead=optimizer, why=why)
    if config.optimizer == "adafactor":
        theirs = {
            "learning_rate": recipe.workload.learning_rate_of(optimizer),
            "weight_decay": OPTIMIZER_SETTINGS[optimizer]["weight_decay"],
        }
        for setting, instead in theirs.items():
            if (value := recipe.settings()[setting]) != instead:
                why = f"it belongs to {config.optimizer}; the file has what trials of {optimizer} train with"
                yield Refusal(setting=setting, value=value, instead=instead, why=why)
    if config.optimizer_fusion not in (names := _NAMES[optimizer]):
        why = _FUSIONS[config.optimizer_fusion]
        yield Refusal(
            setting="optimizer_fusion", value=config.optimizer_fusion, instead=[*names][-1], why=why
        )


_FUSIONS = {
    "none": "transformers says nothing of it, and torch then batches the update on CUDA",
    "foreach": "transformers has only one form of this optimizer",
    "kernel": "transformers has a fused kernel only for adamw",
    "backward": "transformers has no step in backward, so that all gradients stand at once",
}


_OPTIMIZERS = {
    "sgd": (
        "sgd without momentum",
        "transformers makes SGD without momentum: no state, and slower to learn",
    ),
    "adafactor": (
        "adafactor-fixed-rate",
        "transformers' Adafactor does not scale its rate by the size of a weight",
    ),
}
_NAMES: Mapping[str, Mapping[str, str]] = {
    "adamw": {"foreach": "adamw_torch", "kernel": "adamw_torch_fused"},
    "sgd without momentum": {"foreach": "sgd"},
    "adafactor-fixed-rate": {"none": "adafactor"},
    "adamw-8bit": {"none": "adamw_torch_8bit"},
}
"""{optimizer: {fusion: its name}}; torch batches updates on CUDA where nothing is said."""


def _text(recipe: Recipe, done: Mapping[str, Any]) -> str:
    keys = {**_model_and_text(recipe.workload), **_numbers(recipe, done), **_techniques(done)}
    dumped = yaml.safe_dump(
        keys, sort_keys=False, default_flow_style=False, width=100, allow_unicode=True
    )
    return f"# {recipe.origin}\n# For axolotl 0.19.\n{dumped}"


def _model_and_text(workload: Workload) -> dict[str, Any]:
    is_packed = workload.packing == "packed"
    return {
        "base_model": workload.model_source or "PUT-YOUR-MODEL-HERE",
        "reinit_weights": not workload.pretrained,
        "attn_implementation": "sdpa",
        "datasets": [_dataset(workload)],
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
    where = {
        "ds_type": kind,
        "name": workload.dataset_config,
        "split": None if kind and workload.dataset_split == "train" else workload.dataset_split,
    }
    said = {name: value for name, value in where.items() if value is not None}
    return {
        "path": workload.dataset,
        **said,
        "type": "completion",
        "field": workload.text_column or "text",
    }


def _numbers(recipe: Recipe, done: Mapping[str, Any]) -> dict[str, Any]:
    optimizer, fusion = done["optimizer"], done["optimizer_fusion"]
    adam = OPTIMIZER_SETTINGS["adamw"]
    schedule = named_schedule(done)
    return {
        "micro_batch_size": done["micro_batch_size"],
        "gradient_accumulation_steps": done["global_batch"] // done["micro_batch_size"],
        "max_steps": done["steps"],
        "seed": done["seed"],
        "optimizer": _NAMES[optimizer][fusion],
        "learning_rate": done["learning_rate"],
        "weight_decay": done["weight_decay"],
        **(
            {
                "adam_beta1": adam["betas"][0],
                "adam_beta2": adam["betas"][1],
                "adam_epsilon": adam["eps"],
            }
            if optimizer.startswith("adamw")
            else {}
        ),
        "lr_scheduler": schedule.name,
        "lr_scheduler_kwargs": dict(schedule.keywords),
        "warmup_steps": schedule.warmup_steps,
        "max_grad_norm": done["gradient_clipping"] or 0.0,
    }


def _techniques(done: Mapping[str, Any]) -> dict[str, Any]:
    """Every one of the precisions is said: what is left out is `auto`, which follows the device."""
    precision = done["precision"]
    return {
        "bf16": precision == "bf16-true under autocast",
        "fp16": False,
        "tf32": precision == "tf32",
        "fp8": precision == "fp8",
        **({"fp8_config": {"recipe": "tensorwise"}} if precision == "fp8" else {}),
        **_checkpointing(done["checkpointing"]),
        "torch_compile": done["compile"] == "model",
        **({"torch_compile_backend": "inductor"} if done["compile"] == "model" else {}),
    }


_KEPT_OPERATORS = [
    "attention",
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_grouped_mm",
    "aten::_scaled_mm",
]
"""What `selective` keeps (`autotune/techniques/checkpointing.py`), in axolotl's words."""


def _checkpointing(value: str) -> dict[str, Any]:
    if value == "none":
        return {"gradient_checkpointing": False}
    every = (
        {"every_n_layers": int(value.removeprefix("every-"))} if value.startswith("every-") else {}
    )
    keys: dict[str, Any] = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False, **every},
    }
    if value == "selective":
        keys["selective_checkpointing"] = {"save": _KEPT_OPERATORS, "save_sliding_window": True}
    return keys


def _notes(recipe: Recipe, done: Mapping[str, Any]) -> Iterator[str]:
    workload = recipe.workload
    yield from own_script_note(workload)
    yield from text_notes(workload)
    if workload.model_source is None:
        yield "name your Hugging Face model in base_model: the study's model has no folder or hub name"
    if not workload.pretrained:
        yield "reinit_weights: true draws new weights, as the study did; leave it out to go on from trained ones"
    if workload.dataset == STANDARD_LIBRARY_TEXT:
        yield "name your text in datasets: the study's is the documentation of the Python on its machine"
    if workload.packing == "packed":
        yield "sample_packing fills a sequence with whole samples; a trial cuts one stream of all texts"
    yield "transformers decays no biases and no norms, a trial every weight"
    if done["checkpointing"].startswith("every-"):
        yield "every_n_layers needs transformers 5.16 or newer; older ones checkpoint every block without a word"
    if done["precision"] == "fp8":
        yield "fp8 needs torchao; accelerate leaves the model's first linear layer in bfloat16, as well as the last"
    if done["optimizer"] == "adamw-8bit":
        yield "adamw_torch_8bit needs torchao"


TARGET = Target(title="axolotl", versions=("0.19",), checked_with="axolotl 0.19.0", write=write)
