"""What an exporter writes is read back as what it was written from."""

import random
from functools import cache

import hypothesis
import pytest

from autotune.exporters.into.dialects import DIALECTS
from autotune.exporters.recipe import SETTINGS
from autotune.importers.registry import import_files
from autotune.spec.config import DEPENDENT_FIELDS
from autotune.spec.model_file import model_name
from tests.exporters.readers.imported import as_read, read
from tests.exporters.recipes import (
    ON_SEVERAL_DEVICES,
    any_recipe,
    configurations,
    recipe,
    recipe_on_devices,
)

RECIPES = 2 * hypothesis.settings.default.max_examples
PART_OF_ADAPTER = (*DEPENDENT_FIELDS["adapter"], "base_weights", "precision")


def not_read_back(trainer, asked):
    """Returns {setting: (what was read, what should be)}, but for what the export lists."""
    export = DIALECTS[trainer].write(asked)
    done = read(trainer, export)
    instead = {entry.setting: entry.instead for entry in export.unsupported}
    expected = as_read(trainer, {**asked.settings(), **instead})
    left_out = {setting for setting, value in instead.items() if value is None}
    if instead.get("adapter") == "none":
        left_out.update(PART_OF_ADAPTER)
    if trainer == "torchtitan":
        left_out.add("attention")  # its Python module chooses the kernels
    return {
        setting: (done[setting], expected[setting])
        for setting in SETTINGS
        if setting in done and setting not in left_out and done[setting] != expected[setting]
    }


@cache
def recipes():
    chance = random.Random("recipes")
    shared_out = [recipe_on_devices(case) for case in ON_SEVERAL_DEVICES]
    of_each_value = [recipe(config) for config in configurations().values()]
    return [*shared_out, *of_each_value, *(any_recipe(chance.choice) for _ in range(RECIPES))]


@pytest.mark.parametrize("trainer", DIALECTS)
def test_an_export_is_read_back_as_the_training_it_was_written_from(trainer):
    wrong = {asked.config.describe(): not_read_back(trainer, asked) for asked in recipes()}
    assert {config: settings for config, settings in wrong.items() if settings} == {}


MODEL = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 300}
PRETRAINED = {
    "model": model_name(MODEL),
    "model_config": MODEL,
    "model_source": "openai-community/gpt2",
    "pretrained": True,
}
DATA = {
    "hub": {"dataset": "owner/name", "dataset_config": "en", "dataset_split": "test[:5]"},
    "file": {"dataset": "/data/rows.jsonl", "text_column": "body"},
    "chat": {"dataset": "owner/chat", "chat_column": "messages", "tokenizer": "owner/model"},
}


@pytest.mark.parametrize("case", DATA)
@pytest.mark.parametrize("packing", ["packed", "padded"])
@pytest.mark.parametrize("trainer", ["axolotl", "trl", "llamafactory"])
def test_model_and_data_of_an_export_are_read_back(trainer, packing, case, tmp_path):
    export = DIALECTS[trainer].write(recipe(**PRETRAINED, **DATA[case], packing=packing))
    for name, text in export.files.items():
        (tmp_path / name).write_text(text)
    found = import_files([tmp_path / DIALECTS[trainer].file], {}).workload
    expected = {"model": PRETRAINED["model_source"], "pretrained": True, "packing": packing}
    for name in ("dataset", "dataset_config", "dataset_split"):
        if name in DATA[case]:
            expected[name] = DATA[case][name]
    assert {name: found.get(name) for name in expected} == expected
