"""The precision that a user's model has before any technique, and the cast to another one.

A precision stands for formats of weights, not for a change of them: a model that comes in bf16 is
`bf16-true` as it is, and its fp32 trials have all its weights cast to float32. Weights in several
formats (norms in float32, a quantized base beside adapters) have no precision of one name, and
nothing says which of them a cast may change. They are `as-is`, and so is a script that turns
autocast on itself.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autotune.spec.config import Precision

_OF_FORMAT: Mapping[str, Precision] = {
    "float64": "fp64",
    "float32": "fp32",
    "bfloat16": "bf16-true",
    "float16": "fp16-true",
}
_PACKED = (torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)
"""Formats of matrices that quantized layers have as buffers. Positions are int64, masks bool."""


def own_precision(model: nn.Module) -> Precision:
    """Returns the precision whose formats the model's weights have; `as-is` if it has no name."""
    formats = _weight_formats(model)
    if not formats:
        return "fp32"
    return _OF_FORMAT.get(formats[0], "as-is") if len(formats) == 1 else "as-is"


def why_not_cast(model: nn.Module) -> str:
    """Returns why a model whose precision is `as-is` cannot have another one."""
    formats = " and ".join(_weight_formats(model))
    return (
        f"the weights are in {formats}, and which of them another precision may cast is not known"
    )


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts weights of one format in place; parameters and buffers stay the same objects.

    In a model of another format than float32, buffers in that format are cast with the weights. In
    float32 the format of a buffer says nothing, and casting it would lose digits.
    """
    before = next((weight.dtype for weight in _weights(model)), dtype)
    if dtype == before:
        return
    buffers = () if before == torch.float32 else model.buffers()
    # The optimizer refers to the parameter objects, so only their data are replaced.
    for tensor in (*model.parameters(), *buffers):
        if tensor.dtype == before:
            tensor.data = tensor.data.to(dtype)


def cast_state(optimizer: Optimizer, formats_before: Mapping[Tensor, torch.dtype]) -> None:
    """Casts the state that an optimizer has before its first step with the weights that were cast.

    torch's Adagrad, for one, makes it with the optimizer. What is in another format than the weight
    was, such as a copy in float32, stays in it.
    """
    for parameter, before in formats_before.items():
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            is_alike = isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim
            if is_alike and value.dtype == before:
                state[name] = value.to(parameter.dtype)


def _weight_formats(model: nn.Module) -> list[str]:
    return sorted({_format_of(tensor) for tensor in _weights(model)})


def _weights(model: nn.Module) -> Iterator[Tensor]:
    """Yields what has a format to know: no positions or masks, of which some are parameters."""
    for parameter in model.parameters():
        if parameter.is_floating_point() or parameter.is_complex() or parameter.dtype in _PACKED:
            yield parameter
    for module in model.modules():
        if not any(True for _ in module.children()):
            for buffer in module.buffers(recurse=False):
                if buffer.ndim == 2 and buffer.dtype in _PACKED:
                    yield buffer


def _format_of(tensor: Tensor) -> str:
    """Returns the name of the dtype, or for weights that another library stores of their class."""
    kind = type(tensor.data)
    return _name_of(tensor.dtype) if kind in (Tensor, nn.Parameter) else kind.__name__


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
