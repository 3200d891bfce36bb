"""axolotl: its YAML file.

`bf16: true` means weights in bfloat16, under autocast; adapters are in float32 beside them.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from autotune.errors import InvalidInput, suggestion
from autotune.importers import transformers_keys
from autotune.importers.data_files import named_by
from autotune.importers.finished import KERNEL_OF_ADAPTERS, devices_of, finished
from autotune.importers.imported import ImportedTraining, Trainer
from autotune.importers.key_table import load_table
from autotune.importers.keys_of_file import KeysOfFile
from autotune.importers.several_devices import Plan, Sharing
from autotune.spec.config import QUANTIZED_WEIGHTS, SHARDED_WEIGHTS
from autotune.spec.prompt_format import PromptFormat, named, of_axolotl, template_of

ATTENTION_FLAGS = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
    "xformers_attention": "xformers",
}
"""{key of earlier versions: what it stands for}."""
_FUSED_LOSSES = ("liger_fused_linear_cross_entropy", "cut_cross_entropy")
"""Keys of plugins whose loss never makes the logits of a whole batch."""


def read(keys: KeysOfFile) -> ImportedTraining:
    """Returns the training. Raises InvalidInput."""
    shared = _sharing(keys)
    devices = devices_of(keys, _stated_devices(keys, shared.plan))
    replicas = max(1, devices // (shared.plan.tensor_parallel if shared.plan else 1))
    adapter = _adapter(keys)
    optimizer = transformers_keys.optimizer(keys, "optimizer", has_adapters=bool(adapter))
    micro_batch_size = keys.whole_number("micro_batch_size", least=1) or 1
    config: dict[str, Any] = {
        "precision": _precision(keys, has_adapters=bool(adapter)),
        **_checkpointing(keys, is_by_fsdp=shared.checkpoints),
        **transformers_keys.compilation(keys, is_by_mode=False),
        **optimizer,
        "micro_batch_size": micro_batch_size,
        "allocator": "expandable",  # axolotl's own choice
        "attention": _attention(keys),
        "loss": "chunked" if _has_fused_loss(keys) else "full",
        "feed_forward": "tiled" if keys.flag("tiled_mlp") else "whole",
        **_kernels(keys),
        **_layer_offloading(keys, has_adapters=bool(adapter)),
        **adapter,
    }
    if devices > 1 and _divides_weights(shared.plan) and config["precision"] == "bf16-true":
        config["precision"] = "bf16-mixed"  # with FSDP weights are in float32
    workload: dict[str, Any] = {
        "model": keys.text("base_model"),
        "pretrained": not keys.flag("reinit_weights"),
        "tokenizer": "model",
        "global_batch": micro_batch_size * _accumulation(keys, micro_batch_size) * replicas,
        "devices_per_trial": devices if devices > 1 else None,
        "sequence_length": keys.whole_number("sequence_len", least=1),
        "packing": "packed" if keys.flag("sample_packing") else "padded",
        **transformers_keys.learning(
            keys,
            optimizer=optimizer["optimizer"],
            adapter=config.get("adapter", "none"),
            schedule_key="lr_scheduler",
        ),
        **_dataset(keys),
    }
    if adapter:
        workload |= transformers_keys.beside_adapters(
            keys,
            dropout="lora_dropout",
            rslora="peft_use_rslora",
            modules="lora_modules_to_save",
            dtype="base",
        )
        workload |= {
            "adapter_rank_pattern": dict(keys.table_of("lora_rank_pattern")),
            "adapter_alpha_pattern": dict(keys.table_of("lora_alpha_pattern")),
            **transformers_keys.adapter_start(
                keys, "peft_init_lora_weights", keys["peft_init_lora_weights"]
            ),
        }
    plan = transformers_keys.added_up(shared.plan, config["precision"])
    return finished(keys, workload=workload, config=config, plan=plan)


def _layer_offloading(keys: KeysOfFile, *, has_adapters: bool) -> dict[str, str]:
    if not keys.flag("layer_offloading"):
        return {}
    if not has_adapters:
        keys.refuse("layer_offloading", "it moves frozen layers, and without adapters none are")
        return {}
    return {"offload": "frozen"}


def _sharing(keys: KeysOfFile) -> Sharing:
    """Returns what devices share out: FSDP by groups, or beside split matrices."""
    shared = transformers_keys.sharing(keys, is_on_by_table=True)
    split = keys.whole_number("tensor_parallel_size", least=1) or 1
    replicate = keys.whole_number("dp_replicate_size", least=1) or 1
    group = keys.whole_number("dp_shard_size", least=1) or 1
    plan = shared.plan
    if plan is None and split > 1:
        plan = Plan(key="tensor_parallel_size")
    if plan is None:
        return shared
    if split > 1:
        plan = replace(plan, tensor_parallel=split)
    if replicate > 1 and group > 1 and plan.engine == "torch":
        plan = replace(plan, sharding="hsdp", sharding_group=group)
    return replace(shared, plan=plan)


def _stated_devices(keys: KeysOfFile, plan: Plan | None) -> int | None:
    """Returns the product of the sizes in the file, None where it leaves one to the devices."""
    if plan is not None and plan.sharding == "hsdp":
        replicate = keys.whole_number("dp_replicate_size") or 1
        return replicate * plan.sharding_group * plan.tensor_parallel
    sizes = (keys.whole_number("dp_shard_size") or 1) * (plan.tensor_parallel if plan else 1)
    return sizes if sizes > 1 else None


def _divides_weights(plan: Plan | None) -> bool:
    return plan is not None and plan.engine == "torch" and plan.sharding in SHARDED_WEIGHTS


def _has_fused_loss(keys: KeysOfFile) -> bool:
    """Returns whether a plugin makes the loss; that of cut cross entropy does unless it is off."""
    if not keys.says("cut_cross_entropy"):
        plugins = keys["plugins"] or ()
        plugins = plugins if isinstance(plugins, list) else [plugins]
        if any("CutCrossEntropyPlugin" in str(one) for one in plugins):
            return True
    return any(keys.flag(key) for key in _FUSED_LOSSES)


_NORMS = "liger_rms_norm"
_ACTIVATIONS = ("liger_glu_activation", "liger_swiglu")
"""The second is the name of earlier versions."""


def _kernels(keys: KeysOfFile) -> dict[str, str]:
    """Returns the choice for Liger's norms and activations, of which a file may have one."""
    on = [key for key in (_NORMS, *_ACTIVATIONS) if keys.flag(key)]
    if not on:
        return {}
    if len(on) == 1:
        keys.refuse(on[0], transformers_keys.LIGER_IN_PART)
    return transformers_keys.kernels(keys, on[0])


