"""What axolotl does with its YAML file, by a table of its keys: it drops unknown ones itself."""

import re
import shlex

import torch
import yaml

from tests.exporters.readers.accelerate_reader import parsed_automatic
from tests.exporters.readers.adapters import UNTRAINED
from tests.exporters.readers.devices import ONE_DEVICE, by_deepspeed, by_fsdp2
from tests.exporters.readers.key_table import check, defaults, load
from tests.exporters.readers.launcher import process_settings
from tests.exporters.readers.named_rates import schedule_named

OPTIMIZERS = {
    "adamw_torch": ("adamw", "foreach"),  # on CUDA, where torch batches by itself
    "adamw_torch_fused": ("adamw", "kernel"),
    "adamw_torch_8bit": ("adamw-8bit", "none"),
    "ao_adamw_fp8": ("adamw-fp8", "none"),
    "paged_adamw_32bit": ("paged-adamw", "none"),
    "paged_adamw_8bit": ("paged-adamw-8bit", "none"),
    "adafactor": ("adafactor-fixed-rate", "none"),
    "sgd": ("sgd without momentum", "foreach"),
}
MATRIX_PRODUCTS = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_grouped_mm",
    "aten::_scaled_mm",
}


def read(export, version):
    assert version == "0.19"
    table = load("axolotl")
    written = yaml.safe_load(export.files["axolotl.yaml"])
    _check(written, table)
    values = {**defaults(table["keys"]), **written}
    environment, process = _environment(export), process_settings(export)
    assert not process["tf32"], "axolotl has a key of its own"
    assert process["allocator"] == "default", "axolotl's own choice, or the environment's"
    optimizer, fusion = OPTIMIZERS[values["optimizer"]]
    devices = _devices(values, export)
    replicas = devices["devices_per_trial"] // devices["tensor_parallel"]
    if "adamw" in optimizer:
        assert (values["adam_beta1"], values["adam_beta2"], values["adam_epsilon"]) == (
            0.9,
            0.999,
            1e-8,
        )
    return {
        "precision": _precision(values, devices),
        **_adapter(values),
        **devices,
        "optimizer": optimizer,
        "micro_batch_size": values["micro_batch_size"],
        "checkpointing": _checkpointing(values),
        "compile": "model" if values["torch_compile"] else "none",
        "memory_budget": process["memory_budget"],
        "optimizer_fusion": fusion,
        "allocator": "default"
        if environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
        else "expandable",
        "attention": process["attention"],
        "loss": "chunked" if values["liger_fused_linear_cross_entropy"] else "full",
        "kernels": _kernels(values),
        "activation_offload": "none",
        "learning_rate": values["learning_rate"],
        "weight_decay": values["weight_decay"],
        **schedule_named(
            values["lr_scheduler"],
            warmup=2 if values["warmup_steps"] == 1 else values["warmup_steps"],  # axolotl does so
            steps=values["max_steps"],
            keywords=values["lr_scheduler_kwargs"],
        ),
        "steps": values["max_steps"],
        "global_batch": values["micro_batch_size"]
        * values["gradient_accumulation_steps"]
        * replicas,
        "sequence_length": values["sequence_len"],
        # What is not said is transformers' 1.0.
        "gradient_clipping": {None: 1.0, 0.0: None}.get(
            values["max_grad_norm"], values["max_grad_norm"]
        ),
        "seed": values["seed"],
    }


def _kernels(values):
    flags = {bool(values[key]) for key in ("liger_rope", "liger_rms_norm", "liger_glu_activation")}
    plugins = values["plugins"] or []
    assert flags == {"axolotl.integrations.liger.LigerPlugin" in plugins}
    return "liger" if plugins else "none"


def _check(written, table):
    for key, value in written.items():
        check(key, value, table["keys"])
        for one in value if isinstance(value, list) else [value]:
            for name, inner in one.items() if key in table["inner"] else ():
                check(name, inner, table["inner"][key])
    for key in ("bf16", "fp16", "tf32", "gradient_checkpointing", "torch_compile", "max_grad_norm"):
        assert key in written, f"axolotl's default of {key} follows the device, or is another's"


