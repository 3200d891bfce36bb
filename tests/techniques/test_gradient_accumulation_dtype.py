"""Gradients of micro batches that are added up in fp32, with weights in bf16."""

import pytest
import torch
from torch import nn

from autotune.shipped.fp32_gradients import accumulate_in_fp32
from autotune.spec.config import BF16_WEIGHTS
from autotune.spec.optimizers import OPTIMIZERS
from autotune.spec.parity import largest_difference
from autotune.techniques import gradient_accumulation_dtype
from autotune.techniques.optimizer import trained_parameters
from autotune.techniques.optimizer_fusion import UpdateRule, make_updater
from autotune.training.parity import ParityFailed, before_each_update
from tests.training.test_parity_watch import trace_of

PARTS = 64
"""Micro batches, each of them but the first a hundredth of it in size."""
SUMS = {"gradient_accumulation_dtype": "fp32", "micro_batch_size": 1}


def layer_and_optimizer(**settings):
    torch.manual_seed(0)
    layer = nn.Linear(16, 16, dtype=torch.bfloat16)
    return layer, torch.optim.SGD(layer.parameters(), lr=0.1, **settings)


def add_up(layer):
    """Adds up the gradients of micro batches; returns their sums of the weight, in float64."""
    exact = torch.zeros(16, 16, dtype=torch.float64)
    for part in range(PARTS):
        inputs = torch.randn(1, 16, dtype=torch.bfloat16) * (1.0 if part == 0 else 0.01)
        exact += inputs.double().expand(16, 16)
        layer(inputs).sum().backward()
    return exact


def error_of(layer, exact):
    return ((layer.weight.grad.double() - exact).norm() / exact.norm()).item()


def test_sums_in_fp32_keep_what_those_in_bf16_lose():
    plain, _ = layer_and_optimizer()
    lost = error_of(plain, add_up(plain))
    layer, optimizer = layer_and_optimizer()
    accumulate_in_fp32(optimizer)
    assert error_of(layer, add_up(layer)) < 1e-6 < 1e-3 < lost


def test_the_optimizer_gets_gradients_in_the_format_of_the_weights():
    layer, optimizer = layer_and_optimizer()
    accumulate_in_fp32(optimizer)
    seen = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(weight.grad.dtype for weight in layer.parameters())
    )
    add_up(layer)
    optimizer.step()
    assert seen == [torch.bfloat16] * 2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_next_step_adds_up_in_fp32_again(set_to_none):
    layer, optimizer = layer_and_optimizer()
    accumulate_in_fp32(optimizer)
    add_up(layer)
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    assert error_of(layer, add_up(layer)) < 1e-6


def test_a_weight_without_a_gradient_is_left_as_it_is():
    layer, optimizer = layer_and_optimizer()
    accumulate_in_fp32(optimizer)
    before = layer.weight.detach().clone()
    layer.bias.sum().backward()
    optimizer.step()
    assert torch.equal(layer.weight, before)


def test_frozen_weights_need_no_gradient():
    layer, optimizer = layer_and_optimizer()
    layer.weight.requires_grad_(False)
    accumulate_in_fp32(optimizer)
    layer(torch.ones(1, 16, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert layer.weight.grad is None


@pytest.fixture
def eager_updates():
    """Optimizers of torchao compile their update, which takes longer than all else here."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.mark.usefixtures("eager_updates")
@pytest.mark.parametrize("rounds_stochastically", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_updates_by_the_rounded_sum(name, rounds_stochastically):
    if rounds_stochastically and OPTIMIZERS[name].state_form:
        pytest.skip("bf16-stochastic has no such optimizer")
    rule = UpdateRule(
        optimizer=name,
        fusion="none",
        learning_rate=0.1,
        rounds_stochastically=rounds_stochastically,
    )
    by_sums, by_rounded = layer_and_optimizer()[0], layer_and_optimizer()[0]
    sums, rounded = (
        make_updater(trained_parameters(layer, name), rule) for layer in (by_sums, by_rounded)
    )
    accumulate_in_fp32(sums.optimizer)
    add_up(by_sums)
    for weight, other in zip(by_sums.parameters(), by_rounded.parameters(), strict=True):
        other.grad = weight.grad.bfloat16()
    sums.step()
    rounded.step()
    assert torch.equal(by_sums.weight, by_rounded.weight)
    assert not torch.equal(by_sums.weight, layer_and_optimizer()[0].weight)


# -- in a training ---------------------------------------------------------------------------------


def gradient_dtypes(trainer):
    """Takes a step; returns the number formats of gradients as backward has left them."""
    seen = set()

    def note(optimizer):
        for group in optimizer.param_groups:
            seen.update(weight.grad.dtype for weight in group["params"] if weight.grad is not None)

    handle = before_each_update(note)
    trainer.step(0, next(trainer.batches()))
    handle.remove()
    return seen


@pytest.mark.parametrize("clipping", [None, 1e-3])
def test_gradients_of_a_training_are_in_fp32_until_they_are_all_there(make_trainer, clipping):
    trainer = make_trainer(precision="bf16-true", **SUMS)
    trainer.training.updater._gradient_clipping = clipping
    assert gradient_dtypes(trainer) == {torch.float32}
    assert {weight.dtype for weight in trainer.training.parts.model.parameters()} == {
        torch.bfloat16
    }


@pytest.mark.parametrize("precision", BF16_WEIGHTS)
def test_parity_holds_with_a_quarter_of_what_the_precision_allows(make_trainer, precision):
    plain = trace_of(make_trainer(precision=precision, micro_batch_size=1))
    sums = trace_of(make_trainer(precision=precision, **SUMS))
    assert not largest_difference(sums, plain, precision=precision, strictness=4).is_outside


def keeping_the_last(optimizer):
    """Makes each backward pass replace what has been added up."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.register_hook(lambda gradient, weight=weight: replaced(weight, gradient))
    return optimizer


def replaced(weight, gradient):
    weight.grad = None
    return gradient


def test_parity_fails_where_sums_are_not_in_fp32(make_trainer, monkeypatch):
    monkeypatch.setattr(gradient_accumulation_dtype, "accumulate_in_fp32", lambda optimizer: None)
    with pytest.raises(ParityFailed, match="by more than a sum in fp32 does"):
        trace_of(make_trainer(precision="bf16-true", **SUMS))


def test_parity_fails_where_a_micro_batch_is_lost(make_trainer, monkeypatch):
    monkeypatch.setattr(gradient_accumulation_dtype, "accumulate_in_fp32", keeping_the_last)
    with pytest.raises(ParityFailed, match=r"differ by .* from the sum over 4 micro batches"):
        trace_of(make_trainer(precision="bf16-true", **SUMS))