def _accumulation(keys: KeysOfFile, micro_batch_size: int) -> int:
    """Returns the micro batches of an optimizer step: given, or by the sequences of one."""
    batch = keys.whole_number("batch_size", least=1)
    if batch is not None and not keys.says("gradient_accumulation_steps"):
        return max(1, batch // micro_batch_size)
    return keys.whole_number("gradient_accumulation_steps", least=1) or 1


def _precision(keys: KeysOfFile, *, has_adapters: bool) -> str:
    # `auto` is bfloat16 on every GPU that has it.
    is_bf16 = _is_on_or_auto(keys, "bf16") and not keys.flag("fp16")
    if keys.flag("fp8"):
        return "fp8"
    if keys.flag("fp16") or keys.flag("float16"):
        if not has_adapters:
            keys.refuse("fp16", "weights of trials with fp16-mixed are in float32")
        return "fp16-mixed"
    if is_bf16 or keys.flag("bfloat16"):
        has_float32 = has_adapters and keys.flag("peft_autocast_adapter_dtype")
        return "bf16-mixed" if has_float32 else "bf16-true"
    return "tf32" if _is_on_or_auto(keys, "tf32") else "fp32"


def _is_on_or_auto(keys: KeysOfFile, key: str) -> bool:
    return keys[key] in ("auto", "full") or keys.flag(key)


_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")


def _checkpointing(keys: KeysOfFile, *, is_by_fsdp: bool) -> dict[str, str]:
    offloading = keys["activation_offloading"]
    offloads = "cpu" if offloading not in (None, False) else "none"
    if offloading in ("disk", "hidden_states"):
        keys.refuse("activation_offloading", "trials move all large activations to the host")
    value = keys["gradient_checkpointing"]
    if value in ("offload", "offload_disk", "unsloth"):
        keys.refuse("gradient_checkpointing", "trials recompute blocks and keep their inputs")
        return {"checkpointing": "block"}
    if keys["selective_checkpointing"] and value is True:
        settings = keys["selective_checkpointing"]
        saved = settings.get("save") if isinstance(settings, Mapping) else None
        saved = saved if isinstance(saved, list) else [saved]
        kept = "save-attention" if saved in ([None], ["attention"]) else "selective"
        if kept == "selective" and not {"attention", *_PRODUCTS} <= set(map(str, saved)):
            keys.refuse(
                "selective_checkpointing",
                "trials keep what attention and all matrix products have computed",
            )
        return {"checkpointing": kept, "activation_offload": offloads}
    checkpointing = transformers_keys.checkpointing(
        keys, "gradient_checkpointing", of_arguments="gradient_checkpointing_kwargs"
    )
    if is_by_fsdp:
        checkpointing = "block"
    return {"checkpointing": checkpointing, "activation_offload": offloads}


def _attention(keys: KeysOfFile) -> str:
    if name := keys.text("attn_implementation"):
        return transformers_keys.attention(keys, "attn_implementation", name)
    for key, name in ATTENTION_FLAGS.items():
        if keys.flag(key):
            return transformers_keys.attention(keys, key, name)
    return "auto"


def _adapter(keys: KeysOfFile) -> dict[str, Any]:
    kind = keys.text("adapter")
    if kind is None:
        return {}
    if kind not in ("lora", "qlora"):
        raise keys.cannot_train(
            "adapter",
            "autotune has adapters of the kinds lora and dora",
            hint="save a copy of the file with adapter: lora",
        )
    base_weights = "bf16"
    if not _is_on_or_auto(keys, "bf16") and not any(map(keys.flag, _IN_16_BITS)):
        base_weights = "trained"
    if keys.flag("load_in_8bit"):
        base_weights = "int8"
    if keys.flag("load_in_4bit"):
        base_weights = "nf4"
    if base_weights in QUANTIZED_WEIGHTS and keys.flag("quantize_moe_experts"):
        base_weights += "-experts"
    layers = "all-linear"
    if not keys.flag("lora_target_linear") and (names := keys["lora_target_modules"]):
        layers = transformers_keys.adapter_layers(keys, "lora_target_modules", names)
    return {
        "adapter": "dora" if keys.flag("peft_use_dora") else "lora",
        "adapter_rank": keys.whole_number("lora_r", least=1) or 8,
        "adapter_targets": transformers_keys.adapted_experts(keys, layers=layers),
        "adapter_kernels": _adapter_kernels(keys),
        "base_weights": base_weights,
    }


_IN_16_BITS = ("bfloat16", "fp16", "float16")
_LORA_KERNELS = (KERNEL_OF_ADAPTERS, "lora_qkv_kernel", "lora_o_kernel")


def _adapter_kernels(keys: KeysOfFile) -> str:
    """Returns the choice for kernels of adapters, which are on where a file says nothing of them.

    Source: axolotl 0.19.0, src/axolotl/utils/schemas/config.py: check_auto_enable_lora_kernels.
    """
    on = [key for key in _LORA_KERNELS if keys.flag(key)]
    said = [keys.content(key) for key in (*_LORA_KERNELS, "lora_embedding_kernel")]
    if on or any(one is not None for one in said):
        if 0 < len(on) < len(_LORA_KERNELS):
            keys.refuse(on[0], "trials have kernels for all layers with adapters, or for none")
        return "fused" if on else "none"
    is_8_bit_lora = keys["adapter"] == "lora" and keys.flag("load_in_8bit")
    is_fsdp1 = keys.content("fsdp_config") and str(keys.content("fsdp_version")) != "2"
    others = ("trust_remote_code", "rl", "nvfp4_merge_aware")
    is_off = is_8_bit_lora or is_fsdp1 or any(keys.content(key) for key in others)
    return "none" if is_off else "fused"


_CHAT_TYPES = ("chat_template", "sharegpt")
_TEXT_TYPES = ("completion", "pretrain")


def _dataset(keys: KeysOfFile) -> dict[str, Any]:
    """Returns the first dataset that rows of text or of conversations are in."""
    for key in ("datasets", "pretraining_dataset"):
        entries = keys[key] or []
        entries = [entries] if isinstance(entries, str | dict) else entries
        if not isinstance(entries, list):
            raise keys.invalid(key, "a list of datasets")
        if entries:
            return _first(keys, key, entries)
    return {}


def _first(keys: KeysOfFile, key: str, entries: list[Any]) -> dict[str, Any]:
    first = {"path": entries[0]} if isinstance(entries[0], str) else entries[0]
    if not isinstance(first, dict) or not isinstance(named_by(first), str):
        raise keys.invalid(key, "a list of datasets, each with its path")
    if len(entries) > 1:
        keys.refuse(key, "trials read the first of several datasets")
    path = named_by(first)
    settings = {"dataset": path, "dataset_config": first.get("name"), **_rows(keys, key, first)}
    if not PurePath(path).suffix and first.get("split"):
        settings["dataset_split"] = str(first["split"])
    return settings


_ALIASES = {
    "alpaca_instruct": "alpaca",
    "alpaca_instruct.load": "alpaca",
    "alpaca:instruct": "alpaca",
}
"""{type: another one that is the same}."""


def _rows(keys: KeysOfFile, key: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a row of a dataset is: a text, a conversation, or columns of a prompt."""
    learns_prompts = keys.flag("train_on_inputs")
    given = entry.get("type", "completion")
    if isinstance(given, Mapping):
        return {"prompt_format": _learned(_own_format(keys, given), learns_prompts)}
    name = _ALIASES.get(str(given), str(given))
    kind = name.partition(".")[0].partition(":")[0]
    if of_axolotl(name):
        return {"prompt_format": _learned(named(name), learns_prompts)}
    if kind in _TEXT_TYPES:
        return {"text_column": entry.get("field") or entry.get("text_column") or "text"}
    if kind not in _CHAT_TYPES:
        keys.refuse(
            key,
            f"autotune has no prompt of type {name}: say it by --prompt-format, or name "
            "--text-column or another --dataset",
        )
        return {}
    if learns_prompts:
        keys.refuse("train_on_inputs", "trials learn the answers of conversations alone")
    column = entry.get("field_messages", "messages" if kind == "chat_template" else None)
    format = _names_in_messages(entry, column or "messages")
    return {"text_column": column} if format is None else {"prompt_format": format.to_dict()}


def _learned(format: PromptFormat, learns_prompts: bool) -> dict[str, Any]:
    return {**format.to_dict(), "learned": "all" if learns_prompts else format.learned}


_OWN = {
    "field_system": "system",
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "system_prompt": "",
    "format": "{instruction} {input} ",
    "no_input_format": "{instruction} ",
    "system_format": "{system}",
}
"""{key of a `type` that is a table: its default}. Source: axolotl 0.19,
src/axolotl/prompt_strategies/user_defined.py, UserDefinedDatasetConfig."""


def _own_format(keys: KeysOfFile, given: Mapping[str, Any]) -> PromptFormat:
    """Returns the format that a file describes itself. Raises InvalidInput."""
    for name, value in given.items():
        if name not in _OWN or not isinstance(value, str | None):
            raise InvalidInput(
                f"{keys.file} has type.{name}: {value!r:.60} in datasets",
                hint=suggestion(str(name), _OWN, otherwise=f"give {name} as a text"),
            )
    of = {
        name: default if given.get(name) is None else given[name] for name, default in _OWN.items()
    }
    columns = {name: of[f"field_{name}"] for name in ("instruction", "input", "system")}
    asked = {name: columns[name] for name in ("instruction", "input")}
    default_system = of["system_format"].replace("{system}", of["system_prompt"])
    return PromptFormat(
        prompt=template_of(of["format"], asked),
        shorter_prompt=template_of(of["no_input_format"], {"instruction": columns["instruction"]}),
        answer=f"{{{of['field_output']}}}",
        system=template_of(of["system_format"], {"system": columns["system"]}),
        default_system=template_of(default_system) if of["system_prompt"] else "",
    )


_USUAL_NAMES = (("role", "content"), ("from", "value"))
"""Keys of the role and the content of a message that need no format."""


def _names_in_messages(entry: Mapping[str, Any], column: str) -> PromptFormat | None:
    """Returns the format of messages with other names than usual, None for the usual ones."""
    mapped = entry.get("message_property_mappings")
    mapped = mapped if isinstance(mapped, Mapping) else {}
    role = str(mapped.get("role") or entry.get("message_field_role") or "role")
    content = str(mapped.get("content") or entry.get("message_field_content") or "content")
    roles = entry.get("roles")
    roles = roles if isinstance(roles, Mapping) else {}
    if (role, content) in _USUAL_NAMES and not roles:
        return None
    return PromptFormat(
        messages=column,
        role=role,
        content=content,
        roles={
            str(source): str(target)
            for target, sources in roles.items()
            for source in (sources if isinstance(sources, list) else [sources])
        },
    )


TRAINER = Trainer(table=load_table("axolotl"), signs=frozenset(("base_model",)), read=read)
