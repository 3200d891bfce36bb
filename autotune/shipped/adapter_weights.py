"""The initial adapters of a trial."""

import math
import zlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

SVD_ITERATIONS = 16
"""Of the randomized decomposition that PiSSA's fast start takes (arXiv:2404.02948, section 4.3)."""


@torch.no_grad()
def principal_matrices(
    weight: Tensor, *, rank: int, scale: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Returns the two matrices of an adapter that begins as PiSSA's, both in float32.

    `weight` is [outputs, inputs]; `scale` times the second, [outputs, rank], by the first,
    [rank, inputs], is the part of it with the largest singular values. Source: arXiv:2404.02948,
    equations 2 to 4. Where `rank` is larger than the weight, the rest of it is zero.
    """
    largest = min(rank, *weight.shape)
    devices = [weight.device] if weight.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        outputs, values, inputs = torch.svd_lowrank(weight.float(), largest, niter=SVD_ITERATIONS)
    roots = (values / scale).sqrt()
    first, second = roots[:, None] * inputs.t(), outputs * roots
    return pad(first, (0, 0, 0, rank - largest)), pad(second, (0, rank - largest))


def without_principal(weight: Tensor, first: Tensor, second: Tensor, *, scale: float) -> Tensor:
    """Returns what is left of a weight beside these matrices, in its number format."""
    return (weight.float() - scale * second @ first).to(weight.dtype)


@torch.no_grad()
def begin_as_principal(model: nn.Module, *, seed: int) -> None:
    """Lets adapters begin as the trial's by PiSSA: as parts of the weights, which have the rest.

    peft rounds the matrices to the number format of the weights, and not what is taken out there.
    """
    for path, module in model.named_modules():
        for name, first in getattr(module, "lora_A", {}).items():
            layer: Any = module
            weight = layer.get_base_layer().weight
            numbers = weight.t() if layer.fan_in_fan_out else weight
            scale, own_seed = layer.scaling[name], seed + zlib.crc32(path.encode())
            matrices = principal_matrices(numbers, rank=layer.r[name], scale=scale, seed=own_seed)
            rest = without_principal(numbers, *matrices, scale=scale)
            weight.copy_(rest.t() if layer.fan_in_fan_out else rest)
            first.weight.copy_(matrices[0])
            layer.lora_B[name].weight.copy_(matrices[1])


@torch.no_grad()
def draw_adapters(model: nn.Module, *, seed: int) -> None:
    """Draws the initial adapters of the trial: random numbers that depend on seed and name."""
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            drawn = torch.empty(parameter.shape)
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            parameter.copy_(drawn)
    for module in model.modules():
        for name, magnitude in getattr(module, "lora_magnitude_vector", {}).items():
            # DoRA's magnitudes begin as the norms of the weights, from here on in float32.
            magnitude.update_layer(
                base_layer=module.get_base_layer(),  # type: ignore[operator]
                lora_A=module.lora_A[name].weight,  # type: ignore[index, union-attr]
                lora_B=module.lora_B[name].weight,  # type: ignore[index, union-attr]
                scaling=module.scaling[name],  # type: ignore[index]
            )
