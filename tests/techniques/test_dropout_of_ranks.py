"""Which activations dropout drops on each device of a trial."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autotune.models.weights import Placement
from autotune.predictor.ranks import as_rank
from autotune.spec.config import TrainingConfig
from autotune.techniques.sharding import make_mesh, shard

CPU = torch.device("cpu")


def masks(*, ranks, **choices):
    """Returns what dropout leaves of ones on each rank; the others do not exist meanwhile."""
    config = TrainingConfig(micro_batch_size=1, **choices)
    found = []
    for rank in range(ranks):
        with as_rank(rank, of=ranks):
            devices = shard(
                SimpleNamespace(model=nn.Linear(2, 2), blocks=[]),
                config,
                mesh=make_mesh(config, devices=ranks, device=CPU),
                device=CPU,
                placement=Placement(dtype=torch.float32, device=CPU),
            )
        devices.seed_dropout(7)
        found.append(tuple(nn.functional.dropout(torch.ones(64)).tolist()))
    return found


def test_devices_with_other_rows_drop_other_activations():
    assert len(set(masks(ranks=4, sharding="ddp"))) == 4


def test_devices_that_train_the_same_rows_drop_the_same_activations():
    first, second, third, fourth = masks(ranks=4, sharding="ddp", tensor_parallel=2)
    assert first == second
    assert third == fourth
    assert first != third


@pytest.mark.parametrize("drawn", [0, 3])
def test_random_numbers_drawn_while_a_model_is_divided_change_no_mask(drawn):
    with as_rank(0, of=2):
        config = TrainingConfig(tensor_parallel=2)
        devices = shard(
            SimpleNamespace(model=nn.Linear(2, 2), blocks=[]),
            config,
            mesh=make_mesh(config, devices=2, device=CPU),
            device=CPU,
            placement=Placement(dtype=torch.float32, device=CPU),
        )
    torch.rand(drawn)
    devices.seed_dropout(7)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(7))
    assert torch.equal(torch.rand(4), expected)
