"""Finds weights of experts, each of three dimensions, and stores them in fewer than 16 bits.

A block of experts has their matrices in one parameter, [experts, rows, columns], which its forward
multiplies by `bmm`, by a grouped product, or matrix by matrix. Codes have no such products: the
module has the numbers that they stand for in their place while it is called. What autograd keeps of
these for the backward pass is in 16 bits: with checkpointing that is one block at a time.

The codes are those of `bitsandbytes.nn.parametrize.replace_parameter_4bit`, without a
parametrization: peft 0.21.2 leaves its own on a parameter that has one, with each call one more,
and reads the weights that it nests before it has added the adapter.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autotune.shipped.blocks import can_be_called, read_by
from autotune.shipped.changed_method import Method, change_method
from autotune.shipped.quantized import dequantize

_CONVOLUTIONS = nn.modules.conv._ConvNd
"""Their weights may have three dimensions as well."""


def expert_weights(model: nn.Module, parts: Iterable[nn.Module]) -> list[str]:
    """Returns the paths of the weights of experts in these parts of the model."""
    inside = {module for part in parts for module in part.modules()}
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if module in inside and not isinstance(module, _CONVOLUTIONS)
        for name, weight in module.named_parameters(recurse=False)
        if weight.dim() == 3 and min(weight.shape) > 1
    ]


def dequantize_in_calls(model: nn.Module, weights: Iterable[str]) -> None:
    """Has modules with quantized experts read the numbers that they stand for when called.

    Their weights have the paths from before peft has put adapters around the modules.
    """
    for reader in dict.fromkeys(reader_of(model, weight) for weight in weights):
        change_method(model.get_submodule(reader), "forward", _dequantizing)


def reader_of(model: nn.Module, weight: str) -> str:
    """Returns the path of the module whose forward computes with a weight.

    It is the module that has the weight, or the one around it where that only holds weights, as a
    `ParameterDict` does.
    """
    reader = weight.rpartition(".")[0]
    while not can_be_called(model.get_submodule(reader)):
        reader = reader.rpartition(".")[0]
    return reader


@contextmanager
def outlined(model: nn.Module, weights: Iterable[str]) -> Iterator[None]:
    """Has the codes of weights of experts look like the weights, to which peft adds adapters."""
    with ExitStack() as stack:
        for owner in _owners(weights):
            stack.enter_context(_other_weights(model.get_submodule(owner), _outline))
        yield


def _owners(weights: Iterable[str]) -> Iterable[str]:
    return dict.fromkeys(weight.rpartition(".")[0] for weight in weights)


def _outline(weight: Tensor) -> Tensor:
    """Returns a tensor with the sizes of what a weight stands for, and the memory of one number."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight
    number = torch.empty((), dtype=state.dtype, device=weight.device)
    return number.expand(state.shape)


def _dequantizing(forward: Method) -> Method:
    def dequantizing(module: nn.Module, *arguments: Any, **named: Any) -> Any:
        with ExitStack() as stack:
            for holder in read_by(module):
                stack.enter_context(_other_weights(holder, dequantize))
            return forward(module, *arguments, **named)

    return dequantizing


@contextmanager
def _other_weights(module: Any, other: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Has the weights of a module, within its adapters, replaced for a while."""
    while hasattr(module, "base_layer"):
        module = module.base_layer
    stored = module._parameters
    before = dict(stored)
    for name, scales in getattr(module, "quant_states", {}).items():
        before[name].quant_state = scales  # of what FSDP2 has gathered, which is another tensor
    try:
        for name, weight in before.items():
            if weight is not None:
                stored[name] = other(weight)
        yield
    finally:
        for name, weight in before.items():
            module._buffers.pop(name, None)  # where peft has put what is no parameter
            stored[name] = weight
