"""Gradient clipping by the norm of all gradients of a global batch, in every precision."""

import dataclasses

import pytest
import torch
from torch import nn

from autotune.errors import InvalidInput
from autotune.spec.config import LegalityContext
from autotune.spec.search_space import SearchSpace, bind_space
from autotune.techniques.optimizer_fusion import UpdateRule, make_updater

RULE = UpdateRule(optimizer="sgd", fusion="none", learning_rate=1.0)


def updated(*, gradient_clipping, gradients=(3.0, 4.0), scaler=None):
    """Returns how far two weights moved: at a rate of 1, by their gradients."""
    weights = [nn.Parameter(torch.zeros(1)) for _ in gradients]
    updater = make_updater(weights, RULE, scaler=scaler, gradient_clipping=gradient_clipping)
    updater.backward(
        sum(weight * gradient for weight, gradient in zip(weights, gradients, strict=True)).sum()
    )
    updater.step()
    return [-weight.item() for weight in weights]


def test_larger_gradients_are_scaled_to_the_norm_together():
    assert updated(gradient_clipping=1.0) == pytest.approx([0.6, 0.8], rel=1e-4)


def test_smaller_gradients_are_unchanged():
    assert updated(gradient_clipping=10.0) == [3.0, 4.0]


def test_scaled_gradients_are_clipped_by_their_true_norm():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert updated(gradient_clipping=1.0, scaler=scaler) == pytest.approx([0.6, 0.8], rel=1e-4)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan"), "1", True])
def test_an_impossible_norm_is_rejected(value, workload):
    with pytest.raises(InvalidInput, match="gradient_clipping"):
        dataclasses.replace(workload, gradient_clipping=value)


def test_a_workload_without_clipping_has_the_same_name_as_before_clipping_existed(workload):
    assert "gradient_clipping" not in workload.identity()
    assert dataclasses.replace(workload, gradient_clipping=1).fingerprint != workload.fingerprint


def test_a_norm_of_one_is_the_same_however_it_is_written(workload):
    whole, decimal = (dataclasses.replace(workload, gradient_clipping=norm) for norm in (1, 1.0))
    assert whole.fingerprint == decimal.fingerprint


def test_a_search_space_has_no_step_in_backward_where_gradients_are_clipped():
    space = SearchSpace(
        name="s", techniques={"optimizer_fusion": ("none", "backward"), "micro_batch_size": (4,)}
    )

    def fusions(*, clips):
        legal = bind_space(
            space, LegalityContext(global_batch=4, clips_gradients=clips), unavailable={}
        )
        return [config.optimizer_fusion for config in legal.configurations()]

    assert (fusions(clips=False), fusions(clips=True)) == (["none", "backward"], ["none"])
