"""The bound from shapes is below every prediction, and near it where weights are most of it."""

import itertools

import pytest

from autotune.analysis.least_memory import least_memory_bytes
from autotune.execution.local import LocalExecutor
from autotune.spec.config import CHOICES, QUANTIZED_EXPERTS, TrainingConfig, rule_violations
from autotune.spec.model_file import model_name
from autotune.spec.workload import make_workload
from autotune.study.prediction.predictions import Forecaster

pytestmark = pytest.mark.usefixtures("one_trial_server")
GPT = {"model": "gpt", "layers": 2, "width": 64, "heads": 2, "vocab_size": 512}
BATCH = {"sequence_length": 32, "global_batch": 4}


def of_kind(kind, **sizes):
    shared = {"vocab_size": 512, "tie_word_embeddings": False, "num_hidden_layers": 3}
    if kind == "gpt2":
        sizes = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, **sizes}
    else:
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "pad_token_id": 0,
            **shared,
            **sizes,
        }
    return {"model_type": kind, "vocab_size": 512, **sizes}


def with_model(config):
    return {"model": model_name(config), "model_config": config}


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    with LocalExecutor(tmp_path_factory.mktemp("least"), only_predicts=True) as executor:
        yield executor


def predicted_and_least(executor, settings, device="cuda", **choices):
    workload = make_workload(device, BATCH, settings)
    config = TrainingConfig(**{"micro_batch_size": 2, **choices})
    assert rule_violations(config.to_dict(), workload.legality_context) == []
    forecaster = Forecaster(executor=executor, workload=workload, device_type=device)
    least = least_memory_bytes(workload, config)
    return forecaster.predict(config).peak_memory_bytes, least


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"micro_batch_size": 4, "checkpointing": "block", "optimizer": "sgd"},
        {"precision": "bf16-true", "adapter": "lora", "base_weights": "nf4"},
    ],
    ids=str,
)
@pytest.mark.parametrize("settings", [GPT, with_model(of_kind("llama"))], ids=["gpt", "llama"])
def test_no_prediction_is_below_the_bound(executor, settings, choices):
    peak, least = predicted_and_least(executor, settings, **choices)
    assert 0 < least <= peak


def test_where_weights_are_most_of_a_training_the_bound_is_near_the_peak(executor):
    large = {"width": 512, "heads": 8, "sequence_length": 16, "global_batch": 1}
    peak, least = predicted_and_least(executor, {**GPT, **large}, "cpu", micro_batch_size=1)
    assert 0.9 * peak <= least <= peak


def test_single_layers_with_a_smaller_rank_lower_the_bound_and_those_with_a_larger_do_not(executor):
    ranks = ({"output": 4}, {}, {"output": 32})
    settings = [{**GPT, "adapter_rank_pattern": of_layers} for of_layers in ranks]
    bounds = [
        predicted_and_least(executor, one, adapter="lora", adapter_rank=16) for one in settings
    ]
    assert [least <= peak for peak, least in bounds] == [True] * 3
    assert bounds[0][1] < bounds[1][1] == bounds[2][1]


def test_of_a_model_that_is_not_known_nothing_is_said():
    bloom = make_workload("cuda", BATCH, with_model(of_kind("bloom", n_head=4)))
    assert least_memory_bytes(bloom, TrainingConfig(micro_batch_size=1)) is None


KINDS = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text", "olmo2")
KINDS += ("olmo3", "seed_oss", "smollm3", "stablelm", "gpt2", "gpt_neox", "phi")
SINGLE = [
    {technique: value}
    for technique in ("precision", "checkpointing", "optimizer", "optimizer_fusion", "loss")
    for value in CHOICES[technique]
]
ADAPTERS = [
    {"adapter": adapter, "base_weights": base, "precision": precision, "adapter_targets": targets}
    for adapter, base, precision, targets in itertools.product(
        ("lora", "dora"),
        [value for value in CHOICES["base_weights"] if value not in QUANTIZED_EXPERTS],
        ("fp32", "bf16-mixed", "bf16-true"),
        ("all-linear", "attention"),
    )
]
OTHERS = [
    {"micro_batch_size": 4},
    {"activation_offload": "cpu"},
    {"offload": "optimizer"},
    {"kernels": "liger"},
    {"compile": "block"},
    {"compile": "model"},
    {"compile": "model", "memory_budget": 0.0},
    {"compile": "model", "precision": "bf16-mixed", "checkpointing": "block"},
]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("choices", [*SINGLE, *ADAPTERS, *OTHERS], ids=str)
def test_no_prediction_of_any_technique_is_below_the_bound(executor, choices, device):
    workload = make_workload(device, BATCH, GPT)
    config = TrainingConfig(**{"micro_batch_size": 2, **choices})
    if rule_violations(config.to_dict(), workload.legality_context):
        pytest.skip("not legal")
    if device == "cpu" and ("offload" in choices or "kernels" in choices):
        pytest.skip("a technique of GPUs")
    peak, least = predicted_and_least(executor, GPT, device, **choices)
    assert 0 < least <= peak


EXPERTS = {
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 16},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 64},
    "olmoe": {"num_experts": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize(
    ("base", "targets"),
    [
        ("bf16", "experts"),
        ("nf4", "all-linear"),
        *((base, "experts") for base in QUANTIZED_EXPERTS),
    ],
)
def test_no_prediction_of_a_mixture_of_experts_is_below_the_bound(executor, kind, base, targets):
    settings = with_model(of_kind(kind, num_experts_per_tok=2, **EXPERTS[kind]))
    choices = {"precision": "bf16-mixed", "adapter": "lora", "adapter_targets": targets}
    peak, least = predicted_and_least(executor, settings, base_weights=base, **choices)
    assert 0 < least <= peak


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "choices",
    [{}, {"micro_batch_size": 4}, {"precision": "bf16-mixed", "adapter": "lora"}],
    ids=str,
)
def test_no_prediction_of_any_kind_of_model_is_below_the_bound(executor, kind, choices):
    peak, least = predicted_and_least(executor, with_model(of_kind(kind)), **choices)
    assert 0 < least <= peak


@pytest.mark.slow
@pytest.mark.parametrize(
    "choices",
    [
        *({"sharding": one} for one in ("ddp", "zero1", "zero2", "zero3")),
        {"sharding": "hsdp", "sharding_group": 2},
        {"sharding": "zero3", "gradient_reduction": "bf16", "precision": "bf16-mixed"},
        {"sharding": "zero3", "offload": "all"},
        {"sharding": "ddp", "tensor_parallel": 2},
        {"sharding": "zero3", "tensor_parallel": 2},
        {"sharding": "zero3", "adapter": "lora", "precision": "bf16-true", "base_weights": "nf4"},
        {"sharding": "zero2", "adapter": "lora", "precision": "bf16-mixed", "base_weights": "bf16"},
    ],
    ids=str,
)
def test_no_prediction_of_several_devices_is_below_the_bound(executor, choices):
    settings = {**GPT, "devices_per_trial": 4, "global_batch": 8}
    peak, least = predicted_and_least(executor, settings, micro_batch_size=1, **choices)
    assert 0 < least <= peak
