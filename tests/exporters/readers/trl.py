"""`sft.yaml` as `trl sft --config` parses it.

trl makes the loss in chunks whatever the file says: `test_trl_export.py` sees it do so.
"""

import contextlib
import dataclasses
import functools
import json
import shlex
import tempfile
from pathlib import Path

import torch
import transformers.modeling_utils
import yaml
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer
from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    SFTConfig,
    SFTTrainer,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)
from trl.cli.accelerate_config import resolve_accelerate_config_argument

from autotune.exporters import accelerate_config
from autotune.exporters.deepspeed_config import AUTO_FILE
from tests.exporters.readers.accelerate_reader import devices_of
from tests.exporters.readers.adapters import adapter_settings
from tests.exporters.readers.devices import ONE_DEVICE, precision_by_deepspeed
from tests.exporters.readers.hugging_face import (
    FOLDER,
    autocast_by_arguments,
    checkpointing_of,
    saved_llama,
    tiny_llama,
    workload_settings,
)
from tests.exporters.readers.launcher import process_settings


def tokenizer():
    words = {word: index for index, word in enumerate(["<end>", "<unknown>", *"abcdefgh"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", pad_token="<end>", unk_token="<unknown>"
    )


def parse(text, **changes):
    """Returns (script arguments, SFTConfig, ModelConfig, datasets); fails on unknown keys.

    Runs on a CPU, which rejects tf32.
    """
    content = {
        **yaml.safe_load(text),
        "use_cpu": True,
        "report_to": "none",
        "output_dir": FOLDER,
        **changes,
    }
    content["tf32"] = False
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sft.yaml"
        file.write_text(yaml.safe_dump(content))
        parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
        return parser.parse_args_and_config(args=["--config", str(file)])


def read(export, version):
    process = process_settings(export)
    assert yaml.safe_load(export.files["sft.yaml"])["tf32"] == process["tf32"]
    on_one = _read(export.files["sft.yaml"], process.pop("tf32"))
    weights_dtype = yaml.safe_load(export.files["sft.yaml"])["model_init_kwargs"]["dtype"]
    devices, precision = _devices(export, weights_dtype), on_one["precision"]
    if devices["engine"] == "deepspeed":
        assert precision == "fp32", "16-bit keys would turn those of DeepSpeed on"
        precision = precision_by_deepspeed(json.loads(export.files[AUTO_FILE]))
    elif devices["sharding"] in ("zero2", "zero3", "hsdp") and precision.endswith("-mixed"):
        precision += " by FSDP2"
    return {
        **on_one,
        **process,
        **devices,
        "precision": precision,
        "global_batch": on_one["global_batch"] * devices["devices_per_trial"],
    }


def _devices(export, weights_dtype):
    """Returns what accelerate does, to which trl hands its file."""
    if accelerate_config.FILE not in export.files:
        return ONE_DEVICE
    words = shlex.split(export.command)
    if words[0] == "trl":
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            Path(accelerate_config.FILE).touch()
            options = resolve_accelerate_config_argument(words[4:])
        words = ["accelerate", "launch", *options, "sft.py"]
    launched = dataclasses.replace(export, command=shlex.join(words))
    return devices_of(launched, weights_dtype=getattr(torch, weights_dtype))


@functools.cache
def _read(text, is_tf32):
    _, args, model_args, _ = parse(text)
    assert args.packing is False or args.packing_strategy == "wrapped"
    options = args.model_init_kwargs
    assert options["attn_implementation"] == "sdpa"
    model = tiny_llama(dtype=getattr(torch, options["dtype"]))
    adapted = adapted_model(args, model_args)
    precision = autocast_by_arguments(args, next(model.parameters()).dtype)
    if adapted is not None:
        precision = precision_with_adapters(args, adapted)
        model = adapted
    adapters = adapter_settings(model, model.model.layers, "self_attn")
    if precision == "bf16-true, adapters in fp32" and adapters["base_weights"] == "bf16":
        adapters = {**adapters, "base_weights": "trained"}
    return {
        **adapters,
        **workload_settings(args),
        **optimizer_by_arguments(args),
        "precision": "tf32" if is_tf32 and precision == "fp32" else precision,
        "compile": "model" if args.torch_compile else "none",
        "loss": "chunked",
        "kernels": "none" if not args.use_liger_kernel else "liger",
        "checkpointing": checkpointing_by_arguments(args, model),
        "activation_offload": "cpu" if args.activation_offloading else "none",
        "sequence_length": args.max_length,
    }


def adapted_model(args, model_args):
    """Returns the model with the adapters that a real SFTTrainer adds; None without adapters."""
    peft_config = get_peft_config(model_args)
    if peft_config is None:
        return None
    data = Dataset.from_dict({"input_ids": [[1, 2, 3]], "labels": [[1, 2, 3]]})
    trainer = SFTTrainer(
        str(saved_llama()),
        args,
        train_dataset=data,
        processing_class=tokenizer(),
        peft_config=peft_config,
        quantization_config=get_quantization_config(model_args),
    )
    return trainer.model.get_base_model()


def precision_with_adapters(args, model):
    """Name the number format of adapters where it is not that of a trial."""
    # The magnitudes of DoRA keep theirs.
    [trained] = {
        weight.dtype
        for name, weight in model.named_parameters()
        if weight.requires_grad and "magnitude" not in name
    }
    autocast = autocast_by_arguments(args, model.model.norm.weight.dtype)
    wanted = torch.bfloat16 if autocast == "bf16-true" else torch.float32
    if trained == wanted:
        return autocast
    return f"{autocast}, adapters in {'bf16' if trained == torch.bfloat16 else 'fp32'}"


def optimizer_by_arguments(args):
    """By what transformers makes of them, where nothing said means torch's own choice on CUDA."""
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(args)
    known = {
        "AdamW": "adamw",
        "SGD": "sgd",
        "AdamW8bit": "adamw-8bit",
        "Adafactor": "adafactor-fixed-rate",
    }
    if kind.__module__.startswith("bitsandbytes."):
        assert settings["is_paged"]
        bits = settings["optim_bits"]
        known["AdamW"] = "paged-adamw" if bits == 32 else f"paged-adamw-{bits}bit"
    assert kind.__module__.partition(".")[0] in ("torch", "torchao", "transformers", "bitsandbytes")
    assert settings.get("momentum", 0.9) == 0.9
    assert settings.get("betas", (0.9, 0.999)) == (0.9, 0.999)
    by_torch = "foreach" if kind in (torch.optim.AdamW, torch.optim.SGD) else "none"
    return {
        "optimizer": known[kind.__name__],
        "optimizer_fusion": "kernel" if settings.get("fused") else by_torch,
        "learning_rate": settings["lr"],
    }


def checkpointing_by_arguments(args, model):
    """As Trainer.train begins."""

    def begin():
        if args.gradient_checkpointing:
            options = dict(args.gradient_checkpointing_kwargs)
            every = options.pop("every_n_layers", 1)
            model.activation_checkpointing_enable(
                every_n_layers=every, activation_checkpointing_kwargs=options
            )

    return checkpointing_of(model, [transformers.modeling_utils], begin)
