"""Published numbers of weights: https://huggingface.co/{gpt2, Qwen/Qwen3-30B-A3B}, model cards."""

from pathlib import Path

import pytest

from autotune.errors import InvalidInput, NotAllowed
from autotune.spec.model_size import check_weights_fit, estimated_weights, free_disk_bytes
from autotune.spec.workload import make_workload
from autotune.study.opening.requested_space import space_of
from autotune.study.request import SearchRequest

GPT2 = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
EXPERTS = {
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    ("config", "published"), [(GPT2, 124e6), (EXPERTS, 30.5e9)], ids=["gpt2", "experts"]
)
def test_the_estimate_is_between_the_number_and_twice_it(config, published):
    assert published <= estimated_weights({"model_config": config}) <= 2 * published


def test_layers_of_the_workload_take_the_place_of_those_of_the_config():
    one, twelve = ({"model_config": GPT2, "layers": layers} for layers in (1, 12))
    assert estimated_weights(one) < estimated_weights(twelve)
    assert estimated_weights(twelve) == estimated_weights({"model_config": GPT2})


def test_weights_larger_than_the_machine_are_refused_as_the_given_kind():
    config = {"model_config": {**GPT2, "n_embd": 10**9}}
    with pytest.raises(NotAllowed, match="of memory"):
        check_weights_fit(config, folder=Path(), kind=NotAllowed)


def test_the_disk_of_a_folder_that_is_not_there_yet_is_that_of_its_parent(tmp_path):
    assert free_disk_bytes(tmp_path / "a" / "b") > 0


def test_a_search_for_a_model_larger_than_the_machine_is_refused_before_anything_starts():
    request = SearchRequest(device="cpu", workload={"width": 2**20, "heads": 8})
    with pytest.raises(InvalidInput, match="weights"):
        space_of(request)


@pytest.mark.parametrize("name", ["layers", "global_batch", "width", "vocab_size"])
def test_a_size_that_no_model_has_is_refused_with_the_largest(name):
    with pytest.raises(InvalidInput) as refused:
        make_workload("cpu", {name: 2**31 - 1}, {})
    assert "from 1 to" in refused.value.hint
