"""The numbers of LLaMA-Factory's YAML file: transformers parses them, and a table has its keys.

The techniques are those that the importer reads. `test_other_trainers_run.py` trains with the
package itself and compares it with this. The files of the model are in bfloat16, as the notes of
the export say.
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
from autotune.exporters.llamafactory_yaml import ATTENTION_NAMES
from autotune.spec.optimizers import OPTIMIZERS
from tests.exporters.readers import imported
from tests.exporters.readers.hugging_face import (
    FOLDER,
    optimizer_by_arguments,
    tiny_llama,
    workload_settings,
)
from tests.exporters.readers.key_table import check, defaults, load

TABLE = load("llamafactory")
OFF = (
    *("upcast_layernorm", "upcast_lmhead_output", "use_unsloth", "use_unsloth_gc", "shift_attn"),
    *("streaming", "neat_packing", "use_galore"),
    *("use_apollo", "use_badam", "use_adam_mini", "use_llama_pro", "fp8"),
    "gradient_checkpointing",
)
"""Keys that would change memory, speed or numbers, and that no export turns on."""


def read(export, version):
    assert version == "0.9"
    values = values_of(export)
    check_dataset(export, values)
    if values["finetuning_type"] == "lora":
        assert values["pissa_iter"] == 16
        assert values["lora_target"] in ("all", ",".join(ATTENTION_NAMES))
        assert not (values["use_dora"] and values["quantization_bit"]), "it stops at this"
    args, done = arguments(values), imported.read("llamafactory", export)
    if values["stage"] == "pt" and values["packing"] is True:
        done["sequence_length"] -= 1  # it would cut them so
    if not values["use_muon"]:
        optimizer = optimizer_by_arguments(args)
    else:
        # It takes the numbers of AdamW (`train/trainer_utils.py`: _create_muon_optimizer).
        settings = OPTIMIZERS["muon"].settings
        assert (args.adam_beta1, args.adam_beta2) == settings["betas"]
        assert (args.adam_epsilon, args.weight_decay) == (settings["eps"], settings["weight_decay"])
        optimizer = {"optimizer": "muon", "learning_rate": args.learning_rate}
    return imported.merged(
        workload_settings(args, devices=done["devices_per_trial"]), optimizer, done
    )


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
    assert values["tf32"] is not None, "transformers would leave it to torch"
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
    has_answers = {"messages", "response"} & set(entry["columns"])
    assert bool(has_answers) == (values["stage"] == "sft")


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
    names += (
        "lora_target",
        "use_dora",
        "use_rslora",
        "pissa_init",
        "additional_target",
        "quantization_bit",
        "double_quantization",
    )
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
            use_rslora=said["use_rslora"],
            init_lora_weights="pissa_niter_16" if said["pissa_init"] else True,
            modules_to_save=said["additional_target"] and said["additional_target"].split(","),
        )
        model = peft.get_peft_model(model, config).get_base_model()
    else:
        assert said["finetuning_type"] == "full"
        assert said["quantization_bit"] is None
    if not said["pure_bf16"]:
        for weight in model.parameters():
            weight.data = weight.data.float() if weight.requires_grad else weight.data
    return model
