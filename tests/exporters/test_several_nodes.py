"""The files and commands of a trial that ran on several nodes."""

import re

import pytest
import yaml

from autotune.exporters import TARGETS
from autotune.exporters.accelerate_config import FILE as ACCELERATE
from autotune.exporters.into.dialects import DIALECTS
from autotune.importers.registry import import_files
from autotune.spec.config import TrainingConfig
from tests.exporters.readers.imported import OPTIONS
from tests.exporters.recipes import recipe

VERSIONS = [(name, version) for name, target in TARGETS.items() for version in target.versions]
ONE_DEVICE = ("unsloth", "forgather")
"""Trainers that share out nothing, whose exports say so of `devices_per_trial`."""


def on_nodes(nodes):
    config = TrainingConfig(sharding="ddp", micro_batch_size=2)
    return recipe(
        config, device_type="cuda", global_batch=8, devices_per_trial=4, nodes_per_trial=nodes
    )


@pytest.mark.parametrize(("name", "version"), VERSIONS)
def test_every_trainer_is_started_on_as_many_nodes(name, version):
    export = TARGETS[name].write(on_nodes(2), version)
    said = " ".join(note for note in export.notes if "ran on 2 nodes with 2 devices each" in note)
    if name in ONE_DEVICE:
        assert "devices_per_trial" in {entry.setting for entry in export.unsupported}
        assert not said
    else:
        assert said
        started = " ".join([export.command, *export.files.values()])
        assert re.search(r"(num_machines|num_nodes|nnodes|NNODES)\W{1,4}2\b", started)


@pytest.mark.parametrize(("name", "version"), VERSIONS)
def test_a_training_on_one_node_says_nothing_of_nodes(name, version):
    export = TARGETS[name].write(on_nodes(1), version)
    assert "FIRST_NODE" not in " ".join([export.command, *export.files.values(), *export.notes])


def test_the_processes_of_accelerate_are_those_of_all_machines():
    export = TARGETS["accelerate"].write(on_nodes(2), TARGETS["accelerate"].versions[0])
    [file] = [text for text in export.files.values() if "num_machines" in text]
    settings = yaml.safe_load(file)
    assert (settings["num_processes"], settings["num_machines"]) == (4, 2)


def test_the_processes_of_torchrun_are_those_of_each_node():
    export = TARGETS["transformers"].write(on_nodes(2), TARGETS["transformers"].versions[0])
    assert "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d" in export.command


@pytest.mark.parametrize("name", DIALECTS)
def test_nodes_that_an_export_writes_are_read_back(name, tmp_path):
    """What stands in the command alone, as torchrun has it, no file says."""
    export = DIALECTS[name].write(on_nodes(2))
    for file, text in export.files.items():
        (tmp_path / file).write_text(text)
    files = [tmp_path / one for one in (DIALECTS[name].file, ACCELERATE) if one in export.files]
    options = OPTIONS.get(name, {"model": "gpt"})
    if re.search(r"num_machines|num_nodes", " ".join(export.files.values())):
        found = import_files(files, options).workload
        assert (found["devices_per_trial"], found["nodes_per_trial"]) == (4, 2)
        found = import_files(files, {**options, "devices_per_trial": 2}).workload
        assert "nodes_per_trial" not in found
    else:
        assert re.search(r"nnodes\W2\b", export.command)
