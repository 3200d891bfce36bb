"""Exports whose trainers are not installed for the tests."""

import dataclasses
import json

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


def refused(export):
    return {entry.setting: entry.instead for entry in export.unsupported}


def test_llamafactory_finds_the_text_of_the_study():
    hub = {"dataset": "somebody/stories", "dataset_split": "train[:10%]", "text_column": "story"}
    export = TARGETS["llamafactory"].write(recipe(**hub, dataset_config="plain"), "0.9")
    said = yaml.safe_load(export.files["llamafactory.yaml"])
    assert (said["dataset_dir"], said["stage"]) == (".", "pt")
    assert json.loads(export.files["dataset_info.json"]) == {
        said["dataset"]: {
            "hf_hub_url": "somebody/stories",
            "split": "train[:10%]",
            "subset": "plain",
            "columns": {"prompt": "story"},
        }
    }


@pytest.mark.parametrize(("packing", "said"), [("packed", None), ("padded", False)])
def test_llamafactory_cuts_whole_sequences_as_it_is_not_told_to_pack(packing, said):
    """With `packing: true` it would make them one token shorter."""
    export = TARGETS["llamafactory"].write(recipe(packing=packing), "0.9")
    assert yaml.safe_load(export.files["llamafactory.yaml"]).get("packing") is said


@pytest.mark.parametrize("suffix", [".md", ".rst"])
def test_llamafactory_reads_text_from_names_in_txt_alone(suffix):
    export = TARGETS["llamafactory"].write(recipe(dataset=f"book{suffix}"), "0.9")
    [line] = export.before_use
    assert f"copy book{suffix} to" in line
    assert TARGETS["llamafactory"].write(recipe(dataset="book.txt"), "0.9").before_use == ()


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-stochastic"])
def test_llamafactory_has_no_bfloat16_weights_where_it_would_stop(precision):
    config = TrainingConfig(micro_batch_size=8, precision=precision)
    on_cpu = TARGETS["llamafactory"].write(recipe(config, device_type="cpu"), "0.9")
    assert refused(on_cpu)["precision"] == "bf16-mixed"
    on_gpu = TARGETS["llamafactory"].write(recipe(config), "0.9")
    assert refused(on_gpu).get("precision", "bf16-true") == "bf16-true"
    for export, pure in ((on_cpu, False), (on_gpu, True)):
        assert yaml.safe_load(export.files["llamafactory.yaml"])["pure_bf16"] is pure


@pytest.mark.parametrize("name", ["trl", "llamafactory", "ms-swift"])
@pytest.mark.parametrize(("micro_batch_size", "instead"), [(1, None), (4, "auto")])
def test_a_kernel_that_takes_no_mask_is_not_expressed_where_batches_are_padded(
    name, micro_batch_size, instead
):
    config = TrainingConfig(
        micro_batch_size=micro_batch_size, precision="bf16-mixed", attention="flash"
    )
    export = TARGETS[name].write(recipe(config, packing="padded"), TARGETS[name].versions[0])
    assert refused(export).get("attention") == instead
    assert any("enable_flash_sdp" in text for text in export.files.values()) == (instead is None)


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("llamafactory", "CUDA_VISIBLE_DEVICES=0 llamafactory-cli train llamafactory.yaml"),
        ("ms-swift", "swift pt ms_swift.yaml"),
    ],
)
def test_a_trial_on_one_gpu_is_trained_on_one_of_several(name, start):
    export = TARGETS[name].write(recipe(), TARGETS[name].versions[0])
    assert export.command == start
    if name == "ms-swift":
        environment = yaml.safe_load(export.files["ms_swift.yaml"])["ENV"]
        assert environment == {"CUDA_VISIBLE_DEVICES": "0"}


def test_ms_swift_loads_the_split_of_the_study():
    hub = {"dataset": "somebody/stories", "dataset_split": "train[:10%]", "dataset_config": "old"}
    export = TARGETS["ms-swift"].write(recipe(**hub), "4.6")
    said = yaml.safe_load(export.files["ms_swift.yaml"])
    assert (said["dataset"], said["custom_dataset_info"]) == (
        ["somebody/stories:old"],
        ["dataset_info.json"],
    )
    assert json.loads(export.files["dataset_info.json"]) == [
        {"hf_dataset_id": "somebody/stories", "split": ["train[:10%]"], "subsets": ["old"]}
    ]


def test_unsloth_is_said_to_need_a_gpu():
    on_cpu = TARGETS["unsloth"].write(recipe(device_type="cpu"), "2026.10")
    assert any("needs a GPU" in line for line in on_cpu.before_use)
    assert TARGETS["unsloth"].write(recipe(), "2026.10").before_use == ()


@pytest.mark.parametrize("name", ["llamafactory", "ms-swift", "unsloth"])
def test_an_export_says_what_was_never_run(name):
    export = TARGETS[name].write(recipe(), TARGETS[name].versions[0])
    assert any("never run" in note for note in export.notes)
