"""The tables of keys are the whole lists of their trainers' versions, with their defaults."""

import dataclasses
import inspect
import json
import tomllib
from pathlib import Path

import pytest

from autotune.importers import key_table
from autotune.importers.key_table import load_table

FOLDER = Path(key_table.__file__).parent / "keys"
NAMES = sorted(file.stem for file in FOLDER.glob("*.toml"))
LISTS = Path(__file__).parent / "keys"
HANDED_ON = {
    "axolotl": ("seed", "max_grad_norm", "peft_autocast_adapter_dtype"),
    "llamafactory": ("flash_attn", "quantization_method"),
    "fsdp": ("activation_checkpointing",),
    "parallelism": ("dp_replicate_size", "dp_shard_size", "tp_size"),
    "accelerate": ("mixed_precision", "distributed_type"),
    "accelerate_deepspeed": ("zero_stage", "offload_optimizer_device", "offload_param_device"),
}
"""{table: keys whose default is not that of the field: of an enumeration, or of what reads it}."""
ON_BY_A_PLUGIN = {"cut_cross_entropy"}


def _of_dataclasses(*kinds):
    found = {}
    for kind in kinds:
        for field in dataclasses.fields(kind):
            default = field.default
            if default is dataclasses.MISSING:
                made = field.default_factory is not dataclasses.MISSING
                default = field.default_factory() if made else None
            found[field.name] = getattr(default, "value", default)
    return found


def _transformers():
    from transformers import TrainingArguments

    return _of_dataclasses(TrainingArguments)


def _trl():
    from trl import ModelConfig, SFTConfig
    from trl.scripts.utils import ScriptArguments

    return _of_dataclasses(ScriptArguments, ModelConfig, SFTConfig)


def _accelerate():
    from accelerate.commands.config.config_args import ClusterConfig

    # -1 stands for a question that `accelerate config` has not asked.
    return _of_dataclasses(ClusterConfig) | {"num_processes": None}


def _fsdp():
    from accelerate.utils import FullyShardedDataParallelPlugin

    return _of_dataclasses(FullyShardedDataParallelPlugin)


def _accelerate_deepspeed():
    from accelerate.utils import DeepSpeedPlugin

    return _of_dataclasses(DeepSpeedPlugin)


def _parallelism():
    from accelerate.utils import ParallelismConfig

    return _of_dataclasses(ParallelismConfig)


def _deepspeed_zero():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return {
        field.alias or name: None if field.default_factory is not None else field.default
        for name, field in DeepSpeedZeroConfig.model_fields.items()
    }


def _lightning():
    from lightning.pytorch import Trainer

    parameters = list(inspect.signature(Trainer.__init__).parameters.values())[1:]
    return {f"trainer.{one.name}": one.default for one in parameters}


INSTALLED = {
    "transformers": _transformers,
    "trl": _trl,
    "accelerate": _accelerate,
    "fsdp": _fsdp,
    "accelerate_deepspeed": _accelerate_deepspeed,
    "parallelism": _parallelism,
    "deepspeed_zero": _deepspeed_zero,
    "lightning": _lightning,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INSTALLED)
def test_a_table_has_every_key_of_the_installed_version(name):
    _check(name, INSTALLED[name]())


@pytest.mark.parametrize("name", sorted(file.stem for file in LISTS.glob("*.json")))
def test_a_table_has_every_key_of_the_listed_version(name):
    _check(name, json.loads((LISTS / f"{name}.json").read_text())["keys"])


def _check(name, keys):
    table = load_table(name)
    assert set(keys) - table.keys == set()
    for key, default in table.defaults.items():
        if key in keys and key not in HANDED_ON.get(name, ()) and key not in ON_BY_A_PLUGIN:
            assert default == keys[key], key


@pytest.mark.parametrize("name", NAMES)
def test_a_key_stands_in_one_part_of_a_table(name):
    content = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    keys = [
        *content.get("taken", {}),
        *content.get("taken_without_default", {}).get("keys", ()),
        *(key for part in content.get("no_effect", {}).values() for key in part),
        *content.get("not_taken", {}),
        *content.get("renamed", {}),
    ]
    assert sorted({key for key in keys if keys.count(key) > 1}) == []


@pytest.mark.parametrize("name", NAMES)
def test_an_earlier_name_stands_for_a_key_that_there_is(name):
    table = load_table(name)
    known = table.keys - table.renamed.keys()
    assert set(table.renamed.values()) - known == set()


@pytest.mark.parametrize("name", NAMES)
def test_a_table_says_its_version_and_where_its_keys_are_stated(name):
    table = load_table(name)
    assert table.title.rpartition(" ")[2][0].isdigit()
    assert ".py" in table.source or "src/" in table.source


@pytest.mark.parametrize("name", NAMES)
def test_a_reason_is_the_second_half_of_a_sentence(name):
    for key, why in load_table(name).not_taken.items():
        assert not why[0].isupper() or why.startswith("DeepSpeed"), key
        assert not why.endswith("."), key
