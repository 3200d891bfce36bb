"""What LLaMA-Factory does with its YAML file, by a table of its keys and what its source says.

`test_other_trainers_run.py` trains with the package itself and compares it with this. The files of
the model are in bfloat16, as the notes of the export say.
"""

import dataclasses
import functools
import json
import shlex

import peft
import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments

from autotune.exporters import accelerate_config
from autotune.exporters.deepspeed_config import AUTO_FILE
from tests.exporters.readers.accelerate_reader import devices_of
from tests.exporters.readers.adapters import adapter_settings, trained_dtype
from tests.exporters.readers.devices import ONE_DEVICE, precision_by_deepspeed
from tests.exporters.readers.hugging_face import FOLDER, tiny_llama, workload_settings
from tests.exporters.readers.key_table import check, defaults, load
from tests.exporters.readers.launcher import process_settings
from tests.exporters.readers.trl import optimizer_by_arguments

TABLE = load("llamafactory")
OFF = (
    *("upcast_layernorm", "upcast_lmhead_output", "use_unsloth", "use_unsloth_gc", "shift_attn"),
    *("streaming", "neat_packing", "use_rslora", "pissa_init", "use_galore"),
    *("use_apollo", "use_badam", "use_adam_mini", "use_muon", "use_llama_pro", "fp8"),
    *("gradient_checkpointing", "train_on_prompt", "mask_history"),
)
"""Keys that would change memory, speed or numbers, and that no export turns on."""


def read(export, version):
    assert version == "0.9"
    values = values_of(export)
    check_dataset(export, values)
    args = arguments(values)
    model = model_of(values)
    process, devices = process_settings(export), devices_by(export, model)
    assert process["tf32"] == values["tf32"]
    precision = "tf32" if process.pop("tf32") else "fp32"
    adapters = adapter_settings(model, model.model.layers, "self_attn")
    if values["quantization_bit"] is not None:
        kinds = {4: values["quantization_type"], 8: "int8 by bitsandbytes"}
        adapters["base_weights"] = kinds[values["quantization_bit"]]
    if values["bf16"] or values["fp16"]:
        precision = "bf16-mixed" if values["bf16"] else "fp16-mixed"
    elif adapters["adapter"] != "none":
        assert trained_dtype(model) == torch.float32
        precision = "bf16-true, adapters in fp32"
        if adapters["base_weights"] == "bf16":
            adapters["base_weights"] = "trained"
    elif trained_dtype(model) == torch.bfloat16:
        precision = "bf16-true"
    if devices["engine"] == "deepspeed":
        assert precision in ("fp32", "tf32", "bf16-true"), "16-bit keys would turn DeepSpeed's on"
        if precision != "bf16-true":
            precision = precision_by_deepspeed(json.loads(export.files[AUTO_FILE]))
    elif devices["sharding"] in ("zero2", "zero3", "hsdp") and precision.endswith("-mixed"):
        precision += " by FSDP2"
    assert values["stage"] == "pt" or values["packing"] in (True, False)
    return {
        **adapters,
        **workload_settings(args, devices=devices["devices_per_trial"]),
        **optimizer_by_arguments(args),
        **process,
        **devices,
        "precision": precision,
        "compile": "model" if args.torch_compile else "none",
        # Liger's loss is among its kernels (`model/model_utils/liger_kernel.py`).
        "loss": "chunked" if values["enable_liger_kernel"] else "full",
        "kernels": "liger" if values["enable_liger_kernel"] else "none",
        "checkpointing": "none" if values["disable_gradient_checkpointing"] else "block",
        "activation_offload": "none",
        # With `packing: true` before pretraining the sequences would be one token shorter.
        "sequence_length": values["cutoff_len"]
        - (values["stage"] == "pt" and values["packing"] is True),
    }


def values_of(export):
    """Returns {key: value} of the file, with LLaMA-Factory's own defaults for the rest."""
    written = yaml.safe_load(export.files["llamafactory.yaml"])
    for key, value in written.items():
        check(key, value, TABLE["keys"])
    values = {**defaults(TABLE["keys"]), **written}
    assert not any(values[key] for key in OFF)
    assert values["do_train"], "without it nothing is trained"
    assert values["flash_attn"] == "sdpa"
    assert not values["use_reentrant_gc"], "it is on unless it is turned off"
    on_cpu = values["use_cpu"]
    assert not (on_cpu and values["pure_bf16"]), "it stops on a CPU"
    visible = shlex.split(export.command)[0] == "CUDA_VISIBLE_DEVICES=0"
    assert visible == (not on_cpu and accelerate_config.FILE not in export.files)
    return values


def check_dataset(export, values):
    """Fail where LLaMA-Factory would not find the data, or would drop a key of its entry."""
    assert values["dataset_dir"] == ".", "the command runs in the folder of the files"
    entry = json.loads(export.files["dataset_info.json"])[values["dataset"]]
    known = TABLE["inner"]["dataset_info"]
    for names in (entry, entry["columns"], entry.get("tags", {})):
        assert set(names) <= set(known)
    assert ("messages" in entry["columns"]) == (values["stage"] == "sft")


@functools.cache
def _arguments(shared):
    content = {**json.loads(shared), "use_cpu": True, "tf32": False, "output_dir": FOLDER}
    return HfArgumentParser(TrainingArguments).parse_dict(content, allow_extra_keys=False)[0]


def arguments(values):
    """Returns transformers' part of the keys as it parses them, on a CPU, which rejects tf32."""
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    shared = {name: value for name, value in values.items() if name in known}
    return _arguments(json.dumps(shared, sort_keys=True))


def model_of(values):
    """Returns the model as LLaMA-Factory has it when training begins (`model/adapter.py`)."""
    names = ("finetuning_type", "pure_bf16", "lora_rank", "lora_alpha", "lora_dropout")
    names += ("lora_target", "use_dora", "quantization_bit", "double_quantization")
    return _model(json.dumps({name: values[name] for name in names}))


@functools.cache
def _model(text):
    said = json.loads(text)
    model = tiny_llama(dtype=torch.bfloat16)
    if said["finetuning_type"] == "lora":
        assert said["double_quantization"]
        assert not (said["use_dora"] and said["quantization_bit"]), "it stops at this"
        targets = said["lora_target"].split(",")
        if targets == ["all"]:
            targets = sorted(
                {
                    name.rpartition(".")[2]
                    for name, part in model.named_modules()
                    if isinstance(part, torch.nn.Linear) and name != "lm_head"
                }
            )
        config = peft.LoraConfig(
            r=said["lora_rank"],
            lora_alpha=said["lora_alpha"],
            lora_dropout=said["lora_dropout"],
            target_modules=targets,
            use_dora=said["use_dora"],
        )
        model = peft.get_peft_model(model, config).get_base_model()
    else:
        assert said["finetuning_type"] == "full"
        assert said["quantization_bit"] is None
    if not said["pure_bf16"]:
        for weight in model.parameters():
            weight.data = weight.data.float() if weight.requires_grad else weight.data
    return model


def devices_by(export, model):
    if accelerate_config.FILE not in export.files:
        assert "accelerate" not in export.command
        return ONE_DEVICE
    return devices_of(export, weights_dtype=trained_dtype(model))
