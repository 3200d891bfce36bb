"""What ms-swift does with its YAML file, by a table of its keys and what its source says.

`test_other_trainers_run.py` trains with the package itself and compares it with this.
"""

import dataclasses
import functools
import json
import shlex

import peft
import torch
import yaml
from transformers import TrainingArguments

from tests.exporters.readers.accelerate_reader import parsed_automatic
from tests.exporters.readers.adapters import adapter_settings, trained_dtype
from tests.exporters.readers.devices import (
    ONE_DEVICE,
    by_deepspeed,
    by_fsdp2,
    precision_by_deepspeed,
)
from tests.exporters.readers.hugging_face import (
    optimizer_by_arguments,
    parse_json,
    tiny_llama,
    workload_settings,
)
from tests.exporters.readers.key_table import check, defaults, load
from tests.exporters.readers.launcher import (
    allocator_of,
    settings_of_this_process,
    settings_undone,
)

TABLE = load("ms_swift")
OFF = (
    *("use_swift_lora", "lorap_lr_ratio", "packing", "streaming"),
    *("padding_free", "freeze_parameters_ratio", "optimizer", "loss_type"),
    *("enable_dft_loss", "use_galore", "lisa_activated_layers", "use_logits_to_keep"),
)
"""Keys that would change memory, speed or numbers, and that no export turns on."""


def read(export, version):
    assert version == "4.6"
    environment, values = values_of(export)
    process, devices = process_settings(export, values, environment), devices_by(export, values)
    args, model = arguments(values), model_of(values)
    assert process["tf32"] == values["tf32"]
    adapters = adapter_settings(model, model.model.layers, "self_attn")
    if values["quant_method"] is not None:
        assert values["quant_method"] == "bnb"
        assert values["bnb_4bit_use_double_quant"]
        kinds = {4: values["bnb_4bit_quant_type"], 8: "int8 by bitsandbytes"}
        adapters["base_weights"] = kinds[values["quant_bits"]]
    elif adapters["adapter"] != "none" and values["torch_dtype"] == "float16":
        adapters["base_weights"] = "fp16"
    precision = "tf32" if process.pop("tf32") else "fp32"
    if values["bf16"] or values["fp16"]:
        precision = "bf16-mixed" if values["bf16"] else "fp16-mixed"
        assert trained_dtype(model) == torch.float32, "what is trained would be in 16 bits"
    elif trained_dtype(model) == torch.bfloat16:
        precision = "bf16-true"
    if devices["engine"] == "deepspeed":
        assert not precision.endswith("-mixed"), "16-bit keys would turn DeepSpeed's on"
        precision = precision_by_deepspeed(json.loads(export.files[values["deepspeed"]]))
    elif devices["sharding"] in ("zero2", "zero3") and precision.endswith("-mixed"):
        precision += " by FSDP2"
    return {
        **adapters,
        **workload_settings(args, devices=devices["devices_per_trial"]),
        **optimizer_by_arguments(args),
        **process,
        **devices,
        "precision": precision,
        "compile": "model" if args.torch_compile else "none",
        "loss": "chunked" if values["use_liger_kernel"] else "full",
        "kernels": "liger" if values["use_liger_kernel"] else "none",
        "checkpointing": checkpointing(values),
        "sequence_length": values["max_length"],
    }


def values_of(export):
    """Returns (environment, {key: value}), with ms-swift's own defaults for what is not said."""
    started, subcommand, file = shlex.split(export.command)
    assert (started, file) == ("swift", "ms_swift.yaml")
    written = yaml.safe_load(export.files[file])
    environment = written.pop("ENV", {})
    for key, value in written.items():
        check(key, value, TABLE["keys"])
    others = TABLE["inner"]["pt"] if subcommand == "pt" else {}
    values = {**defaults(TABLE["keys"]), **others, **written}
    if "gradient_accumulation_steps" not in written:
        raise AssertionError("ms-swift would choose a global batch of 16")
    for key in ("bf16", "fp16", "torch_dtype", "learning_rate", "gradient_checkpointing"):
        assert key in written, f"ms-swift's default of {key} follows the model, or is another's"
    assert not any(values[key] for key in OFF)
    assert values["use_logits_to_keep"] is False, "it would make logits for answers only"
    assert (values["attn_impl"], values["use_hf"]) == ("sdpa", True)
    assert values["truncation_strategy"] in ("split", "right"), "longer texts would be left out"
    assert values["truncation_strategy"] == "right" or not values["use_chat_template"]
    targets = set(values["columns"].values())
    if subcommand == "pt":
        assert targets == {"response"}
    else:
        assert targets == {"messages"} or {"query", "response"} <= targets or targets >= IS_ALPACA
    for file in values["custom_dataset_info"] or ():
        for entry in json.loads(export.files[file]):
            assert set(entry) <= set(TABLE["inner"]["dataset_info"])
    return environment, values


