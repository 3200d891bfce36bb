"""FLOPs and bytes accessed of a step, against formulas written out here."""

from dataclasses import replace

import pytest
import torch
import torch._dynamo

from autotune.models import build_model
from autotune.predictor.predict import predict
from autotune.predictor.work import WorkMeter, attention_flops, bytes_of, flops_of, is_unknown
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import PredictionRequest


def predicted(workload, *, device="cpu", **choices):
    torch._dynamo.reset()
    config = TrainingConfig(**{"micro_batch_size": 4, **choices})
    return predict(PredictionRequest(workload=workload, config=config, device=device))


def products_of(workload):
    """Returns FLOPs per token of the linear layers and of attention, in the forward pass."""
    with torch.device("meta"):
        model = build_model(workload).model
    linear = sum(
        2 * layer.weight.numel() for layer in model.modules() if isinstance(layer, torch.nn.Linear)
    )
    attention = 4 * workload.layers * workload.width * workload.sequence_length
    return linear, attention


@pytest.fixture(scope="module")
def workload(workload):
    return replace(workload, layers=2)


@pytest.fixture(scope="module")
def plain(workload):
    return predicted(workload)


def test_a_step_has_three_times_the_flops_of_its_forward_pass(workload, plain):
    linear, attention = products_of(workload)
    assert plain.flops_per_token == 3 * (linear + attention)


@pytest.mark.slow
@pytest.mark.parametrize(
    "choices",
    [
        {"micro_batch_size": 1},
        {"precision": "bf16-mixed"},
        {"attention": "math"},
        {"device": "cuda", "precision": "bf16-mixed"},
        {"checkpointing": "selective"},
    ],
    ids=str,
)
def test_flops_do_not_depend_on_how_they_are_computed(workload, plain, choices):
    assert predicted(workload, **choices).flops_per_token == plain.flops_per_token


def test_checkpointed_blocks_compute_their_forward_pass_again(workload, plain):
    linear, attention = products_of(workload)
    head = 2 * workload.vocab_size * workload.width
    recomputed = predicted(workload, checkpointing="block").flops_per_token - plain.flops_per_token
    # The last product of a block is not: nothing in its backward pass needs the result.
    assert 0.7 * (linear - head + attention) < recomputed < linear - head + attention


def test_several_devices_have_together_the_flops_of_one(workload, plain):
    divided = replace(workload, devices_per_trial=2)
    assert predicted(divided, micro_batch_size=2).flops_per_token == plain.flops_per_token


@pytest.mark.slow
def test_a_compiled_step_has_the_same_flops_and_accesses_fewer_bytes(workload, plain):
    compiled = predicted(workload, compile="block")
    assert compiled.flops_per_token == plain.flops_per_token
    assert compiled.bytes_accessed_per_token < plain.bytes_accessed_per_token


def test_the_optimizer_moves_its_bytes_once_a_step(workload, plain):
    larger = predicted(replace(workload, global_batch=2 * workload.global_batch))
    assert larger.bytes_accessed_per_token < plain.bytes_accessed_per_token


def test_attention_with_fewer_heads_of_keys_has_the_flops_of_its_queries():
    query, key = torch.empty(2, 8, 16, 4), torch.empty(2, 2, 16, 4)
    assert attention_flops(query, key, key) == 4 * 2 * 8 * 16 * 16 * 4


def test_an_operator_without_a_formula_has_no_flops():
    assert flops_of(torch.ops.aten.add, (torch.ones(3), torch.ones(3)), {}, torch.ones(3)) == 0


def test_a_tensor_that_is_read_twice_is_accessed_once():
    tensor = torch.zeros(4)
    assert bytes_of((tensor, tensor, tensor.view(2, 2))) == 16


def test_an_expanded_tensor_has_the_bytes_of_its_memory():
    assert bytes_of(torch.zeros(4, 1).expand(4, 1000)) == 16


def test_a_recurrent_layer_has_flops_that_are_not_known():
    meter = WorkMeter()
    tokens = {"tokens_recorded": 1, "tokens_of_step": 1, "devices": 1}
    operand = torch.ones(2, 2)
    meter.count("forward", torch.ops.aten.mm.default, (operand, operand), {}, operand)
    assert meter.per_token(**tokens).flops == 16
    layer = torch.ops.aten.mkldnn_rnn_layer.default
    meter.count("forward", layer, (operand,), {}, operand)
    assert meter.per_token(**tokens).flops is None


def test_an_operator_of_a_user_has_flops_that_are_not_known():
    @torch.library.custom_op("autotune_tests::own", mutates_args=())
    def own(value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    assert is_unknown(torch.ops.autotune_tests.own.default)
    assert not is_unknown(torch.ops.aten.mul.Tensor)


def test_of_a_grouped_product_each_row_has_the_flops_of_its_group():
    rows, groups = torch.empty(10, 4), torch.empty(3, 4, 6)
    assert flops_of(torch.ops.aten._grouped_mm, (rows, groups), {}, None) == 2 * 10 * 4 * 6
