import pytest

from autotune.errors import InvalidInput
from autotune.spec.config import CHOICES
from autotune.spec.learning_rates import LEARNING_RATE_NAMES, learning_rate_of, rate_name
from autotune.spec.model_file import model_name
from autotune.spec.workload import make_workload

CONTENT = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 256,
}
PRETRAINED = {
    "model": model_name(CONTENT),
    "model_config": CONTENT,
    "pretrained": True,
    "model_source": "folder",
}


@pytest.mark.parametrize("optimizer", CHOICES["optimizer"])
@pytest.mark.parametrize("adapter", CHOICES["adapter"])
def test_every_optimizer_has_a_rate_for_every_kind_of_training(optimizer, adapter):
    assert make_workload("cpu").learning_rate_of(optimizer, adapter) > 0


def test_an_adapter_is_trained_at_ten_times_the_rate_of_full_training():
    workload = make_workload("cpu", {"learning_rates": {"adamw": 3e-4}})
    assert workload.learning_rate_of("adamw", "lora") == pytest.approx(3e-3)


def test_a_rate_for_an_adapter_changes_no_other_rate():
    workload = make_workload("cpu", {"learning_rates": {"adamw": 3e-4, "lora/adamw": 7e-4}})
    assert workload.learning_rate_of("adamw", "lora") == 7e-4
    assert workload.learning_rate_of("adamw", "none") == 3e-4
    assert workload.learning_rate_of("sgd", "lora") == pytest.approx(1.0)


@pytest.mark.parametrize(
    "optimizer", ["adamw-8bit", "adamw-bf16", "paged-adamw", "paged-adamw-8bit"]
)
def test_adamw_has_one_rate_however_its_state_is_stored(optimizer):
    assert learning_rate_of({"adamw": 5e-4}, optimizer, "none") == 5e-4
    assert learning_rate_of({"adamw": 5e-4, "lora/adamw": 1e-3}, optimizer, "lora") == 1e-3


def test_dora_has_the_rate_of_lora_unless_it_has_one_of_its_own():
    rates = {"adamw": 1e-4, "lora/adamw": 2e-3}
    assert learning_rate_of(rates, "adamw", "dora") == 2e-3
    assert learning_rate_of({**rates, "dora/adamw": 3e-3}, "adamw", "dora") == 3e-3


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_pretrained_weights_are_trained_at_the_rates_of_fine_tuning(device):
    workload = make_workload(device, PRETRAINED)
    assert workload.learning_rate_of("adamw") == 2e-5
    assert workload.learning_rate_of("adamw", "lora") == pytest.approx(2e-4)


def test_a_rate_that_was_given_is_used_for_pretrained_weights_too():
    workload = make_workload("cpu", PRETRAINED, {"learning_rates": {"adamw": 1e-3}})
    assert workload.learning_rates["adamw"] == 1e-3


def test_every_rate_has_a_name():
    names = [rate_name(o, a) for a in CHOICES["adapter"] for o in CHOICES["optimizer"]]
    assert sorted(names) == sorted(LEARNING_RATE_NAMES)


def test_a_rate_for_an_unknown_adapter_is_rejected_with_the_names():
    with pytest.raises(InvalidInput) as rejected:
        make_workload("cpu", {"learning_rates": {"laro/adamw": 1e-3}})
    assert "'laro/adamw'" in rejected.value.message
    assert "lora/adamw" in rejected.value.hint
