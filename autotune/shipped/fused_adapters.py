"""Computes a frozen layer and its LoRA as one function, which keeps less for the backward pass.

peft's layers keep a copy of their input for each adapter, in its number format. Here a layer keeps
its input as it was given, so that layers of one input, such as those of queries, keys and values,
keep it once. A feed-forward part with a gate is one function as well: it keeps its input and the
two inputs of its activation, which the backward pass computes again. Both keep the matrices of
adapters in the format of the computation, and convert a frozen matrix again.

The kernels of axolotl and Unsloth keep the same tensors. Source of what these are: axolotl,
src/axolotl/kernels/lora.py, LoRA_MLP, LoRA_QKV and LoRA_O.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotune.shipped.changed_method import Method, change_method
from autotune.shipped.quantized import dequantize

_NUMBERS_AT_ONCE = 2**22
"""Numbers of an activation that are computed at a time."""


def fuse_adapters(model: nn.Module) -> None:
    """Replaces how layers with adapters are computed, and gated feed-forward parts of such layers.

    Layers of classes that compute something else than a product and a bias stay as they are, and so
    does what a layer computes with dropout, a variant such as DoRA, or a trained weight or bias.
    """
    for module in list(model.modules()):
        if _is_adapted(module):
            change_method(module, "forward", _fused_layer)
        elif all(map(_is_adapted, _layers_of(module))) and _is_gated(type(module).forward):
            change_method(module, "forward", _fused_feed_forward)


_PRODUCTS = (
    "torch.nn.modules.linear.Linear.forward",
    "transformers.pytorch_utils.Conv1D.forward",
    "transformers.models.falcon.modeling_falcon.FalconLinear.forward",
    "bitsandbytes.nn.modules.Linear4bit.forward",
)
"""Methods that compute a product with the layer's weight, and add its bias."""


def _is_adapted(module: nn.Module | None) -> bool:
    """Returns whether a layer of peft adds LoRA to a product with a matrix."""
    base: Any = getattr(module, "base_layer", None)
    if base is None or not getattr(module, "lora_A", None):
        return False
    if not type(module).__module__.startswith("peft.tuners.lora."):  # as those of AdaLoRA
        return False
    forward = type(base).forward
    name = f"{forward.__module__}.{getattr(forward, '__qualname__', '')}"
    return name in _PRODUCTS and "forward" not in vars(base)


def _layers_of(part: nn.Module) -> list[Any]:
    return [getattr(part, f"{name}_proj", None) for name in ("gate", "up", "down")]


_PRODUCT = r"self\.down_proj\(self\.act_fn\(self\.gate_proj\((\w+)\)\)\*self\.up_proj\(\3\)\)"
_GATED = rf"(return|(\w+)=){_PRODUCT}(return\2)?"


@functools.cache
def _is_gated(forward: Method) -> bool:
    """Returns whether this is the feed-forward part that most models of transformers have."""
    try:
        _, body = inspect.getsource(forward).split("\n", maxsplit=1)
    except (OSError, TypeError, ValueError):  # without a source
        return False
    return re.fullmatch(_GATED, "".join(body.split())) is not None


# -- one layer -------------------------------------------------------------------------------------


