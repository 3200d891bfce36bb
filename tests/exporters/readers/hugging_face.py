"""transformers' Trainer and trl's SFTTrainer: they load the files and are watched while they train.

Settings are taken from the parsed arguments, the trainer that was made and one pass through a model
of four layers.
"""

import contextlib
import copy
import functools
import importlib.util
import json
import os
import sys
import tempfile
import uuid
from pathlib import Path

import torch
import torch._functorch.config
import torch.utils.checkpoint
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.masking_utils import AttentionMaskInterface

from autotune.techniques.compilation import set_mode
from tests.exporters.readers.optimizers import BY_CLASS

LAYERS = 4
SWITCHES = {"flash": "flash", "efficient": "mem_efficient", "cudnn": "cudnn", "math": "math"}
_TEMPORARY = tempfile.TemporaryDirectory(prefix="autotune_readers_")  # goes with the process
FOLDER = _TEMPORARY.name


@functools.cache
def _llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa")


def tiny_llama(**options):
    """One of its own each time: exports change it in place."""
    model = copy.deepcopy(_llama())
    return model.to(options["dtype"]) if "dtype" in options else model


@functools.cache
def saved_llama():
    """Returns the folder with its weights, which only files can quantize."""
    folder = Path(FOLDER) / "llama"
    _llama().save_pretrained(folder)
    return folder


def batch(sequences=2, length=16):
    tokens = torch.arange(sequences * length).view(sequences, length) % 64
    return {"input_ids": tokens, "labels": tokens}


@contextlib.contextmanager
def imported(code):
    """The exported module, and the process as it was before afterwards."""
    precision, budget = (
        torch.get_float32_matmul_precision(),
        torch._functorch.config.activation_memory_budget,
    )
    switches = {
        flag: getattr(torch.backends.cuda, f"{flag}_sdp_enabled")() for flag in SWITCHES.values()
    }
    environment, mask = dict(os.environ), AttentionMaskInterface()["sdpa"]
    file = Path(FOLDER) / f"exported_{uuid.uuid4().hex}.py"
    file.write_text(code)
    try:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        file.unlink()
        sys.modules.pop(file.stem, None)
        torch.set_float32_matmul_precision(precision)
        torch._functorch.config.activation_memory_budget = budget
        set_mode("default")
        for flag, value in switches.items():
            getattr(torch.backends.cuda, f"enable_{flag}_sdp")(value)
        os.environ.clear()
        os.environ.update(environment)
        AttentionMaskInterface.register("sdpa", mask)


def parse_json(text, **changes):
    """As HfArgumentParser does for a script; on a CPU, which refuses tf32."""
    content = {
        **json.loads(text),
        "use_cpu": True,
        "output_dir": FOLDER,
        "report_to": "none",
        **changes,
    }
    if content["tf32"]:
        content["tf32"] = False
    return HfArgumentParser(TrainingArguments).parse_dict(content, allow_extra_keys=False)[0]


# -- what arguments say ----------------------------------------------------------------------------


def workload_settings(args, *, devices=1):
    """Of a parsed TrainingArguments, in each of so many processes."""
    assert args.world_size == 1, "this process has no others"
    return {
        "micro_batch_size": args.per_device_train_batch_size,
        "global_batch": args.per_device_train_batch_size
        * args.gradient_accumulation_steps
        * devices,
        "steps": args.max_steps,
        "learning_rate": args.learning_rate,
        "weight_decay": args.weight_decay,
        "learning_rate_warmup_steps": args.get_warmup_steps(args.max_steps),
        "gradient_clipping": args.max_grad_norm or None,
        "seed": args.seed if args.seed == args.data_seed else "two seeds",
        "schedule": schedule_by_arguments(args),
    }


def schedule_by_arguments(args):
    kind, options = args.lr_scheduler_type.value, args.lr_scheduler_kwargs or {}
    return {
        ("constant_with_warmup", None): "constant",
        ("cosine_with_min_lr", 0.1): "cosine",
    }.get((kind, options.get("min_lr_rate")), kind)


