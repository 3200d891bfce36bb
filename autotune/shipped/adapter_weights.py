"""The initial adapters of a trial."""

import math
import zlib

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


@torch.no_grad()
def draw_adapters(model: nn.Module, *, seed: int) -> None:
    """Draws the initial adapters of the trial: random numbers that depend on seed and name.

    Those that peft began as parts of a weight stay as they are.
    """
    for name, parameter in model.named_parameters():
        second = model.get_parameter(name.replace(".lora_A.", ".lora_B."))
        if ".lora_A." in name and not second.any():
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