def _fused_layer(forward: Method) -> Method:
    def fused(module: Any, inputs: Tensor, *others: Any, **named: Any) -> Any:
        if others or named or _is_plain(module):
            return forward(module, inputs, *others, **named)
        return _Layer.apply(module, inputs, *_matrices(module))  # type: ignore[no-untyped-call]

    return fused


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Any, inputs: Tensor, *matrices: Tensor) -> Any:
        first, second = matrices = _converted(matrices, inputs)
        ctx.layer = layer
        ctx.save_for_backward(inputs, *matrices)
        outputs = _outputs(layer, _rows(inputs, first.dtype), first, second)
        return outputs.view(*inputs.shape[:-1], outputs.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        inputs, first, second = ctx.saved_tensors
        gradient = _rows(gradient, first.dtype)
        of_matrices = _of_matrices(ctx.layer, _rows(inputs, first.dtype), gradient, first, second)
        of_inputs = None
        if ctx.needs_input_grad[1]:
            of_inputs = _of_rows(ctx.layer, gradient, first, second).view_as(inputs)
        return None, of_inputs, *of_matrices


# -- a feed-forward part ---------------------------------------------------------------------------


def _fused_feed_forward(forward: Method) -> Method:
    def fused(module: Any, inputs: Tensor) -> Any:
        layers = _layers_of(module)
        if any(map(_is_plain, layers)) or _is_trained(module.act_fn):
            return forward(module, inputs)
        matrices = [matrix for layer in layers for matrix in _matrices(layer)]
        return _FeedForward.apply(module.act_fn, layers, inputs, *matrices)  # type: ignore[no-untyped-call]

    return fused


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        activation: Callable[[Tensor], Tensor],
        layers: list[Any],
        inputs: Tensor,
        *matrices: Tensor,
    ) -> Any:
        matrices = _converted(matrices, inputs)
        rows = _rows(inputs, matrices[0].dtype)
        gate = _outputs(layers[0], rows, *matrices[0:2])
        up = _outputs(layers[1], rows, *matrices[2:4])
        ctx.activation, ctx.layers = activation, layers
        ctx.save_for_backward(inputs, gate, up, *matrices)
        hidden = torch.empty_like(gate)
        for place, *pieces in _pieces(hidden, gate, up):
            place.copy_(activation(pieces[0]) * pieces[1])
        outputs = _outputs(layers[2], hidden, *matrices[4:6])
        return outputs.view(*inputs.shape[:-1], outputs.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        inputs, gate, up, *matrices = ctx.saved_tensors
        of_gate, of_up, of_down = ctx.layers
        for_gate, for_up, for_down = matrices[0:2], matrices[2:4], matrices[4:6]
        rows, gradient = (_rows(one, gate.dtype) for one in (inputs, gradient))
        hidden = _of_rows(of_down, gradient, *for_down)
        # In the place of its gradient is then what was hidden, and so of both inputs.
        _differentiate(ctx.activation, hidden, gate, up)
        of_matrices = [
            *_of_matrices(of_gate, rows, gate, *for_gate),
            *_of_matrices(of_up, rows, up, *for_up),
            *_of_matrices(of_down, hidden, gradient, *for_down),
        ]
        del hidden
        of_inputs = None
        if ctx.needs_input_grad[2]:
            of_inputs = _of_rows(of_up, up, *for_up)
            of_inputs = _of_rows(of_gate, gate, *for_gate, added_to=of_inputs).view_as(inputs)
        return None, None, of_inputs, *of_matrices


def _differentiate(
    activation: Callable[[Tensor], Tensor], hidden: Tensor, gate: Tensor, up: Tensor
) -> None:
    """Replaces inputs of an activation by their gradients, and that of its result by the result."""
    for pieces in _pieces(hidden, gate, up):
        inputs = [one.detach().requires_grad_() for one in pieces[1:]]
        with torch.enable_grad():
            result = activation(inputs[0]) * inputs[1]
        found = torch.autograd.grad(result, inputs, pieces[0])
        for place, one in zip(pieces, (result.detach(), *found), strict=True):
            place.copy_(one)


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Returns the same rows of each tensor, a few at a time."""
    rows_at_once = max(1, _NUMBERS_AT_ONCE // tensors[0].shape[-1])
    return zip(*(tensor.split(rows_at_once) for tensor in tensors), strict=True)


# -- products --------------------------------------------------------------------------------------


def _is_plain(layer: Any) -> bool:
    """Returns whether peft is to compute a layer: with anything but one LoRA beside what is frozen.

    That may change between two calls.
    """
    if layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return True
    (name,) = layer.active_adapters
    if name not in layer.lora_A or name in layer.lora_variant:  # of another layer, or as DoRA
        return True
    dropout = layer.lora_dropout[name]
    drops = dropout.training and not isinstance(dropout, nn.Identity)
    return drops or layer.lora_B[name].bias is not None or _is_trained(layer.base_layer)


def _is_trained(part: Any) -> bool:
    """Returns whether a module, or a function without weights, has any that are trained."""
    weights = part.parameters() if isinstance(part, nn.Module) else ()
    return any(weight.requires_grad for weight in weights)


def _matrices(layer: Any) -> tuple[Tensor, Tensor]:
    (name,) = layer.active_adapters
    return layer.lora_A[name].weight, layer.lora_B[name].weight


def _converted(matrices: tuple[Tensor, ...], inputs: Tensor) -> tuple[Tensor, ...]:
    """Returns matrices of adapters in the number format of the computation."""
    kind = inputs.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype
    return tuple(matrix.to(dtype) for matrix in matrices)


def _rows(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]).to(dtype)


def _frozen(layer: Any, dtype: torch.dtype) -> Tensor:
    """Returns the frozen matrix of a layer, [outputs, inputs], of whatever format it is in."""
    base = layer.base_layer
    weight = base.weight
    # A weight that FSDP2 has gathered is another tensor than that with the scales.
    state = getattr(weight, "quant_state", None) or getattr(base, "quant_state", None)
    if state is not None:
        from bitsandbytes.functional import dequantize_4bit

        weight = dequantize_4bit(weight.data, state)
    else:
        weight = dequantize(weight)
    matrix: Tensor = weight.t() if layer.fan_in_fan_out else weight
    return matrix.to(dtype)


def _scale(layer: Any) -> float:
    (name,) = layer.active_adapters
    scale: float = layer.scaling[name]
    return scale


def _outputs(layer: Any, rows: Tensor, first: Tensor, second: Tensor) -> Any:
    bias = layer.base_layer.bias
    bias = None if bias is None else bias.to(rows.dtype)
    outputs = F.linear(rows, _frozen(layer, rows.dtype), bias)
    return outputs.addmm_(rows @ first.t(), second.t(), alpha=_scale(layer))


def _of_rows(
    layer: Any, gradient: Tensor, first: Tensor, second: Tensor, *, added_to: Tensor | None = None
) -> Any:
    """Returns the gradient of a layer's rows."""
    frozen = _frozen(layer, gradient.dtype)
    of_rows = gradient @ frozen if added_to is None else added_to.addmm_(gradient, frozen)
    return of_rows.addmm_(gradient @ second, first, alpha=_scale(layer))


def _of_matrices(
    layer: Any, rows: Tensor, gradient: Tensor, first: Tensor, second: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the two matrices of a layer's adapter."""
    scale = _scale(layer)
    of_first = (gradient @ second).mul_(scale).t() @ rows
    of_second = gradient.t() @ (rows @ first.t()).mul_(scale)
    return of_first, of_second
