"""`autotune_trainer.py`, imported and its trainer made; and `training_args.json`, parsed."""

import functools
import json
import os
import shlex

import torch
import torch._functorch.config
import transformers.modeling_utils
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import LlamaForCausalLM, TrainingArguments

from tests.exporters.readers.accelerate_reader import parsed_automatic
from tests.exporters.readers.adapters import adapter_settings, offload_of, trained_dtype
from tests.exporters.readers.devices import (
    ONE_DEVICE,
    by_deepspeed,
    by_fsdp2,
    precision_by_deepspeed,
)
from tests.exporters.readers.hugging_face import (
    FOLDER,
    SWITCHES,
    attention_of_process,
    autocast_by_arguments,
    autocast_where_needed,
    checkpointing_of,
    compile_of,
    imported,
    saved_llama,
    tiny_llama,
    uncompiled,
    workload_settings,
)
from tests.exporters.readers.launcher import allocator_of, compile_mode_of_this_process
from tests.exporters.readers.optimizers import BY_CLASS
from tests.exporters.readers.pytorch_script import (
    accumulation_dtype_of,
    activation_budget_of,
    feed_forward_of,
    with_experts,
)


def read(export, version):
    if version == "5.23":
        assert "gradient_checkpointing" not in export.files["training_args.json"]
    words = shlex.split(export.command)
    devices = int(words[3]) if words[0] == "torchrun" else 1
    text = export.files["autotune_trainer.py"]
    return with_experts(_read(text, devices), text)


@functools.cache
def _read(code, devices):
    with imported(code) as module:
        of_process = {
            "memory_budget": float(torch._functorch.config.activation_memory_budget),
            "compile_mode": compile_mode_of_this_process(),
            "attention": attention_of_process(),
            "allocator": allocator_of(os.environ),
        }
        assert module.model_kwargs()["attn_implementation"] == "sdpa"
        for flag in SWITCHES.values():  # a CPU has not all of these kernels
            getattr(torch.backends.cuda, f"enable_{flag}_sdp")(True)
        return {**of_process, **_read_trainer(module, devices)}


def _read_trainer(module, devices):
    # Without the keys of devices: this process has no others, and no GPU.
    alone = {"fsdp": None, "fsdp_config": None, "deepspeed": None}
    args = module.training_arguments(FOLDER, use_cpu=True, report_to="none", **alone)
    shared = devices_by_keys(module.SETTINGS, devices, module.WEIGHTS_DTYPE)
    model = tiny_llama()
    if "quantization_config" in module.model_kwargs():
        model = LlamaForCausalLM.from_pretrained(saved_llama(), **module.model_kwargs())
    trainer = module.AutotuneTrainer(model=model, args=args)
    return {
        "sequence_length": len(
            module.sequences(["a text " * 50], lambda text: [1] * len(text))[0]["input_ids"]
        ),
        **workload_settings(args, devices=devices),
        **shared,
        **optimizer_of(trainer.create_optimizer()),
        **rates_of(trainer),
        **offload_of(trainer.model.model.layers),
        "precision": precision_of(module, trainer, shared),
        **adapter_settings(trainer.model, trainer.model.model.layers, "self_attn"),
        "compile": compile_of(trainer.model),
        "loss": loss_of(uncompiled(trainer.model)),
        "feed_forward": feed_forward_of(trainer.model.model.layers, module),
        "gradient_accumulation_dtype": accumulation_dtype_of(trainer.model),
        "activation_budget": activation_budget_of(trainer.model.model.layers, module),
        "kernels": kernels_of(args),
        "activation_offload": activation_offload_of(trainer),
        "checkpointing": "none"
        if hasattr(module, "KEPT")
        else checkpointing_by_trainer(trainer, module),
    }


def kernels_of(args):
    """Returns what the Trainer puts into its model before it trains, without Liger's loss."""
    if not args.use_liger_kernel:
        return "none"
    assert args.liger_kernel_config == {"cross_entropy": False, "fused_linear_cross_entropy": False}
    return "liger"


def optimizer_of(optimizer, *, adafactor="adafactor"):
    """Its name and how it steps, from what was made. Weight decay is that of every parameter."""
    in_backward = type(optimizer).__name__ == "SteppedInBackward"
    inner = optimizer._single if in_backward else optimizer
    inner = inner._inner if type(inner).__name__ == "StochasticallyRounded" else inner
    group, *_ = inner.param_groups
    fusion = {(False, False): "none", (True, False): "foreach", (False, True): "kernel"}[
        group.get("foreach", False) or False, group.get("fused", False) or False
    ]
    decay = group.get("weight_decay", 0.01 if type(inner).__name__ == "AdafactorFixedRate" else 0.0)
    return {
        "optimizer": {**BY_CLASS, "Adafactor": adafactor}[type(inner).__name__],
        "optimizer_fusion": "backward" if in_backward else fusion,
        "weight_decay": decay,
    }


