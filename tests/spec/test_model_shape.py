"""The shapes of models without torch: never more weights than a model has, and hardly fewer."""

import tomllib
from importlib import resources

import pytest

from autotune.spec.model_file import model_name
from autotune.spec.model_shape import shape_of
from autotune.spec.workload import make_workload

MODELS = tomllib.loads(resources.files("autotune.spec").joinpath("model_shapes.toml").read_text())
UNKNOWN = ("bloom", "falcon", "gptj", "opt", "qwen2_moe")
"""Kinds of which no shape is said."""


def shape_with(config):
    return shape_of(make_workload("cuda", {"model": model_name(config), "model_config": config}))


def weights(shape):
    return shape.in_blocks + shape.in_experts + shape.beside_blocks


@pytest.mark.parametrize("model", MODELS["model"], ids=lambda model: model["name"])
def test_a_shape_has_nearly_all_weights_of_its_model(model):
    shape = shape_with(model["config"])
    if model["config"]["model_type"] in UNKNOWN:
        assert shape is None
    else:
        # Positions that are learned are not counted.
        assert 0.985 * model["parameters"] <= weights(shape) <= model["parameters"]


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim", "tie_word_embeddings"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma"])
def test_what_a_config_leaves_out_counts_as_nothing(kind, key):
    config = next(one["config"] for one in MODELS["model"] if one["config"]["model_type"] == kind)
    left_out = {name: value for name, value in config.items() if name != key}
    assert weights(shape_with(left_out)) <= weights(shape_with(config))


@pytest.mark.parametrize("value", ["8", -1, [8], 1.5], ids=repr)
def test_a_size_that_is_none_gives_no_shape(value):
    config = {**MODELS["model"][0]["config"], "num_key_value_heads": value}
    assert shape_with(config) is None


def test_a_model_of_the_users_code_has_no_shape(tmp_path):
    file = tmp_path / "models.py"
    file.write_text("def make():\n    ...\n")
    assert shape_of(make_workload("cpu", {"model": f"{file}:make"})) is None


@pytest.mark.parametrize(
    "key", [{"intermediate_size": 2**14}, {"head_dim": 512}, {"num_key_value_heads": 1}], ids=repr
)
def test_keys_that_gpt2_does_not_have_change_nothing(key):
    config = next(one["config"] for one in MODELS["model"] if one["config"]["model_type"] == "gpt2")
    assert weights(shape_with({**config, **key})) == weights(shape_with(config))


def test_phi_may_share_keys_among_heads():
    config = {
        "model_type": "phi",
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "vocab_size": 1024,
    }
    shared = shape_with({**config, "num_key_value_heads": 1})
    assert shared.attention == ((512, 512 + 2 * 64), (512, 512))
