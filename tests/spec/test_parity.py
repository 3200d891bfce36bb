"""Two trainings are the same if their first losses and gradients are, up to rounding."""

import math
from dataclasses import replace

import pytest
import torch

from autotune.spec.config import CHOICES
from autotune.spec.parity import TOLERANCES, ParityTrace, largest_difference
from autotune.spec.reading import parse

REFERENCE = ParityTrace(
    losses=(5.5, 5.4, 5.3),
    gradient_norms={"block 0": 0.5, "rest": 1.0},
    gradient_projections={"block 0": (0.5, -0.5), "rest": (1.0, 1.0)},
    draws_random_numbers=False,
)


def difference(**changes):
    return largest_difference(replace(REFERENCE, **changes), REFERENCE, precision="fp32")


def test_a_training_is_the_same_as_itself():
    assert difference().multiple == 0.0


def test_every_precision_has_its_tolerance():
    assert set(TOLERANCES) == set(CHOICES["precision"])


def test_a_loss_outside_is_named_with_its_step_and_difference():
    found = difference(losses=(5.5, 5.4, 5.5))
    assert found.is_outside
    assert found.message.startswith("the loss of step 3 is 5.5 for 5.3, 3.8 % off")


def test_wrong_gradients_are_outside_though_every_loss_is_equal():
    found = difference(gradient_projections={"block 0": (0.5, 0.1), "rest": (1.0, 1.0)})
    assert found.is_outside
    assert found.message.startswith("the gradient of block 0 is 85 % off at step 1")


@pytest.mark.parametrize(
    "changes",
    [
        {"losses": (5.5, math.nan, 5.3)},
        {"gradient_projections": {"block 0": (0.5, math.nan), "rest": (1.0, 1.0)}},
    ],
)
def test_nan_is_outside_the_tolerance(changes):
    assert difference(**changes).is_outside


def test_the_largest_difference_is_the_one_farthest_beyond_its_own_tolerance():
    allowed = TOLERANCES["fp32"]
    losses = (5.5 * (1 + 2 * allowed.loss), 5.4, 5.3)
    projections = {**REFERENCE.gradient_projections, "rest": (1.0 + 3 * allowed.gradient,) * 2}
    assert "rest" in difference(losses=losses, gradient_projections=projections).message


def test_an_update_that_only_one_of_two_skipped_leaves_the_first_loss_to_tell():
    assert (
        difference(losses=(5.5, 5.45, 5.45), gradient_norms={}, gradient_projections={}).multiple
        == 0.0
    )
    assert difference(losses=(5.6, 5.4, 5.3), gradient_norms={}, gradient_projections={}).is_outside


def test_a_trace_survives_json():
    assert parse(ParityTrace, REFERENCE.to_dict()) == REFERENCE


def test_one_relu_that_rounding_turns_over_is_no_other_training():
    """One of 192 tokens and 336 units passes its whole gradient to the weights, or none."""
    torch.manual_seed(0)
    inputs, passed = torch.randn(192, 128), torch.randn(192, 336)
    is_open = torch.rand(192, 336) < 0.5
    turned_over = is_open.clone()
    turned_over[7, 11] = ~turned_over[7, 11]
    gradient, other = ((passed * gates).T @ inputs for gates in (is_open, turned_over))
    assert 1e-3 < (gradient - other).norm() / gradient.norm() < TOLERANCES["fp32"].gradient
