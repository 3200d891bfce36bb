"""Adafactor with a fixed rate, compared with algorithms 4 and 5 of the paper (arXiv:1804.04235)."""

import math

import numpy
import pytest
import torch
from torch import nn

from autotune.shipped.adafactor_fixed_rate import AdafactorFixedRate

RATE, WEIGHT_DECAY = 2e-2, 0.01


def by_the_paper(weight, gradients):
    """Returns the weight after one step per gradient, in float64.

    alpha_t = rate, d = 1, beta2_t = 1 - t^-0.8.
    """
    weight, row, column, full = weight.astype(numpy.float64), 0.0, 0.0, 0.0
    for t, gradient in enumerate(gradients, start=1):
        beta2 = min(1 - t**-0.8, 0.999)
        square = gradient.astype(numpy.float64) ** 2 + 1e-30
        if weight.ndim == 2:
            row = beta2 * row + (1 - beta2) * square.sum(axis=1)
            column = beta2 * column + (1 - beta2) * square.sum(axis=0)
            second_moment = numpy.outer(row, column) / row.sum()
        else:
            second_moment = full = beta2 * full + (1 - beta2) * square
        update = gradient / numpy.sqrt(second_moment)
        update = update / max(1.0, math.sqrt((update**2).mean()))
        weight = weight - RATE * WEIGHT_DECAY * weight - RATE * update
    return weight


def stepped(weight, gradients, *, dtype=torch.float32):
    """The optimizer and its parameter after one step for each of `gradients`."""
    parameter = nn.Parameter(torch.tensor(weight, dtype=dtype))
    optimizer = AdafactorFixedRate([parameter], lr=RATE)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient, dtype=dtype)
        optimizer.step()
    return optimizer, parameter


def some(*shape, steps=None):
    generator = numpy.random.default_rng(0)
    scale = (
        1
        if steps is None
        else 10.0 ** generator.integers(-4, 3, size=(steps, 1, *([1] * (len(shape) - 1))))
    )
    return (scale * generator.standard_normal(shape if steps is None else (steps, *shape))).astype(
        numpy.float32
    )


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (1, 8), (7,)])
def test_it_follows_the_paper(shape):
    weight, gradients = some(*shape), some(*shape, steps=20)
    _, parameter = stepped(weight, gradients)
    assert parameter.detach().numpy() == pytest.approx(
        by_the_paper(weight, gradients), rel=1e-4, abs=1e-5
    )


def test_a_stack_of_matrices_is_updated_as_single_matrices_except_for_clipping():
    weight, gradients = some(3, 6, 10), some(3, 6, 10, steps=1)
    optimizer, _ = stepped(weight, gradients)
    (state,) = optimizer.state.values()
    assert (state["row"].shape, state["column"].shape) == ((3, 6), (3, 10))


def test_beta2_is_at_most_0_999():
    parameter = nn.Parameter(torch.ones(4))
    optimizer = AdafactorFixedRate([parameter], lr=RATE)
    parameter.grad = torch.ones(4)
    optimizer.step()
    optimizer.state[parameter]["step"] = 10**6
    parameter.grad = torch.zeros(4)
    optimizer.step()
    assert optimizer.state[parameter]["square"].tolist() == pytest.approx([0.999] * 4, rel=1e-6)


def test_a_zero_gradient_gives_finite_weights():
    _, parameter = stepped(some(4, 4), numpy.zeros((3, 4, 4), dtype=numpy.float32))
    assert torch.isfinite(parameter).all()


@pytest.mark.parametrize(("dtype", "bytes_each"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_the_state_is_a_row_and_a_column_in_the_dtype_of_the_parameter(dtype, bytes_each):
    optimizer, _ = stepped(some(64, 96), some(64, 96, steps=2), dtype=dtype)
    tensors = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    ]
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == (64 + 96) * bytes_each


def test_in_bf16_the_update_is_computed_in_float32_and_rounded_once():
    weight = torch.tensor(some(16, 16)).bfloat16()
    gradients = torch.tensor(some(16, 16, steps=1)).bfloat16()
    _, parameter = stepped(weight.float().numpy(), gradients.float().numpy(), dtype=torch.bfloat16)
    exact = torch.tensor(by_the_paper(weight.float().numpy(), gradients.float().numpy())).float()
    assert (parameter != exact.bfloat16()).sum() <= 1  # a number between two may fall either way


def test_the_gradient_is_unchanged():
    parameter = nn.Parameter(torch.ones(4, 4))
    parameter.grad = torch.full((4, 4), 3.0)
    AdafactorFixedRate([parameter], lr=RATE).step()
    assert (parameter.grad == 3.0).all()


def test_a_parameter_without_a_gradient_is_skipped():
    parameter = nn.Parameter(torch.ones(4, 4))
    AdafactorFixedRate([parameter], lr=RATE).step()
    assert (parameter == 1.0).all()


def test_training_continues_from_a_stored_state():
    weight, gradients = some(6, 10), some(6, 10, steps=4)
    first, parameter = stepped(weight, gradients[:2])
    second = AdafactorFixedRate([parameter], lr=RATE)
    second.load_state_dict(first.state_dict())
    for gradient in gradients[2:]:
        parameter.grad = torch.tensor(gradient)
        second.step()
    assert torch.equal(parameter, stepped(weight, gradients)[1])
