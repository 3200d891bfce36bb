"""A search that goes on from real pretrained weights, full training beside an adapter."""

import json

import pytest

import autotune
from tests.building.commands import run_here

pytestmark = pytest.mark.slow

SPACE = """
[workload]
sequence_length = 32
global_batch = 4
steps = 9
warmup_steps = 2
evaluation_sequences = 8
tokenizer = "bytes"

[[configurations]]
name = "lora"
adapter = "lora"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny model, which draws bytes about evenly, and a space."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = tmp_path_factory.mktemp("fine-tuning")
    torch.manual_seed(5)
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=256,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    (folder / "space.toml").write_text(SPACE)
    return folder


@pytest.fixture(scope="module")
def searched(folder, one_trial_server):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield lambda **options: autotune.search(
            space="space.toml", max_mem="1GiB", device="cpu", confirm=False, trials=2, **options
        )


def test_pretrained_weights_are_evaluated_before_full_training_and_an_adapter(searched, folder):
    result = searched(name="fine", model="model", pretrained=True)
    assert result.initial_perplexity == pytest.approx(256, rel=0.1)
    assert [record.outcome for record in result.trials] == ["ok", "ok"]
    assert not any(record.perplexity_says_nothing for record in result.trials)
    assert "full training at adamw 2e-05, lora at adamw 0.0002" in result.pick.reason
    shown = run_here("show", "fine", "--json", folder=folder)
    assert json.loads(shown.stdout)["initial_perplexity"] == result.initial_perplexity


def test_an_adapter_over_random_weights_has_a_perplexity_that_decides_nothing(searched):
    result = searched(name="random")
    assert result.initial_perplexity is None
    by_name = {record.name: record for record in result.trials}
    assert by_name["lora"].perplexity_says_nothing
    assert not by_name["baseline"].perplexity_says_nothing
    assert "compared in memory and speed only" in result.pick.reason
