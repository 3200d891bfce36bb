"""Measures how many tokens go to other experts where the router of a mixture is in 8 or 4 bits.

    OMP_NUM_THREADS=1 python studies/routers/measure.py

Prints the table of README.md: of mixtures whose router is a linear layer, trained in fp32.
"""

import copy
import pydoc_data.topics
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune.shipped.fp8 import convert
from autotune.shipped.int8 import use_int8
from autotune.spec.config import BaseWeights
from autotune.techniques.base_weights import quantize

TOKENS, SEQUENCES, STEPS = 64, 8, 300
SHAPES = ((64, 16, 1), (64, 16, 2))
"""Width, experts, and how many of them a token goes to."""


class Mixture(nn.Module):
    """Experts with a linear layer as their router, whose choices are kept."""

    def __init__(self, width: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.chosen = chosen
        self.choices = torch.empty(0)

    def forward(self, hidden: Tensor) -> Tensor:
        shares, choices = self.router(hidden).float().softmax(-1).topk(self.chosen)
        self.choices = choices.detach().sort(-1).values
        result = torch.zeros_like(hidden)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            share = (shares * (choices == expert)).sum(-1, keepdim=True)
            rows = share.squeeze(-1) > 0
            if rows.any():
                part = functional.gelu(up(hidden[rows]))
                result[rows] = result[rows] + (down(part) * share[rows]).to(result.dtype)
        return result


class Block(nn.Module):
    def __init__(self, width: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.ModuleDict(
            {"qkv": nn.Linear(width, 3 * width), "output": nn.Linear(width, width)}
        )
        self.mixture = Mixture(width, experts, chosen)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.attention["qkv"](self.attention_norm(hidden)).unflatten(-1, (3, 4, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention["output"](mixed.transpose(1, 2).flatten(2))
        return hidden + self.mixture(self.norm(hidden))


class Model(nn.Module):
    def __init__(self, width: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width, experts, chosen) for _ in range(3))
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.position.weight
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


TEXT = torch.tensor(list("".join(pydoc_data.topics.topics.values()).encode()))


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(TEXT) - TOKENS - 1, (SEQUENCES,), generator=generator)
    rows = torch.stack([TEXT[start : start + TOKENS + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def trained(width: int, experts: int, chosen: int) -> Model:
    torch.manual_seed(0)
    model = Model(width, experts, chosen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        tokens, labels = batch(step)
        functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def linear_layers(model: Model, *, routers: bool) -> list[nn.Module]:
    found: list[nn.Module] = []
    for block in model.blocks:
        for path, layer in block.named_modules():
            if isinstance(layer, nn.Linear) and (routers or "router" not in path):
                found.append(layer)
    return found


def in_8_bits(change: Callable[[nn.Module], object]) -> Callable[[Model, bool], None]:
    def apply(model: Model, routers: bool) -> None:
        for block in model.blocks:
            change(block)  # all but the router
            if routers:
                alone = nn.Sequential(block.mixture.router)
                change(alone)
                block.mixture.router = alone[0]

    return apply


def stored_in(value: BaseWeights) -> Callable[[Model, bool], None]:
    def apply(model: Model, routers: bool) -> None:
        for layer in linear_layers(model, routers=routers):
            weight = nn.Parameter(layer.get_parameter("weight").bfloat16(), requires_grad=False)
            layer.weight = nn.Parameter(quantize(weight, value, dequantized=True).float())

    return apply


WAYS: Mapping[str, Callable[[Model, bool], None]] = {
    "bf16-mixed": lambda model, routers: None,
    "int8-mixed": in_8_bits(use_int8),
    "fp8": in_8_bits(lambda block: convert(block, emulate=True)),
    "base weights int8": stored_in("int8"),
    "base weights fp8": stored_in("fp8"),
    "base weights nf4": stored_in("nf4"),
}


@torch.no_grad()
def run(model: Model) -> tuple[list[Tensor], float]:
    """Returns the choices of each block, and the loss, in other places of the text."""
    choices: list[list[Tensor]] = [[] for _ in model.blocks]
    losses = []
    for seed in range(10**6, 10**6 + 16):
        tokens, labels = batch(seed)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(tokens).float()
        losses.append(functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item())
        for kept, block in zip(choices, model.blocks, strict=True):
            kept.append(block.mixture.choices)
    return [torch.cat(kept) for kept in choices], sum(losses) / len(losses)


def main() -> None:
    for shape in SHAPES:
        plain = trained(*shape)
        model = copy.deepcopy(plain)
        expected, loss = run(model)
        print(f"width {shape[0]}, {shape[1]} experts, {shape[2]} chosen: loss {loss:.4f}")
        for name, change in WAYS.items():
            said = []
            for routers in (True, False):
                other = copy.deepcopy(plain)
                change(other, routers)
                choices, loss = run(other)
                shares = [
                    (one != wanted).any(-1).float().mean().item()
                    for one, wanted in zip(choices, expected, strict=True)
                ]
                said.append(f"{100 * max(shares):.1f} % ({loss:.4f})")
            print(f"  {name}: {said[0]}, without routers {said[1]}", flush=True)


if __name__ == "__main__":
    main()