def rates_of(trainer):
    """The schedule by the rates of all steps, not by its name."""
    scheduler = trainer.create_scheduler(trainer.args.max_steps)
    share, rate = scheduler.lr_lambdas[0], scheduler.base_lrs[0]
    shares = [share(step) for step in range(trainer.args.max_steps + 1)]
    warmup_steps = round(1 / shares[0])
    assert shares[:warmup_steps] == [(step + 1) / warmup_steps for step in range(warmup_steps)]
    schedule = {1.0: "constant", 0.1: "cosine"}.get(round(shares[-1], 6), shares)
    return {
        "learning_rate": float(f"{float(rate):.6g}"),
        "learning_rate_warmup_steps": warmup_steps,
        "schedule": schedule,
    }


def devices_by_keys(keys, devices, weights_dtype):
    """Returns what the keys of TrainingArguments have accelerate do, by its own plugin."""
    if "deepspeed" in keys:
        assert not keys["bf16"], "it would turn that of DeepSpeed on"
        assert not keys["fp16"], "it would turn that of DeepSpeed on"
        return by_deepspeed(parsed_automatic(json.dumps(keys["deepspeed"])), devices=devices)
    if "fsdp" not in keys:
        sharding = "ddp" if devices > 1 else "none"
        return {**ONE_DEVICE, "devices_per_trial": devices, "sharding": sharding}
    args = TrainingArguments(
        FOLDER, use_cpu=True, fsdp=keys["fsdp"], fsdp_config=dict(keys["fsdp_config"])
    )
    plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
    assert plugin.fsdp_version == 2
    mixed = "bf16" if keys["bf16"] else "fp16" if keys["fp16"] else "no"
    if mixed != "no":
        plugin.set_mixed_precision(mixed)
    policy = plugin.mixed_precision_policy
    return by_fsdp2(
        reshards=plugin.reshard_after_forward,
        groups=1,
        group_size=devices,
        reduced_in=weights_dtype if policy is None else policy.reduce_dtype,
        on_host=isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        devices=devices,
    )


def precision_of(module, trainer, shared):
    if shared["engine"] == "deepspeed":
        return precision_by_deepspeed(module.SETTINGS["deepspeed"])
    found = precision_on_one_device(module, trainer)
    if shared["sharding"] in ("zero2", "zero3") and found.endswith("-mixed"):
        return f"{found} by FSDP2"
    return found


def precision_on_one_device(module, trainer):
    model, args, optimizer = trainer.model, trainer.args, trainer.optimizer
    by_autocast = autocast_by_arguments(args, trained_dtype(model))
    assert module.model_kwargs()["dtype"] == next(model.parameters()).dtype
    inner = getattr(optimizer, "_single", optimizer)
    if any(type(part).__name__ == "Float8Linear" for part in model.modules()):
        return "fp8" if by_autocast == "bf16-mixed" else f"fp8 of {by_autocast}"
    if any(type(part).__name__ == "Int8Linear" for part in model.modules()):
        return "int8-mixed" if by_autocast == "bf16-mixed" else f"int8 of {by_autocast}"
    if type(inner).__name__ == "StochasticallyRounded":
        return "bf16-stochastic" if by_autocast == "bf16-true" else f"stochastic of {by_autocast}"
    if torch.get_float32_matmul_precision() == "high":
        return "tf32" if by_autocast == "fp32" else f"tf32 beside {by_autocast}"
    return by_autocast


def loss_of(model):
    for part in model.modules():  # small layers cannot be rearranged, as bitsandbytes would do
        if type(part).__name__ == "Linear4bit":
            part.support_avx512bf16_for_cpu = False
    tokens = torch.ones(1, 8, dtype=torch.int64)
    converted = [
        part
        for part in model.modules()
        if hasattr(part, "config") and hasattr(part.config, "emulate")
    ]
    for part in converted:  # a CPU multiplies no fp8
        object.__setattr__(part.config, "emulate", True)
    with torch.no_grad(), autocast_where_needed(model):
        return "chunked" if model(input_ids=tokens, labels=tokens).logits is None else "full"


def checkpointing_by_trainer(trainer, module):
    """As Trainer.train begins."""
    args, model = trainer.args, trainer.model
    if hasattr(module, "use_chunked_loss"):
        del model.forward  # its chunks are checkpoints too, of no layer

    def begin():
        if args.gradient_checkpointing:
            options = dict(args.gradient_checkpointing_kwargs)
            every = options.pop("every_n_layers", 1)
            model.activation_checkpointing_enable(
                every_n_layers=every, activation_checkpointing_kwargs=options
            )

    named = [each for each in (module, transformers.modeling_utils) if hasattr(each, "checkpoint")]
    return checkpointing_of(model, named, begin)


def activation_offload_of(trainer):
    """Whether what is kept for the backward pass is a copy elsewhere."""
    kept = torch.ones(1024, 1024, requires_grad=True) * 1.0
    with trainer.compute_loss_context_manager():
        sine = kept.sin()
    return "none" if sine.grad_fn._saved_self.data_ptr() == kept.data_ptr() else "cpu"
