"""Tries a layer of few bits on a device: that its kernels run, and that they multiply.

The parity check compares a trial with a plain training of the same format, in which a wrong product
would be just as wrong.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

LARGEST_DIFFERENCE = 0.2
"""Of the norm of a result. Rounding to 4 bits is a tenth, to 8 bits a twentieth or less; a scale
that is missing, or rows of others, are far more."""
COMPARED = ("output", "gradient", "weight gradient")
"""What is compared with a product in 32 bits; the last where the weight is trained."""
_ROWS = 64


def why_wrong(layer: nn.Module, weight: Tensor) -> str | None:
    """Returns how a layer differs from the product with `weight`, [outputs, inputs], and gradients.

    None if it does not. Its inputs are in bf16, under autocast. Raises what the layer raises.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_ROWS, weight.shape[1], generator=generator).to(weight.device).bfloat16()
    trained = [one for one in layer.parameters() if one.requires_grad]
    exact = weight.detach().float().requires_grad_()
    expected = _step(lambda tried: tried @ exact.t(), rows.float(), [exact][: len(trained)])
    with torch.autocast(weight.device.type, dtype=torch.bfloat16):
        found = _step(layer, rows, trained)
    for what, one, other in zip(COMPARED, found, expected, strict=False):
        difference = float((one.float() - other).norm() / other.norm())
        if not difference <= LARGEST_DIFFERENCE:  # nor NaN
            return f"the {what} of a layer is {difference:.0%} off that of a product in 32 bits"
    return None


def _step(
    compute: Callable[[Tensor], Tensor], rows: Tensor, trained: Sequence[Tensor]
) -> list[Tensor]:
    """Returns the output, and the gradients of the inputs and of what is trained.

    They are those of a loss that grows from row to row.
    """
    rows = rows.detach().requires_grad_()
    output = compute(rows)
    scale = torch.linspace(0.5, 1.5, len(rows), device=rows.device)
    loss = (output.float().square() * scale[:, None]).sum()
    gradients = torch.autograd.grad(
        loss, [rows, *trained], allow_unused=True, materialize_grads=True
    )
    return [output.detach(), *gradients]
