"""Accelerate: the environment that `accelerate launch` sets, as its own classes read it."""

import functools
import json
import os
import shlex
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from autotune.exporters import launch
from autotune.exporters.accelerate_config import ACCUMULATION, FILE
from autotune.exporters.deepspeed_config import AUTO_FILE
from tests.exporters.readers.adapters import UNTRAINED
from tests.exporters.readers.devices import (
    ONE_DEVICE,
    by_deepspeed,
    by_fsdp2,
    precision_by_deepspeed,
)
from tests.exporters.readers.launcher import process_settings

PRECISIONS = {"no": "fp32", "bf16": "bf16-mixed", "fp16": "fp16-mixed", "fp8": "another fp8"}


def read(export, version):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    environment, script, dynamo = launched(export.command, export.files[FILE])
    devices = devices_of(export, weights_dtype=dtype_by_script(export))
    process = process_settings(export) if script == launch.FILE else process_settings_of_nothing()
    return {
        **{name: process[name] for name in launch.PROCESS_SETTINGS},
        "precision": precision(environment, process, dynamo, devices, export),
        "compile": scope(dynamo),
        **devices,
        "checkpointing": "block"
        if environment.get("FSDP_ACTIVATION_CHECKPOINTING") == "true"
        else "none",
        **UNTRAINED,
        "schedule": "constant",
        "learning_rate_warmup_steps": 1,
        "gradient_clipping": None,
    }


def process_settings_of_nothing():
    plain = {"memory_budget": 1.0, "compile_mode": "default", "attention": "auto"}
    return {**plain, "allocator": "default", "tf32": False}


def dtype_by_script(export):
    """Returns the dtype of the weights if the script has the line that the export prints."""
    lines = [entry.why for entry in export.unsupported if entry.setting == "precision"]
    return torch.bfloat16 if any(".to(torch.bfloat16)" in line for line in lines) else torch.float32


def devices_of(export, *, weights_dtype):
    """Returns what a script does that accelerate launches, by the classes that it makes there."""
    environment, _, _ = launched(export.command, export.files[FILE])
    devices = int(environment["processes"])
    if environment.get("ACCELERATE_USE_DEEPSPEED") == "true":
        assert environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == AUTO_FILE
        return {**by_deepspeed(parsed_automatic(export.files[AUTO_FILE]), devices=devices)}
    if environment.get("ACCELERATE_USE_FSDP") != "true":
        sharding = "ddp" if devices > 1 else "none"
        return {**ONE_DEVICE, "devices_per_trial": devices, "sharding": sharding}
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin

    with mock.patch.dict(os.environ, environment):
        plugin = FullyShardedDataParallelPlugin()
        mixed = environment["ACCELERATE_MIXED_PRECISION"]
        if mixed != "no":  # as Accelerator() does
            plugin.set_mixed_precision(mixed)
        sizes = ParallelismConfig()
    assert plugin.fsdp_version == 2
    groups = sizes.dp_replicate_size or 1
    group_size = sizes.dp_shard_size or devices
    policy = plugin.mixed_precision_policy
    return by_fsdp2(
        reshards=plugin.reshard_after_forward,
        groups=groups,
        group_size=group_size if groups > 1 else devices,
        reduced_in=weights_dtype if policy is None else policy.reduce_dtype,
        on_host=isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        devices=devices,
    )


def parsed_automatic(text):
    """Returns the configuration with numbers in place of what transformers fills in."""
    from deepspeed.runtime.config import DeepSpeedConfig

    settings = json.loads(text)
    for name, value in settings.items():
        if value == "auto":
            settings[name] = 1
    return DeepSpeedConfig(settings)


def precision(environment, process, dynamo, devices, export):
    if devices["engine"] == "deepspeed":
        assert environment["ACCELERATE_MIXED_PRECISION"] == "no"
        return precision_by_deepspeed(json.loads(export.files[AUTO_FILE]))
    if devices["sharding"] in ("zero2", "zero3", "hsdp"):
        mixed = environment["ACCELERATE_MIXED_PRECISION"]
        if mixed != "no":
            return f"{PRECISIONS[mixed]} by FSDP2"
    found = PRECISIONS[environment["ACCELERATE_MIXED_PRECISION"]]
    on_cpu = environment.get("ACCELERATE_USE_CPU") == "True"
    if found == "fp16-mixed" and on_cpu:
        return "fp32"  # Accelerator.native_amp stays False
    turns_tf32_on = dynamo.backend != "NO" and not on_cpu  # AcceleratorState.__init__
    return "tf32" if found == "fp32" and (process["tf32"] or turns_tf32_on) else found


def scope(dynamo):
    if dynamo.backend == "NO":
        return "none"
    if (dynamo.backend, dynamo.mode, dynamo.dynamic, dynamo.fullgraph) != (
        "INDUCTOR",
        "default",
        False,
        False,
    ):
        return f"another compiler: {dynamo}"
    return "block" if dynamo.use_regional_compilation else "model"


@functools.cache
def launched(command, text):
    """(environment, script, dynamo plugin) of a command with its configuration file."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import TorchDynamoPlugin
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    words = shlex.split(command)
    start = words.index("accelerate")
    own = dict(word.split("=", 1) for word in words[:start])
    assert words[start + 1] == "launch"
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, own):
        path = Path(folder) / FILE
        path.write_text(text)
        asked = [str(path) if word == FILE else word for word in words[start + 2 :]]
        arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(asked))
        assert not arguments.tpu
        if arguments.use_deepspeed:
            arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
            _, environment = prepare_deepspeed_cmd_env(arguments)
        elif arguments.use_fsdp or arguments.multi_gpu:
            environment = prepare_multi_gpu_env(arguments)
        else:
            assert defaults.distributed_type == "NO"
            _, environment = prepare_simple_launcher_cmd_env(arguments)
        environment = {**environment, "processes": str(arguments.num_processes)}
        with mock.patch.dict(os.environ, environment):
            dynamo = TorchDynamoPlugin()
    return environment, arguments.training_script, dynamo


def accumulation(export):
    environment, _, _ = launched(export.command, export.files[FILE])
    return int(environment.get(ACCUMULATION, 1))
