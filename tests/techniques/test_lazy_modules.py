"""Weights that the first forward pass creates can be neither cast nor watched before it."""

import pytest
import torch
from torch import nn

from autotune.errors import InvalidInput
from autotune.spec.config import TrainingConfig
from autotune.techniques.user_training import apply_to_user_training, missing_in_user_model

LAZY = {
    "0.weight": nn.LazyLinear(4),
    "0.running_mean": nn.LazyBatchNorm1d(affine=False),
}


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize(
    "use",
    [
        lambda model, optimizer: missing_in_user_model(
            model, optimizer, {"precision": ["fp32", "bf16-true"]}
        ),
        lambda model, optimizer: apply_to_user_training(
            TrainingConfig(optimizer_fusion="backward"), model, optimizer
        ),
    ],
)
def test_a_model_that_was_never_called_is_named_with_the_way_out(name, use):
    model = nn.Sequential(LAZY[name], nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(InvalidInput, match=f"{name} has no size") as caught:
        use(model, optimizer)
    assert "call the model once" in caught.value.hint


def test_a_lazy_model_that_was_called_is_trained_as_any_other():
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    model(torch.zeros(1, 3))
    optimizer = torch.optim.SGD(model.parameters())
    apply_to_user_training(TrainingConfig(optimizer_fusion="backward"), model, optimizer)
    before = model[0].bias.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    assert not torch.equal(model[0].bias, before)
