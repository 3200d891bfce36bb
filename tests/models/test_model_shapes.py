"""The sizes of models that are known without the hub."""

import tomllib
from importlib import resources

import pytest

from autotune.spec.model_file import known_model_config, sizes_of

MODELS = tomllib.loads(
    resources.files("autotune.spec").joinpath("model_shapes.toml").read_text("utf-8")
)["model"]


def test_an_id_has_one_shape_however_it_is_spelled():
    ids = [name.lower() for model in MODELS for name in model["ids"]]
    assert len(ids) == len(set(ids))
    first = MODELS[0]["ids"][0]
    assert known_model_config(first.upper()) == known_model_config(first)
    assert known_model_config("nobody/has-this") is None


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["name"])
def test_a_shape_says_what_a_workload_needs(model):
    sizes = sizes_of(known_model_config(model["ids"][0]))
    assert sizes["layers"] is not None
    assert sizes["vocab_size"] is not None


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["name"])
def test_transformers_makes_the_stated_parameters_of_a_shape(model):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    content = known_model_config(model["ids"][0])
    config = AutoConfig.for_model(content.pop("model_type"), **content)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    assert sum(weight.numel() for weight in built.parameters()) == model["parameters"]
