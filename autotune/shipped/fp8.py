"""Converts linear layers to products in fp8."""

from torch import nn

from autotune.shipped.fp8_sizes import FP8_MULTIPLE
from autotune.shipped.routers import routers_in


def convert(module: nn.Module, *, emulate: bool = False) -> nn.Module:
    """Makes the suitable linear layers of `module` use fp8; parameters stay the same objects.

    Routers of mixtures are left out.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    routers = routers_in(module)
    converted: nn.Module = convert_to_float8_training(
        module,
        config=Float8LinearConfig(emulate=emulate),
        module_filter_fn=lambda layer, _name: can_be_fp8(layer) and layer not in routers,
    )
    return converted


def can_be_fp8(layer: nn.Module) -> bool:
    """Returns whether it is a linear layer with sides that are multiples of FP8_MULTIPLE."""
    if not isinstance(layer, nn.Linear):
        return False
    return layer.in_features % FP8_MULTIPLE == 0 and layer.out_features % FP8_MULTIPLE == 0
