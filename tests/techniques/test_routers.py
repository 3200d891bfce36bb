"""Routers of mixtures stay out of products in 8 bits, however the experts are held."""

import pytest
import torch
from torch import nn

from autotune.shipped.fp8 import convert
from autotune.shipped.int8 import use_int8
from autotune.shipped.routers import routers_in

EXPERTS, WIDTH = 16, 32


def stack():
    return nn.Parameter(torch.zeros(EXPERTS, WIDTH, WIDTH))


class Stacks(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = stack()

    def forward(self, hidden):
        return hidden


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, EXPERTS)

    def forward(self, hidden):
        return self.layer(hidden)


class Mixture(nn.Module):
    def __init__(self, experts, router):
        super().__init__()
        self.router = router
        if isinstance(experts, nn.Parameter):
            self.weights = experts
        else:
            self.experts = experts
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden


class Block(nn.Module):
    def __init__(self, mixture):
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.mixture = mixture

    def forward(self, hidden):
        return hidden


HELD = {
    "a list of modules": lambda: nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)),
    "a dictionary of modules": lambda: nn.ModuleDict(
        {str(index): nn.Linear(WIDTH, EXPERTS) for index in range(EXPERTS)}
    ),
    "a list of weights": lambda: nn.ParameterList(
        torch.zeros(WIDTH, WIDTH) for _ in range(EXPERTS)
    ),
    "a weight of the mixture": stack,
    "a module with a weight": Stacks,
    "a dictionary of weights": lambda: nn.ParameterDict({"up": stack(), "down": stack()}),
}
ROUTERS = {"a layer": lambda: nn.Linear(WIDTH, EXPERTS), "a module with a layer": Gate}
CHANGES = {"int8-mixed": use_int8, "fp8": lambda block: convert(block, emulate=True)}


def layers_of(block):
    return {path: layer for path, layer in block.named_modules() if isinstance(layer, nn.Linear)}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("held", HELD)
def test_only_the_router_is_known_as_one(held, router):
    block = Block(Mixture(HELD[held](), ROUTERS[router]()))
    layers = layers_of(block)
    assert [path for path, layer in layers.items() if layer in routers_in(block)] == [
        path for path in layers if "router" in path
    ]


@pytest.mark.parametrize("precision", CHANGES)
@pytest.mark.parametrize("held", HELD)
def test_a_router_stays_a_plain_layer_and_all_others_multiply_in_8_bits(held, precision):
    block = Block(Mixture(HELD[held](), nn.Linear(WIDTH, EXPERTS)))
    CHANGES[precision](block)
    plain = [path for path, layer in layers_of(block).items() if type(layer) is nn.Linear]
    assert plain == ["mixture.router"]


def test_a_block_without_experts_has_no_router():
    assert not routers_in(Block(nn.Linear(WIDTH, EXPERTS)))
