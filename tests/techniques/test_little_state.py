"""Optimizers with little state, against what their authors' code does with the same gradients."""

import math

import pytest
import torch
from torch import nn

from autotune.shipped import apollo
from autotune.shipped.adamw_bf16 import AdamWBf16
from autotune.shipped.apollo import Apollo
from autotune.shipped.matrices import matrices_apart
from autotune.shipped.muon import MuonWithAdamW
from autotune.spec.optimizers import OPTIMIZERS

RATE, STEPS = 1e-2, 20
SHAPES = [(24, 64), (64, 24), (32, 32)]
OF_MATRICES = [name for name, facts in OPTIMIZERS.items() if facts.of_matrices]


def weights(*shape):
    """Two equal parameters."""
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return nn.Parameter(start.clone()), nn.Parameter(start.clone())


def step_together(optimizers, parameters, *, steps=STEPS):
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        gradient = torch.randn(parameters[0].shape, generator=generator) * (1 + step)
        for optimizer, parameter in zip(optimizers, parameters, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()


def as_matrices(parameter, name):
    return [{"params": [parameter], "are_matrices": True, **OPTIMIZERS[name].of_matrices}]


# -- AdamW with moments in bf16 --------------------------------------------------------------------


def test_moments_in_bf16_train_like_those_in_float32():
    ours, theirs = weights(64, 96)
    step_together(
        [AdamWBf16([ours], lr=RATE), torch.optim.AdamW([theirs], lr=RATE)], [ours, theirs]
    )
    start, _ = weights(64, 96)
    assert (ours - theirs).norm() < 0.02 * (theirs - start).norm()


def test_a_second_moment_in_bf16_forgets_a_thousandth_at_each_step():
    weight, _ = weights(64, 96)
    optimizer = AdamWBf16([weight], lr=RATE)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    before = optimizer.state[weight]["exp_avg_sq"].float().mean().item()
    weight.grad = torch.zeros_like(weight)
    for _ in range(200):
        optimizer.step()
    after = optimizer.state[weight]["exp_avg_sq"].float().mean().item()
    assert after == pytest.approx(before * 0.999**200, rel=0.01)


def test_each_moment_takes_two_bytes_for_a_weight_in_any_format():
    for dtype in (torch.float32, torch.bfloat16):
        weight = nn.Parameter(torch.ones(64, 96, dtype=dtype))
        optimizer = AdamWBf16([weight], lr=RATE)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        state = optimizer.state[weight]
        assert state["exp_avg"].nbytes == state["exp_avg_sq"].nbytes == 2 * 64 * 96


def test_an_update_in_parts_is_that_of_the_whole_but_for_rounding(monkeypatch):
    whole, in_parts = weights(64, 96)
    step_together([AdamWBf16([whole], lr=RATE)], [whole])
    monkeypatch.setattr("autotune.shipped.adamw_bf16.NUMBERS_AT_ONCE", 7 * 96)
    step_together([AdamWBf16([in_parts], lr=RATE)], [in_parts])
    start, _ = weights(64, 96)
    assert (whole - in_parts).norm() < 0.02 * (whole - start).norm()


def test_a_resumed_training_rounds_as_the_uninterrupted_one_does():
    whole, resumed = weights(64, 96)
    first = AdamWBf16([whole], lr=RATE)
    step_together([first], [whole], steps=3)
    second = AdamWBf16([resumed], lr=RATE)
    second.load_state_dict(first.state_dict())
    resumed.data.copy_(whole.data)
    step_together([first, second], [whole, resumed], steps=3)
    assert torch.equal(whole, resumed)
    assert second.state[resumed]["exp_avg"].dtype == torch.bfloat16


# -- those that treat matrices apart ---------------------------------------------------------------


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in "ab")
        self.layers[0].experts = nn.Parameter(torch.zeros(3, 8, 4))
        self.layers[0].bias_of_experts = nn.Parameter(torch.zeros(3, 4))
        self.layers[1].convolution = nn.Conv1d(8, 8, 4, groups=8)
        self.head = nn.Linear(8, 10)
        self.layers[1][0].weight.requires_grad_(False)


def test_matrices_of_blocks_are_apart_from_embeddings_heads_norms_and_biases():
    model = Model()
    matrices, others = matrices_apart(model, {"momentum": 0.95})
    assert (matrices["are_matrices"], matrices["momentum"]) == (True, 0.95)
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {names[parameter] for parameter in matrices["params"]}
    assert found == {"layers.0.0.weight", "layers.0.experts"}
    frozen = {"layers.1.0.weight"}
    assert {names[parameter] for parameter in others["params"]} == {
        *names.values()
    } - found - frozen


