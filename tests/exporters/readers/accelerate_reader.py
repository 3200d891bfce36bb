"""Accelerate: the environment that `accelerate launch` sets, as its own classes read it."""

import functools
import os
import shlex
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from autotune.exporters import launch
from autotune.exporters.accelerate_config import ACCUMULATION, FILE
from tests.exporters.readers.adapters import UNTRAINED
from tests.exporters.readers.launcher import process_settings

PRECISIONS = {"no": "fp32", "bf16": "bf16-mixed", "fp16": "fp16-mixed", "fp8": "another fp8"}


def read(export, version):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    environment, script, dynamo = launched(export.command, export.files[FILE])
    process = process_settings(export) if script == launch.FILE else process_settings_of_nothing()
    return {
        **{name: process[name] for name in launch.PROCESS_SETTINGS},
        "precision": precision(environment, process, dynamo),
        "compile": scope(dynamo),
        "checkpointing": "none",
        **UNTRAINED,
        "loss": "full",
        "activation_offload": "none",
        "schedule": "constant",
        "learning_rate_warmup_steps": 1,
        "gradient_clipping": None,
    }


def process_settings_of_nothing():
    return {"memory_budget": 1.0, "attention": "auto", "allocator": "default", "tf32": False}


def precision(environment, process, dynamo):
    found = PRECISIONS[environment["ACCELERATE_MIXED_PRECISION"]]
    on_cpu = environment["ACCELERATE_USE_CPU"] == "True"
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
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    words = shlex.split(command)
    start = words.index("accelerate")
    own = dict(word.split("=", 1) for word in words[:start])
    assert words[start + 1] == "launch"
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, own):
        path = Path(folder) / FILE
        path.write_text(text)
        asked = [str(path) if word == FILE else word for word in words[start + 2 :]]
        arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(asked))
        assert defaults.distributed_type == "NO"
        assert not any(
            (arguments.use_deepspeed, arguments.use_fsdp, arguments.multi_gpu, arguments.tpu)
        )
        _, environment = prepare_simple_launcher_cmd_env(arguments)
        with mock.patch.dict(os.environ, environment):
            dynamo = TorchDynamoPlugin()
    return environment, arguments.training_script, dynamo


def accumulation(export):
    environment, _, _ = launched(export.command, export.files[FILE])
    return int(environment.get(ACCUMULATION, 1))