IS_ALPACA = {"instruction", "input", "response"}
"""Columns by which it takes rows for those of Alpaca."""


def process_settings(export, values, environment):
    """Returns the settings that the file of Python makes, and the allocator of `ENV`."""
    with settings_undone():
        for file in values["external_plugins"]:
            exec(compile(export.files[file], file, "exec"), {"__name__": "settings"})
        process = settings_of_this_process()
    return {**process, "allocator": allocator_of(environment)}


def devices_by(export, values):
    environment = yaml.safe_load(export.files["ms_swift.yaml"]).get("ENV", {})
    count = environment.get("NPROC_PER_NODE")
    # Without a number of processes it would spread the model over all devices that it sees.
    assert values["use_cpu"] or count or environment["CUDA_VISIBLE_DEVICES"] == "0"
    if values["deepspeed"] is not None:
        assert count is not None
        return by_deepspeed(parsed_automatic(export.files[values["deepspeed"]]), devices=count)
    count = count or 1
    if values["fsdp"] is None:
        sharding = "ddp" if count > 1 else "none"
        return {**ONE_DEVICE, "devices_per_trial": count, "sharding": sharding}
    content = json.loads(export.files[values["fsdp"]])
    settings = content["fsdp_config"]
    assert settings["fsdp_version"] == 2
    assert ("offload" in content["fsdp"].split()) == settings["cpu_offload"]
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}
    reduced = [dtype for key, dtype in mixed.items() if values[key]]
    return by_fsdp2(
        reshards=settings["reshard_after_forward"],
        groups=1,
        group_size=count,
        reduced_in=reduced[0] if reduced else getattr(torch, values["torch_dtype"]),
        on_host=settings["cpu_offload"],
        devices=count,
    )


def arguments(values):
    """Returns transformers' part of the keys as it parses them."""
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    not_here = ("deepspeed", "fsdp", "report_to", "output_dir")
    shared = {name: values[name] for name in values if name in known and name not in not_here}
    return _arguments(json.dumps(shared, sort_keys=True))


@functools.cache
def _arguments(text):
    return parse_json(text)


def model_of(values):
    """Returns the model as ms-swift has it when training begins (`swift/tuners/peft.py`)."""
    names = ("tuner_type", "tuner_backend", "torch_dtype", "lora_rank", "lora_alpha")
    names += ("lora_dropout", "lora_dtype", "lora_bias", "init_weights", "target_modules")
    names += ("target_regex", "use_dora", "use_rslora", "modules_to_save")
    return _model(json.dumps({name: values[name] for name in names}))


@functools.cache
def _model(text):
    said = json.loads(text)
    model = tiny_llama(dtype=getattr(torch, said["torch_dtype"]))
    if said["tuner_type"] == "full":
        return model
    assert (said["tuner_type"], said["tuner_backend"]) == ("lora", "peft")
    assert said["lora_bias"] == "none"
    targets = said["target_regex"]
    if targets is None:
        assert said["target_modules"] == ["all-linear"]
        targets = "all-linear"
    config = peft.LoraConfig(
        r=said["lora_rank"],
        lora_alpha=said["lora_alpha"],
        lora_dropout=said["lora_dropout"],
        target_modules=targets,
        use_dora=said["use_dora"],
        use_rslora=said["use_rslora"],
        init_lora_weights=said["init_weights"] == "true" or said["init_weights"],
        modules_to_save=said["modules_to_save"] or None,
    )
    adapted = peft.get_peft_model(model, config).get_base_model()
    # Of DoRA the magnitudes keep the model's format, as a note of the export says.
    for name, weight in adapted.named_parameters():
        if ".lora_" in name:
            weight.data = weight.data.to(getattr(torch, said["lora_dtype"]))
    return adapted


def checkpointing(values):
    if not values["gradient_checkpointing"]:
        return "none"
    # Any other keyword would reach the blocks themselves, which ignore it.
    assert values["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
    return "block"
