"""The contract of built-in models: the protocol of `parts.py` and the techniques that use it."""

import dataclasses
import math

import pytest
import torch

from autotune.models import MODELS, build_model
from autotune.spec.config import CHOICES
from autotune.spec.model_choice import MODEL_NAMES
from autotune.techniques.checkpointing import checkpoint_in_blocks, checkpoint_segments
from autotune.techniques.compilation import compile_blocks, compile_model


@pytest.fixture(params=MODELS)
def small(request, workload):
    """A workload of each model."""
    return dataclasses.replace(workload, model=request.param)


@pytest.fixture
def make_parts(small):
    """make_parts() returns the parts of a small model, always with the same weights."""

    def make():
        torch.manual_seed(0)
        parts = build_model(small)
        MODELS[small.model].initialize(parts.model)
        return parts

    return make


@pytest.fixture
def batch(small):
    torch.manual_seed(1)
    return tuple(torch.randint(0, small.vocab_size, (2, small.sequence_length)) for _ in range(2))


def loss_and_gradients(parts, batch):
    parameters = list(parts.model.parameters())  # wrapping keeps their order, not their names
    loss = parts.model(*batch)
    return loss.item(), torch.autograd.grad(loss, parameters)


def test_the_names_that_can_be_asked_for_are_those_of_the_registry():
    assert tuple(MODELS) == MODEL_NAMES


def test_its_parts_are_found(make_parts, small):
    parts = make_parts()
    assert len(parts.blocks) == small.layers
    assert all(
        isinstance(getattr(block, parts.attention_name), torch.nn.Module) for block in parts.blocks
    )


def test_it_begins_close_to_the_loss_of_guessing(make_parts, batch, small):
    assert make_parts().model(*batch).item() / batch[0].numel() == pytest.approx(
        math.log(small.vocab_size), rel=0.1
    )


def test_the_loss_is_a_sum_over_tokens_in_float32(make_parts, batch):
    model, (tokens, labels) = make_parts().model, batch
    halves = [model(tokens[i : i + 1], labels[i : i + 1]) for i in range(2)]
    whole = model(tokens, labels)
    assert whole.dtype == torch.float32
    assert whole.item() == pytest.approx(sum(half.item() for half in halves), rel=1e-5)


def test_ignored_labels_do_not_count(make_parts, batch, small):
    tokens, labels = batch
    masked = torch.full_like(labels, -100)
    masked[:, :10] = labels[:, :10]
    assert make_parts().model(tokens, masked).item() == pytest.approx(
        20 * math.log(small.vocab_size), rel=0.1
    )


def test_no_position_sees_a_later_one(make_parts, batch, small):
    model, (tokens, labels) = make_parts().model, batch
    only_fifth = torch.full_like(labels, -100)
    only_fifth[:, 5] = 7
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % small.vocab_size
    assert model(tokens, only_fifth).item() == model(changed, only_fifth).item()


def test_every_parameter_gets_a_gradient(make_parts, batch):
    assert all(gradient.abs().sum() > 0 for gradient in loss_and_gradients(make_parts(), batch)[1])


def test_the_inner_size_of_the_feed_forward_can_be_set(small):
    inner_sizes = {
        block.feed_forward.gate.out_features
        for block in build_model(dataclasses.replace(small, feed_forward_width=40)).blocks
    }
    assert inner_sizes == {40}


@pytest.mark.parametrize("granularity", CHOICES["checkpointing"])
def test_checkpointing_leaves_loss_and_gradients_bit_equal(granularity, make_parts, batch):
    parts = make_parts()
    checkpoint_in_blocks(parts, granularity)
    checkpoint_segments(parts, granularity)
    loss, gradients = loss_and_gradients(parts, batch)
    plain_loss, plain_gradients = loss_and_gradients(make_parts(), batch)
    assert loss == plain_loss
    assert all(torch.equal(*pair) for pair in zip(gradients, plain_gradients, strict=True))


# Compiled, the losses and graphs of `gpt` are those of `test_loss_contract.py` and
# `test_effects.py`.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("small", "scope", "granularity"),
    [
        (name, *how)
        for how in (("block", "none"), ("model", "none"), ("block", "block"))
        for name in MODELS
    ],
    indirect=["small"],
)
def test_compiled_it_computes_the_same(scope, granularity, make_parts, batch):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    parts = make_parts()
    checkpoint_in_blocks(parts, granularity)
    compile_blocks(parts, scope)
    compile_model(parts, scope)
    loss, gradients = loss_and_gradients(parts, batch)
    plain_loss, plain_gradients = loss_and_gradients(make_parts(), batch)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # all blocks alike, no break
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    for gradient, plain in zip(gradients, plain_gradients, strict=True):
        assert torch.allclose(gradient, plain, rtol=1e-3, atol=1e-4)
