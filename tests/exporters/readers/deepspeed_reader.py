"""DeepSpeed: the numbers as `DeepSpeedConfig` reads them, and the rates that its scheduler sets."""

import copy
import functools
import json
import shlex
from unittest import mock

import pytest
import torch

from autotune.exporters import launch
from autotune.exporters.deepspeed_config import FILE
from tests.exporters.readers.accelerate_reader import process_settings_of_nothing
from tests.exporters.readers.adapters import UNTRAINED
from tests.exporters.readers.devices import by_deepspeed
from tests.exporters.readers.launcher import process_settings
from tests.exporters.readers.rates import schedule_of

OPTIMIZERS = {"adamw": "adamw", "Adafactor": "adafactor", "SGD": "sgd"}
STEPS = 20


def read(export, version):
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    devices = devices_of(export.command)
    config = parsed(export.files[FILE], devices=devices)
    process = (
        process_settings(export)
        if script_of(export.command) == launch.FILE
        else process_settings_of_nothing()
    )
    return {
        **{name: process[name] for name in launch.PROCESS_SETTINGS},
        "precision": precision(config, process),
        "micro_batch_size": config.train_micro_batch_size_per_gpu,
        "global_batch": config.train_batch_size,
        **by_deepspeed(config, devices=devices),
        "gradient_clipping": config.gradient_clipping or None,
        **UNTRAINED,
        **optimization(export.files[FILE]),
    }


def script_of(command):
    words = shlex.split(command)
    assert words[0] == "deepspeed"
    assert words[-2:] == ["--deepspeed_config", FILE]
    # The launcher gives the rank as the first argument of the script unless it is told not to.
    assert ("--no_local_rank" in words) == (launch.FILE in words)
    return next(word for word in words if word.endswith(".py"))


def devices_of(command):
    words = shlex.split(command)
    if "--num_gpus" not in words:
        return 1
    assert words.index("--num_gpus") < words.index("--deepspeed") - 1, "it is the launcher's"
    return int(words[words.index("--num_gpus") + 1])


@functools.cache
def parsed(text, *, devices=1):
    from deepspeed.runtime.config import DeepSpeedConfig

    ranks = {"get_rank": lambda: 0, "get_world_size": lambda: devices}
    with mock.patch.multiple("deepspeed.comm", **ranks):
        config = DeepSpeedConfig(json.loads(text))
    per_step = config.gradient_accumulation_steps * config.train_micro_batch_size_per_gpu
    assert per_step * devices == config.train_batch_size
    return config


def precision(config, process):
    if config.bfloat16_config.enabled or config.float16_config.enabled:
        return "16-bit weights with a float32 copy"
    if config.torch_autocast_enabled:
        return {torch.bfloat16: "bf16-mixed", torch.float16: "fp16-mixed"}[
            config.torch_autocast_dtype
        ]
    return "tf32" if process["tf32"] else "fp32"


def optimization(text):
    optimizer = made_optimizer(parsed(text))
    if optimizer is None:
        return {"optimizer_fusion": "none", "schedule": "constant", "learning_rate_warmup_steps": 1}
    defaults = optimizer.defaults
    flags = (bool(defaults["foreach"]), bool(defaults.get("fused")))
    return {
        "optimizer": OPTIMIZERS[parsed(text).optimizer_name],
        "weight_decay": defaults["weight_decay"],
        "optimizer_fusion": {
            (False, False): "none",
            (True, False): "foreach",
            (False, True): "kernel",
        }[flags],
        **schedule_of(rates(text)),
    }


def made_optimizer(config):
    """As `_configure_basic_optimizer` makes it."""
    if config.optimizer_name is None:
        return None
    settings = copy.deepcopy(config.optimizer_params)
    if config.optimizer_name == "adamw":
        assert settings.pop("torch_adam")
        return torch.optim.AdamW([torch.nn.Parameter(torch.ones(2, 2))], **settings)
    return getattr(torch.optim, config.optimizer_name)(
        [torch.nn.Parameter(torch.ones(2, 2))], **settings
    )


@functools.cache
def rates(text):
    """The rate of each optimizer step: the engine steps its scheduler after each."""
    from deepspeed.runtime import lr_schedules

    config = parsed(text)
    optimizer = made_optimizer(config)
    name = config.scheduler_name
    scheduler = name and getattr(lr_schedules, name)(optimizer, **config.scheduler_params)
    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        if scheduler:
            scheduler.step()
    return found
