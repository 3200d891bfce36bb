"""torchtitan, axolotl and forgather: exports whose trainers are not installed for the tests."""

import dataclasses

import pytest
import yaml

from autotune.exporters import TARGETS
from autotune.exporters.torchtitan.files import chunks
from autotune.shipped.chunked_loss import tokens_in_a_chunk
from autotune.spec.config import TrainingConfig
from autotune.spec.model_file import model_name
from tests.exporters.readers.registry import READERS
from tests.exporters.readers.torchtitan import read
from tests.exporters.recipes import recipe
from tests.exporters.test_exporter_contract import check

TRAINERS = [
    (name, version)
    for name in ("torchtitan", "axolotl", "forgather")
    for version in TARGETS[name].versions
]


@pytest.mark.parametrize("warmup", [1, 2, 10])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize(("name", "version"), TRAINERS)
def test_every_step_has_the_rate_of_the_trial_or_the_warm_up_is_not_expressed(
    name, version, schedule, warmup
):
    check(name, version, recipe(schedule=schedule, learning_rate_warmup_steps=warmup))


@pytest.mark.parametrize(("name", "version"), TRAINERS)
def test_an_origin_over_several_lines_stays_a_comment(name, version):
    asked = dataclasses.replace(recipe(), origin='study """\ntraining: {}\n-- extends "other"')
    done = READERS[name](TARGETS[name].write(asked, version), version)
    assert done["steps"] == asked.workload.steps


@pytest.mark.parametrize("sequence_length", [24, 100, 97, 512])
@pytest.mark.parametrize("vocab_size", [256, 50_000])
def test_torchtitan_makes_a_loss_in_even_chunks_no_larger_than_those_of_a_trial(
    sequence_length, vocab_size
):
    config = TrainingConfig(micro_batch_size=8, loss="chunked")
    asked = recipe(config, sequence_length=sequence_length, vocab_size=vocab_size)
    tokens, found = 8 * sequence_length, chunks(asked)
    assert sequence_length % found == 0
    assert tokens // found <= tokens_in_a_chunk(
        tokens, width=asked.workload.width, vocab_size=vocab_size
    )


def test_torchtitan_has_a_memory_budget_and_no_launcher_sets_a_second_one():
    export = TARGETS["torchtitan"].write(
        recipe(TrainingConfig(compile="block", memory_budget=0.3)), "0.3"
    )
    assert [*export.files] == ["autotune_export.py"]
    assert read(export, "0.3")["memory_budget"] == 0.3


def test_axolotl_names_the_model_and_the_text_that_the_study_had():
    content = {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 2,
        "vocab_size": 300,
        "n_positions": 128,
    }
    hub = {
        "dataset": "roneneldan/TinyStories",
        "dataset_split": "train[:10%]",
        "text_column": "story",
    }
    model = {
        "model": model_name(content),
        "model_config": content,
        "model_source": "openai-community/gpt2",
    }
    asked = recipe(pretrained=True, packing="padded", **model, **hub)
    export = TARGETS["axolotl"].write(asked, "0.19")
    said = yaml.safe_load(export.files["axolotl.yaml"])
    assert (said["base_model"], said["reinit_weights"], said["sample_packing"]) == (
        model["model_source"],
        False,
        False,
    )
    (text,) = said["datasets"]
    assert text == {
        "path": hub["dataset"],
        "split": "train[:10%]",
        "type": "completion",
        "field": "story",
    }
    assert not any("name your" in note for note in export.notes)


def test_axolotl_reads_a_users_text_by_the_kind_of_its_file():
    said = yaml.safe_load(
        TARGETS["axolotl"].write(recipe(dataset="stories.jsonl"), "0.19").files["axolotl.yaml"]
    )
    assert said["datasets"] == [
        {"path": "stories.jsonl", "ds_type": "json", "type": "completion", "field": "text"}
    ]
