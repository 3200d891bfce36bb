"""Stochastic rounding is exact in expectation: small updates take effect on average."""

import pytest
import torch
from torch import nn

from autotune.shipped.stochastic_rounding import StochasticallyRounded, round_to_bf16
from autotune.spec.optimizers import OPTIMIZERS
from autotune.techniques.optimizer import make_optimizer

BETWEEN_BF16 = 2**-7
"""Distance of 1.0 to the next larger bf16."""


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


def adamw(parameters):
    return make_optimizer(parameters, "adamw", fusion="none", learning_rate=1e-4)


def test_a_value_is_rounded_to_one_of_its_two_neighbours():
    rounded = round_to_bf16(torch.full((1000,), 1 + 0.3 * BETWEEN_BF16))
    assert set(rounded.tolist()) == {1.0, 1 + BETWEEN_BF16}


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_expectation_is_exact(share, sign):
    exact = sign * (1 + share * BETWEEN_BF16)
    mean = (
        round_to_bf16(torch.full((200_000,), exact), generator=torch.Generator().manual_seed(0))
        .double()
        .mean()
    )
    assert mean.item() == pytest.approx(exact, abs=0.01 * BETWEEN_BF16)


def test_values_that_bf16_can_represent_are_unchanged():
    values = torch.randn(1000).bfloat16()
    assert torch.equal(round_to_bf16(values.float()), values)


def test_infinities_and_every_nan_are_unchanged():
    cuda_nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    values = torch.cat([torch.tensor([float("inf"), -float("inf"), float("nan")]), cuda_nan])
    assert torch.equal(round_to_bf16(values).isnan(), values.isnan())
    assert round_to_bf16(values)[:2].tolist() == [float("inf"), -float("inf")]


def test_small_updates_take_effect_that_bf16_would_round_away():
    weight = nn.Parameter(torch.ones(20_000, dtype=torch.bfloat16))
    plain = nn.Parameter(torch.ones(20_000, dtype=torch.bfloat16))
    rounded, nearest = StochasticallyRounded([weight], sgd, learning_rate=1.0, seed=0), sgd([plain])
    for _ in range(20):
        weight.grad = torch.full_like(weight, -0.05 * BETWEEN_BF16)
        plain.grad = torch.full_like(plain, -0.05 * BETWEEN_BF16)
        rounded.step()
        nearest.step()
    assert (plain == 1.0).all()
    assert weight.double().mean().item() == pytest.approx(1 + BETWEEN_BF16, abs=0.02 * BETWEEN_BF16)


def test_state_stays_in_bf16_and_counts_stay_numbers():
    weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = StochasticallyRounded([weight], adamw, learning_rate=1e-4, seed=0)
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    (state,) = optimizer.state.values()
    assert {name: getattr(value, "dtype", value) for name, value in state.items()} == {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
        "rounded_steps": 3,
    }
    assert state["step"].item() == 3


def test_state_is_updated_in_place():
    """Other references to the state, as of a checkpoint being written, keep no copy alive."""
    weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = StochasticallyRounded([weight], adamw, learning_rate=1e-4, seed=0)
    addresses = []
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        addresses.append(
            [optimizer.state[weight][name].data_ptr() for name in ("exp_avg", "exp_avg_sq")]
        )
    assert addresses[0] == addresses[1] == addresses[2]


def test_a_second_moment_decreases_that_rounding_to_nearest_would_freeze():
    weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = StochasticallyRounded([weight], adamw, learning_rate=1e-4, seed=0)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    first = optimizer.state[weight]["exp_avg_sq"].float().mean()
    for _ in range(300):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    share = (optimizer.state[weight]["exp_avg_sq"].float().mean() / first).item()
    assert share == pytest.approx(0.999**300, rel=0.01)


@pytest.mark.slow
def test_every_configuration_of_a_seed_draws_the_same_noise(losses_of):
    choices = {"precision": "bf16-stochastic"}
    in_backward = losses_of(optimizer_fusion="backward", **choices)
    assert losses_of(**choices) == in_backward == losses_of(checkpointing="block", **choices)


def test_the_noise_does_not_change_the_models_random_numbers():
    weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = StochasticallyRounded([weight], sgd, learning_rate=1.0, seed=0)
    weight.grad = torch.ones_like(weight)
    before = torch.get_rng_state()
    optimizer.step()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "optimizer", [name for name, facts in OPTIMIZERS.items() if not facts.state_form]
)
def test_every_optimizer_learns_with_it(optimizer, losses_of):
    losses = losses_of(steps=24, optimizer=optimizer, precision="bf16-stochastic")
    assert losses[-1] < losses[0] - 0.1


def test_weights_and_state_take_as_much_as_with_bf16_true(make_trainer):
    def bytes_of(precision):
        trainer = make_trainer(precision=precision)
        trainer.step(0, next(trainer.batches()))
        tensors = [*trainer.training.parts.model.parameters(), *trainer.training.updater.state()]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    assert bytes_of("bf16-stochastic") == bytes_of("bf16-true")


@pytest.mark.slow
def test_with_a_small_rate_the_loss_stays_closer_to_fp32_than_bf16_true(
    make_trainer, workload, monkeypatch
):
    """At a rate whose updates are below half of bf16's resolution, bf16-true does not learn."""
    monkeypatch.setattr(type(workload), "learning_rate_of", lambda *_: 5e-5)

    def last_loss(precision, steps=60):
        trainer = make_trainer(precision=precision)
        batches = trainer.batches()
        return [trainer.step(step, next(batches)) for step in range(steps)][-1]

    exact = last_loss("fp32")
    assert abs(last_loss("bf16-stochastic") - exact) < abs(last_loss("bf16-true") - exact) / 2