def _environment(export):
    tokens = shlex.split(export.command)
    assert ("autotune_launch.py" in tokens) == ("autotune_launch.py" in export.files)
    return dict(token.split("=", 1) for token in tokens if re.match(r"[A-Z_]+=", token))


def _devices(values, export):
    devices = [word for word in shlex.split(export.command) if "nproc_per_node" in word]
    count = int(devices[0].partition("=")[2]) if devices else 1
    split = values["tensor_parallel_size"] or 1
    done = {**ONE_DEVICE, "devices_per_trial": count, "tensor_parallel": split}
    if values["deepspeed"] is not None:
        parsed = parsed_automatic(export.files[values["deepspeed"]])
        assert not parsed.torch_autocast_enabled, "bf16 turns DeepSpeed's own on"
        return by_deepspeed(parsed, devices=count)
    if values["fsdp_config"] is None:
        assert values["dp_shard_size"] is None
        return {**done, "sharding": "ddp" if count > split else "none"}
    assert values["fsdp_version"] == 2
    settings, groups = values["fsdp_config"], values["dp_replicate_size"] or 1
    return {
        **by_fsdp2(
            reshards=settings["reshard_after_forward"],
            groups=groups,
            group_size=values["dp_shard_size"] or count // split,
            reduced_in=torch.bfloat16 if values["bf16"] else torch.float32,
            on_host=settings["offload_params"],
            devices=count,
        ),
        "tensor_parallel": split,
    }


def _precision(values, devices):
    assert values["attn_implementation"] == "sdpa"
    if values["bf16"] and devices["engine"] == "deepspeed":
        return "bf16-true with a float32 copy"
    if values["bf16"] and values["fsdp_config"] is not None:
        return "bf16-mixed by FSDP2"
    if values["fp8"]:
        assert values["fp8_config"] == {"recipe": "tensorwise"}
        assert not values["bf16"]
        return "fp8"
    has_adapters = values.get("adapter") is not None
    if values["fp16"]:
        assert has_adapters
        assert values["peft_autocast_adapter_dtype"], "float16 gradients cannot be scaled"
        return "fp16-mixed"
    if values["bf16"] and has_adapters and values["peft_autocast_adapter_dtype"]:
        return "bf16-mixed"
    if values["bf16"]:
        return "bf16-true under autocast"
    return "tf32" if values["tf32"] else "fp32"


def _adapter(values):
    if values.get("adapter") is None:
        return UNTRAINED
    assert (values["lora_alpha"], values["lora_dropout"]) == (16, 0.0)
    kernels = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
    assert not any(values[name] for name in kernels), "they are on unless they are turned off"
    assert (values["adapter"] == "qlora") == values["load_in_4bit"]
    assert bool(values.get("lora_target_linear")) != bool(values.get("lora_target_modules"))
    return {
        "adapter": "dora" if values["peft_use_dora"] else "lora",
        "adapter_rank": values["lora_r"],
        "adapter_targets": "all-linear" if values.get("lora_target_linear") else "attention",
        "base_weights": _base_weights(values),
    }


def _base_weights(values):
    if values["load_in_4bit"]:
        settings = values["bnb_config_kwargs"]
        assert settings == {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        return "nf4"
    if values["load_in_8bit"]:
        return "int8 by bitsandbytes"
    if values["fp16"]:
        return "fp16"
    # What is trained has the same format unless it is kept in float32.
    return "bf16" if values["bf16"] and values["peft_autocast_adapter_dtype"] else "trained"


def _checkpointing(values):
    if not values["gradient_checkpointing"]:
        return "none"
    keywords = dict(values["gradient_checkpointing_kwargs"])
    assert keywords.pop("use_reentrant") is False
    if selective := values["selective_checkpointing"]:
        assert selective == {"save": selective["save"], "save_sliding_window": True}
        assert set(selective["save"]) == {"attention", *MATRIX_PRODUCTS}
        assert not keywords
        return "selective"
    every = keywords.pop("every_n_layers", 1)
    return "block" if every == 1 else f"every-{every}"