def optimizer_by_arguments(args):
    """By what transformers makes of them, where nothing said means torch's own choice on CUDA."""
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(args)
    known = {**BY_CLASS, "Adafactor": "adafactor-fixed-rate"}
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


def autocast_by_arguments(args, weights):
    if args.bf16 or args.fp16:
        return "bf16-mixed" if args.bf16 else "fp16-mixed"
    return "bf16-true" if weights == torch.bfloat16 else "fp32"


# -- what a model does -----------------------------------------------------------------------------


@contextlib.contextmanager
def counted_checkpoints(*modules):
    """Record the options of every call of torch's checkpoint that these modules make."""
    calls, originals = [], [module.checkpoint for module in modules]

    def counted(original):
        @functools.wraps(original)
        def checkpoint(function, *args, **options):
            calls.append(options)
            return original(function, *args, **options)

        return checkpoint

    for module, original in zip(modules, originals, strict=True):
        module.checkpoint = counted(original)
    try:
        yield calls
    finally:
        for module, original in zip(modules, originals, strict=True):
            module.checkpoint = original


def checkpointing_of(model, modules, begin):
    """Name the checkpointing by the parts of layers that run again in backward, and the calls."""
    runs = {}
    handles = [
        part.register_forward_pre_hook(
            lambda _m, _i, key=(index, name): runs.update({key: runs.get(key, 0) + 1})
        )
        for index, layer in enumerate(model.model.layers)
        for name, part in (
            ("attention", layer.self_attn.q_proj),
            ("feed-forward", layer.mlp),  # a fused one does not call its layers
        )
    ]
    model.train()
    with counted_checkpoints(*modules) as calls:
        begin()
        with autocast_where_needed(model):
            loss = model(**batch()).loss
        made = list(calls)
        loss.backward()
    for handle in handles:
        handle.remove()
    again = {
        name: [i for i in range(LAYERS) if runs[i, name] == 2]
        for name in ("attention", "feed-forward")
    }
    policies = {options.get("context_fn") for options in made}
    policies -= {None, torch.utils.checkpoint.noop_context_fn}
    kept = {"alternating_contexts": "selective-2", "attention_contexts": "save-attention"}
    keeps = [kept.get(one.__name__, "selective") for one in policies]
    return _name(again["attention"], again["feed-forward"], calls=len(made), keeps_some=keeps)


def autocast_where_needed(model):
    """A float32 embedding beside 16-bit layers needs autocast, under which trainers call models."""
    has_whole = any(".modules_to_save." in name for name, _ in model.named_parameters())
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_whole)


def _name(attention, feed_forward, *, calls, keeps_some):
    everything = list(range(LAYERS))
    if attention == everything and feed_forward == []:
        return "attention"
    assert attention == feed_forward
    if keeps_some:
        [name] = keeps_some
        return name if attention == everything else f"{name} of {attention}"
    by_layers = {
        (): "none",
        (0,): "every-4",
        (0, 2): "every-2",
        (0, 1, 2, 3): "block" if calls == LAYERS else "sqrt",
    }
    return by_layers[tuple(attention)]


def compile_of(model):
    if model._compiled_call_impl is not None:
        return "model"
    compiled = {layer._compiled_call_impl is not None for layer in model.model.layers}
    return {frozenset({True}): "block", frozenset({False}): "none"}.get(
        frozenset(compiled), "some blocks"
    )


def uncompiled(model):
    for module in model.modules():
        module._compiled_call_impl = None
    return model


def attention_of_process():
    on = [
        name
        for name, flag in SWITCHES.items()
        if getattr(torch.backends.cuda, f"{flag}_sdp_enabled")()
    ]
    if len(on) == len(SWITCHES):
        return "auto"
    return on[0] if len(on) == 1 else on
