"""Lightning: the numbers of what LightningCLI makes of the file, and what the importer reads."""

import functools
import importlib
import shlex
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from autotune.exporters.bundle import BLOCKS, CALLBACK, OPTIMIZER_FILES, shipped_text
from autotune.exporters.lightning_cli import FILE
from autotune.exporters.promise import OF_LIGHTNING
from tests.exporters.readers import imported
from tests.exporters.readers.optimizers import BY_CLASS
from tests.exporters.readers.rates import schedule_of

STEPS = 20


def read(export, version):
    pytest.importorskip("lightning", reason="lightning is not installed")
    words = shlex.split(export.command)
    assert words[-5:] == ["python", "main.py", "fit", "-c", FILE]
    assert export.files[CALLBACK] == shipped_text(CALLBACK)
    assert export.files[BLOCKS] == shipped_text(BLOCKS)
    return imported.merged(read_file(export.files[FILE]), imported.read("lightning", export))


@functools.cache
def read_file(text):
    parts = parse(text)
    trainer, callback, optimizer = (
        parts["trainer"],
        parts["callback"],
        made_optimizer(parts["optimizer"]),
    )
    defaults = optimizer.defaults
    assert callback.learning_rate == float(defaults["lr"])
    assert trainer["precision"] is not None
    strategy, devices = trainer["strategy"], trainer["devices"]
    if strategy != "auto" and strategy.class_path.endswith("ModelParallelStrategy"):
        arguments = strategy.init_args
        assert (arguments.data_parallel_size, arguments.tensor_parallel_size) == (devices, 1)
    flags = (bool(defaults.get("foreach")), bool(defaults.get("fused")))
    return {
        "devices_per_trial": devices,
        "optimizer_fusion": {
            (False, False): "none",
            (True, False): "foreach",
            (False, True): "kernel",
        }[flags],
        "optimizer": BY_CLASS[type(optimizer).__name__],
        "weight_decay": weight_decay_of(optimizer),
        "steps": trainer["max_steps"],
        **schedule_of([callback.rate(step) for step in range(STEPS)]),
    }


def weight_decay_of(optimizer):
    if type(optimizer).__name__ == "AdafactorFixedRate":
        return sys.modules[type(optimizer).__module__].WEIGHT_DECAY
    return optimizer.defaults["weight_decay"]


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
    for name in (CALLBACK, BLOCKS, *OPTIMIZER_FILES, OF_LIGHTNING):
        (folder / name).write_text(shipped_text(name))
    sys.path.append(str(folder))
