"""A key within a table of a trainer's file is taken over, has no effect, or is named."""

from pathlib import Path

import pytest

from autotune.importers.key_table import load_table
from autotune.importers.keys_of_file import KeysOfFile
from autotune.importers.registry import TRAINERS
from tests.importers.examples import OPTIONS, SMALLEST, contents
from tests.importers.test_key_tables import NAMES

OF_ANY_NAME = {
    *("lora_rank_pattern", "lora_alpha_pattern"),  # names of layers
    *("dataset_mixer", "dataset_mixture"),  # names of datasets
    *("data", "model", "optimizer"),  # arguments of a class
    "dynamo_config",  # named as a whole
    "data_types",  # the same
}
"""Keys whose tables have no list of keys."""


def read(name, **more):
    found = TRAINERS[name]
    content = {**SMALLEST[name], **more}
    keys = KeysOfFile(content, found.table, file=Path("f"), options=OPTIONS.get(name, {}))
    return found.read(keys)


@pytest.fixture
def tables(monkeypatch):
    """Every (title, key) that is read as a table, and those whose keys have a list of their own."""
    as_tables, with_keys = set(), set()
    table_of, beside = KeysOfFile.table_of, KeysOfFile.beside

    def noted(keys, key):
        as_tables.add((keys.table.title, key))
        return table_of(keys, key)

    def noted_beside(keys, key, *others, **options):
        with_keys.add((keys.table.title, key))
        return beside(keys, key, *others, **options)

    monkeypatch.setattr(KeysOfFile, "table_of", noted)
    monkeypatch.setattr(KeysOfFile, "beside", noted_beside)
    return as_tables, with_keys


DEEPSPEED = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "bf16": {}}
MORE = {
    "transformers": [{"deepspeed": DEEPSPEED}],
    "lightning": [{"trainer": {"strategy": {"class_path": "FSDPStrategy"}}}],
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_no_key_within_a_table_is_dropped_without_a_sentence(trainer, tables):
    for content in (*contents(trainer), *MORE.get(trainer, [])):
        read(trainer, **content)
    as_tables, with_keys = tables
    listed = {(load_table(name).title, key) for name in NAMES for key in load_table(name).inner}
    known = with_keys | listed
    assert {one for one in as_tables - known if one[1] not in OF_ANY_NAME} == set()


@pytest.mark.parametrize("name", NAMES)
def test_a_reason_within_a_table_is_the_second_half_of_a_sentence(name):
    for known in load_table(name).inner.values():
        assert all(not why[:1].isupper() and not why.endswith(".") for why in known.values())


def test_a_key_within_a_table_that_the_version_lacks_is_named():
    found = read("trl", model_init_kwargs={"dtype": "bfloat16", "unheard_of": 7, "off": False})
    assert [(one.key, one.value) for one in found.not_taken if "kwargs" in one.key] == [
        ("model_init_kwargs.unheard_of", 7)
    ]


@pytest.mark.parametrize(
    "key", ["gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"]
)
def test_inputs_of_blocks_on_the_host_are_named(key):
    on = {key.removesuffix("_kwargs"): True, key: {"offload": True, "use_reentrant": False}}
    for trainer in ("transformers", "trl"):
        [named] = [one for one in read(trainer, **on).not_taken if one.key.startswith(key)]
        assert (named.key, named.value) == (f"{key}.offload", True)


def test_the_earlier_name_of_a_number_format_is_read_in_a_table_of_the_model():
    found = read("trl", model_init_kwargs={"torch_dtype": "bfloat16"}, bf16=False)
    assert found.config["precision"] == "bf16-true"


def test_operators_that_trials_do_not_tell_apart_are_named():
    on = {"gradient_checkpointing": True, "selective_checkpointing": {"save": ["aten::mm"]}}
    found = read("axolotl", **on)
    assert found.config["checkpointing"] == "selective"
    assert "selective_checkpointing" in {one.key for one in found.not_taken}


def test_layers_that_a_strategy_recomputes_are_taken_over():
    arguments = {"activation_checkpointing_policy": ["my.Block"], "mixed_precision": "x"}
    strategy = {"class_path": "FSDPStrategy", "init_args": arguments}
    trainer = {**SMALLEST["lightning"]["trainer"], "devices": 2, "strategy": strategy}
    found = read("lightning", trainer=trainer)
    assert found.config["checkpointing"] == "block"
    assert ["mixed_precision" in one.why for one in found.not_taken] == [True]


def test_a_loss_and_a_batch_that_trials_do_not_have_are_named():
    found = read("transformers", label_smoothing_factor=0.1, split_batches=True)
    assert {"label_smoothing_factor", "split_batches"} <= {one.key for one in found.not_taken}
    assert (
        read("transformers", label_smoothing_factor=0.0).not_taken == read("transformers").not_taken
    )


@pytest.mark.parametrize(("bf16", "expected"), [("full", "bf16-true"), (False, "fp32")])
def test_the_earlier_word_for_weights_in_bf16_is_understood(bf16, expected):
    assert read("axolotl", bf16=bf16, tf32=False).config["precision"] == expected
