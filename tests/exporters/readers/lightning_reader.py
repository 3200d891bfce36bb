"""Lightning: what LightningCLI makes of the file: its Trainer, the optimizer and the callback."""

import functools
import importlib
import shlex
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from autotune.exporters.bundle import ADAFACTOR, BLOCKS, CALLBACK, shipped_text
from autotune.exporters.lightning_cli import FILE
from autotune.exporters.promise import OF_LIGHTNING
from tests.exporters.readers.adapters import UNTRAINED
from tests.exporters.readers.devices import ONE_DEVICE, by_deepspeed
from tests.exporters.readers.optimizers import BY_CLASS
from tests.exporters.readers.rates import schedule_of

PRECISIONS = {
    "32-true": "fp32",
    "bf16-mixed": "bf16-mixed",
    "bf16-true": "bf16-true",
    "16-mixed": "fp16-mixed",
}
STEPS = 20


def read(export, version):
    pytest.importorskip("lightning", reason="lightning is not installed")
    words = shlex.split(export.command)
    assert words[-5:] == ["python", "main.py", "fit", "-c", FILE]
    assert export.files[CALLBACK] == shipped_text(CALLBACK)
    assert export.files[BLOCKS] == shipped_text(BLOCKS)
    return {
        **read_file(export.files[FILE]),
        **UNTRAINED,
        "allocator": "expandable"
        if "PYTORCH_ALLOC_CONF=expandable_segments:True" in words[:-5]
        else "default",
        "loss": "full",
        "kernels": "none",
        "activation_offload": "none",
    }


@functools.cache
def read_file(text):
    parts = parse(text)
    trainer, callback, optimizer = (
        parts["trainer"],
        parts["callback"],
        made_optimizer(parts["optimizer"]),
    )
    defaults = optimizer.defaults
    flags = (bool(defaults.get("foreach")), bool(defaults.get("fused")))
    name = BY_CLASS[type(optimizer).__name__]
    devices = devices_of(trainer, parts["optimizer"])
    assert callback.learning_rate == float(defaults["lr"])
    return {
        "precision": precision(trainer["precision"], callback, devices),
        **devices,
        "optimizer": name,
        "weight_decay": weight_decay_of(optimizer),
        "optimizer_fusion": {
            (False, False): "none",
            (True, False): "foreach",
            (False, True): "kernel",
        }[flags],
        "checkpointing": callback.checkpointing,
        "compile": callback.compile,
        "memory_budget": callback.memory_budget,
        "attention": callback.attention,
        "steps": trainer["max_steps"],
        "gradient_clipping": trainer["gradient_clip_val"] or callback.gradient_clipping,
        "seed": parts["seed"],
        **schedule_of([callback.rate(step) for step in range(STEPS)]),
    }


def weight_decay_of(optimizer):
    if type(optimizer).__name__ == "AdafactorFixedRate":
        return sys.modules[type(optimizer).__module__].WEIGHT_DECAY
    return optimizer.defaults["weight_decay"]


def devices_of(trainer, optimizer):
    """Returns what the strategy does. That a module shards itself is left to the user."""
    devices, strategy = trainer["devices"], trainer["strategy"]
    done = {**ONE_DEVICE, "devices_per_trial": devices}
    if strategy == "auto":
        assert devices == 1
        return done
    name, arguments = strategy.class_path.rpartition(".")[2], strategy.init_args
    if name == "DeepSpeedStrategy":
        from deepspeed.runtime.config import DeepSpeedConfig  # an extra

        settings = {"train_micro_batch_size_per_gpu": 1, **arguments.config}
        return by_deepspeed(DeepSpeedConfig(settings), devices=devices)
    if name == "ModelParallelStrategy":
        assert (arguments.data_parallel_size, arguments.tensor_parallel_size) == (devices, 1)
        return done
    assert name == "DDPStrategy"
    hook = arguments.ddp_comm_hook
    divides = optimizer["class_path"].endswith("ZeroRedundancyOptimizer")
    return {
        **done,
        "sharding": "zero1" if divides else "ddp",
        "gradient_reduction": {None: "fp32", bf16_compress_hook: "bf16"}[hook],
    }


def precision(name, callback, devices):
    found = PRECISIONS[name]
    if devices["engine"] == "deepspeed" and name != "32-true":
        return f"{'fp16' if name == '16-mixed' else 'bf16-true'} with a float32 copy"
    if callback.fp8:
        return {"bf16-mixed": "fp8"}[found]
    return "tf32" if found == "fp32" and callback.float32_matmul_precision == "high" else found


def made_optimizer(init):
    module, _, name = init["class_path"].rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    arguments = init["init_args"].as_dict()
    if name == "ZeroRedundancyOptimizer":  # which makes it of a part of the parameters
        kind, arguments = arguments["optimizer_class"], init["dict_kwargs"]
    return kind([torch.nn.Parameter(torch.ones(2, 2))], **arguments)


def parse(text):
    """Returns {seed, trainer, callback, optimizer} as LightningCLI parses them."""
    parser = made_parser()
    config = parser.parse_string(text)
    made = parser.instantiate_classes(config)
    return {
        "seed": config.seed_everything,
        "trainer": config.trainer,
        "callback": made.trainer.callbacks[0],
        "optimizer": config.optimizer,
    }


@functools.cache
def made_parser():
    """That of a LightningCLI, whose making takes most of the time."""
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    provide_shipped()
    return LightningCLI(BoringModel, run=False, args=[], save_config_callback=None).parser


@functools.cache
def provide_shipped():
    """Makes the shipped modules importable by the names they have beside a script."""
    folder = Path(tempfile.mkdtemp())
    for name in (CALLBACK, BLOCKS, ADAFACTOR, OF_LIGHTNING):
        (folder / name).write_text(shipped_text(name))
    sys.path.append(str(folder))
