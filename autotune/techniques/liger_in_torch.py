"""What Liger's kernels keep of a model of transformers, in plain torch.

Predictions, which run on fake tensors, and tests have this in place of the package, whose kernels
need a GPU. The model's own norms and activations are computed from the tensors that Liger's
functions keep: a norm from its input, and a gated activation from its two inputs, in whose place
their gradients are written. What Liger keeps besides is one number a row of a norm, 0.05 % of the
row of an 8B model.

Source: liger-kernel 0.8.5, `src/liger_kernel/ops/` (rms_norm.py, swiglu.py, geglu.py: what
`forward` saves) and `transformers/monkey_patch.py` (which modules of a model are replaced).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from autotune.shipped.changed_method import Method, change_method

_PIECES = 16
"""Pieces of rows, so that what a kernel has in registers is small here as well."""


class _InPieces(torch.autograd.Function):
    """`compute(*inputs)`, a piece of the rows at a time; keeps the inputs and computes again."""

    @staticmethod
    def forward(ctx: Any, compute: Method, weight: Tensor | None, *inputs: Tensor) -> Tensor:
        ctx.compute, ctx.weight = compute, weight
        ctx.save_for_backward(*inputs)
        output = torch.empty_like(inputs[0])
        for rows, *given in zip(_pieces(output), *map(_pieces, inputs), strict=True):
            rows.copy_(compute(*given))
        return output

    @staticmethod
    def backward(ctx: Any, of_output: Tensor) -> Any:
        inputs, weight = ctx.saved_tensors, ctx.weight
        # What the inputs of an activation were made by does not keep them.
        found = inputs if weight is None else [torch.empty_like(inputs[0])]
        is_trained = weight is not None and weight.requires_grad
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if is_trained else None
        tensors = (of_output.contiguous(), *inputs, *found)
        for gradient, *pieces in zip(*map(_pieces, tensors), strict=True):
            given, places = pieces[: len(inputs)], pieces[len(inputs) :]
            _differentiate(ctx.compute, weight, gradient, given, places, of_weight)
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        return None, of_weight, *(one.detach() for one in found)


def _differentiate(
    compute: Method,
    weight: Tensor | None,
    gradient: Tensor,
    given: list[Tensor],
    places: list[Tensor],
    of_weight: Tensor | None,
) -> None:
    """Writes the gradients of a piece to `places`, and adds that of the weight."""
    given = [one.detach().requires_grad_() for one in given]
    with torch.enable_grad():
        output = compute(*given)
    trained = given if weight is None or of_weight is None else [*given, weight]
    found = torch.autograd.grad(output, trained, gradient.to(output.dtype))
    for place, one in zip(places, found, strict=False):
        place.copy_(one)
    if of_weight is not None:
        of_weight += found[-1]


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the pieces of the rows; of a fake tensor the first, to which all others are alike."""
    pieces = tensor.flatten(0, -2).chunk(_PIECES)
    return pieces[:1] if isinstance(tensor, FakeTensor) else pieces


def _norm_in_pieces(norm: Method) -> Method:
    def forward(module: nn.Module, hidden: Tensor) -> Any:
        compute = partial(norm, module)
        return _InPieces.apply(compute, module.weight, hidden.contiguous())  # type: ignore[no-untyped-call]

    return forward


def _gated_in_pieces(_forward: Method) -> Method:
    def forward(module: Any, hidden: Tensor) -> Any:
        if hasattr(module, "gate_up_proj"):
            gate, up = module.gate_up_proj(hidden).chunk(2, dim=-1)
        else:
            gate, up = module.gate_proj(hidden), module.up_proj(hidden)
        compute = partial(_gated, _activation(module))
        inputs = gate.contiguous(), up.contiguous()
        return module.down_proj(_InPieces.apply(compute, None, *inputs))  # type: ignore[no-untyped-call]

    return forward


def _gated(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return activation(gate) * up


def _activation(module: nn.Module) -> Any:
    return getattr(module, "act_fn", getattr(module, "activation_fn", None))


def replaced_modules(network: nn.Module) -> Iterator[tuple[nn.Module, Callable[[Method], Method]]]:
    """Yields the modules of a model of transformers that Liger replaces, with how.

    They are the feed-forward layers with a gate, and the norms of the blocks and of the model, but
    not those of queries and keys, which only a few of Liger's functions replace.
    """
    for module in network.modules():
        names = {name for name, _ in module.named_children()}
        if "down_proj" in names and names & {"gate_proj", "gate_up_proj"}:
            yield module, _gated_in_pieces
        elif "o_proj" not in names:  # no attention
            for norm in module.children():
                if type(norm).__name__.endswith("RMSNorm"):
                    yield norm, _norm_in_pieces


def replace_in_torch(network: nn.Module) -> None:
    """Replaces norms and gated activations of a model."""
    for module, change in list(replaced_modules(network)):
        change_method(module, "forward", change)
