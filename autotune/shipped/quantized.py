"""Weights that are stored in fewer than 16 bits."""

from collections.abc import Iterator

from torch import Tensor


def is_quantized(parameter: Tensor) -> bool:
    """Returns whether a weight is stored in fewer than 16 bits, by bitsandbytes or torchao."""
    return hasattr(parameter, "quant_state") or type(parameter).__module__.startswith("torchao.")


def dequantize(weight: Tensor) -> Tensor:
    """Returns the numbers that a compressed weight stands for; any other weight as it is."""
    state = getattr(weight, "quant_state", None)
    if state is not None:
        from bitsandbytes.functional import dequantize_4bit

        weight = dequantize_4bit(weight.data, state)
    elif type(weight).__module__.startswith("torchao."):
        weight = weight.dequantize()
    return weight


def tensors_behind(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with memory of their own that make up a tensor.

    They are codes and scales where it is quantized: the inner tensors of a subclass, or those of
    the `quant_state` that bitsandbytes has beside its codes. Otherwise it is the tensor itself.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):  # not the mesh of a DTensor
                yield from tensors_behind(inner)
    else:
        yield tensor
    yield from scales_beside(tensor)


def scales_beside(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors of the `quant_state` of a weight of bitsandbytes; of any other, none."""
    state = getattr(tensor, "quant_state", None)
    while state is not None:
        yield from (value for value in vars(state).values() if isinstance(value, Tensor))
        state = state.state2