class WithPositions(nn.Module):
    """A block with a parameter of three dimensions that is no stack of experts."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(1, 8, 64))
        self.up, self.down = nn.Parameter(torch.zeros(64, 256)), nn.Parameter(torch.zeros(256, 64))

    def forward(self, hidden):
        return (hidden + self.positions) @ self.up @ self.down


class Mixture(nn.Module):
    """A block whose experts have their weights and biases in modules of their own."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterDict({"up": nn.Parameter(torch.zeros(4, 8, 16))})
        self.biases = nn.ParameterDict(
            {"up": nn.Parameter(torch.zeros(4, 16)), "down": nn.Parameter(torch.zeros(4, 8))}
        )
        self.router = nn.Parameter(torch.zeros(8, 4))

    def forward(self, hidden):
        return torch.einsum("tc,eci,ce->ti", hidden, self.weights["up"], self.router)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(WithPositions, {"positions", "up", "down"}), (Mixture, {"weights.up", "router"})],
)
def test_only_what_has_a_row_for_each_expert_is_no_matrix(kind, expected):
    model = nn.Module()
    model.layers = nn.ModuleList([kind(), kind()])
    matrices, *_ = matrices_apart(model, {"momentum": 0.95})
    names = {parameter: name for name, parameter in model.layers[1].named_parameters()}
    assert {names[one] for one in matrices["params"] if one in names} == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_a_matrix_is_updated_as_by_the_muon_of_torch(shape):
    ours, theirs = weights(*shape)
    made = MuonWithAdamW(as_matrices(ours, "muon"), lr=RATE)
    settings = {"lr": RATE, "weight_decay": 0.1, "momentum": 0.95}
    reference = torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **settings)
    step_together([made, reference], [ours, theirs])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", OF_MATRICES)
def test_a_parameter_that_is_no_matrix_of_a_block_is_updated_by_adamw(name):
    facts = OPTIMIZERS[name]
    ours, theirs = weights(7)
    kind = MuonWithAdamW if name == "muon" else Apollo
    made = kind([ours], lr=RATE)
    step_together([made, torch.optim.AdamW([theirs], lr=RATE, **facts.settings)], [ours, theirs])
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", OF_MATRICES)
def test_a_stack_of_matrices_has_the_state_of_its_matrices(name):
    stack, _ = weights(3, 24, 64)
    alone = [nn.Parameter(part.detach().clone()) for part in stack]
    kind = MuonWithAdamW if name == "muon" else Apollo
    together = kind(as_matrices(stack, name), lr=RATE)
    apart = kind(
        [{**as_matrices(alone[0], name)[0], "params": alone}],
        lr=RATE,
    )
    stack.grad = torch.randn(stack.shape, generator=torch.Generator().manual_seed(1))
    for one, gradient in zip(alone, stack.grad, strict=True):
        one.grad = gradient.clone()
    together.step()
    apart.step()
    sizes = [
        sum(t.nbytes for s in made.state.values() for t in s.values() if getattr(t, "ndim", 0))
        for made in (together, apart)
    ]
    assert sizes[0] == sizes[1]
    if name == "muon":
        torch.testing.assert_close(stack, torch.stack(alone), rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["apollo", "apollo-mini"])
def test_a_matrix_is_updated_as_by_the_package_of_apollo(name, shape, monkeypatch):
    """With the projection of the package, which draws it for the number of a parameter."""
    theirs_of = pytest.importorskip("apollo_torch").APOLLOAdamW
    is_mini = name == "apollo-mini"
    rank = 1 if is_mini else min(shape) // apollo.SMALLEST_PART

    def drawn(weight, *, steps, rank):
        of_shorter = (rank, min(weight.shape))
        is_tall = weight.size(0) >= weight.size(1)
        size = of_shorter if is_tall else of_shorter[::-1]
        values = torch.randn(size, generator=torch.Generator().manual_seed(1)) / math.sqrt(rank)
        return values.t() if is_tall else values

    monkeypatch.setattr(apollo, "_projection", drawn)
    ours, theirs = weights(*shape)
    group = {"rank": rank, "scale": 128 if is_mini else 1, "proj": "random", "proj_type": "std"}
    group |= {"scale_type": "tensor" if is_mini else "channel", "update_proj_gap": 200}
    reference = theirs_of([{"params": [theirs], **group}], lr=RATE)
    made = Apollo([{**as_matrices(ours, name)[0], "rank": rank}], lr=RATE)
    step_together([made, reference], [ours, theirs])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_a_projection_is_drawn_anew_after_200_steps():
    weight, _ = weights(24, 64)
    first, same, other = (apollo._projection(weight, steps=n, rank=4) for n in (0, 199, 200))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert first.std().item() == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("name", ["apollo", "apollo-mini"])
def test_a_matrix_whose_first_gradient_is_zero_is_trained_from_the_second_on(name):
    moved = []
    for first in (0.0, 1.0):
        weight, start = weights(64, 96)
        optimizer = Apollo(as_matrices(weight, name), lr=RATE)
        generator = torch.Generator().manual_seed(2)
        for step in range(20):
            weight.grad = torch.randn(weight.shape, generator=generator)
            weight.grad *= first if step == 0 else 1.0
            optimizer.step()
        moved.append((weight - start).norm().item())
    assert moved[0] > 0.5 * moved[1]
