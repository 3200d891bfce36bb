"""What dropout keeps for the backward pass, on a CPU and as a prediction for a GPU has it."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from autotune.predictor.cuda import gpu_kernels
from autotune.predictor.gpu import gpu_of


@pytest.mark.parametrize(
    ("kernels", "kept"),
    [(nullcontext(), torch.bfloat16), (gpu_kernels(gpu_of("9.0", None)), torch.bool)],
    ids=["on a CPU", "on a GPU"],
)
def test_the_mask_of_dropout_takes_a_byte_on_a_gpu_and_a_whole_number_on_a_cpu(kernels, kept):
    saved = []
    x = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
    keep = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor.dtype) or tensor, lambda tensor: tensor
    )
    with kernels, keep:
        dropped = nn.Dropout(0.5)(x)
    assert saved == [kept]
    dropped.sum().backward()
    assert torch.equal(x.grad, dropped)  # 2 where a number was kept, 0 where not


def test_dropout_that_drops_nothing_keeps_nothing_on_a_gpu():
    x = torch.ones(4, requires_grad=True)
    with gpu_kernels(gpu_of("9.0", None)):
        assert nn.Dropout(0.0)(x).grad_fn is None or torch.equal(nn.Dropout(0.0)(x), x)
        assert torch.equal(nn.Dropout(0.5).eval()(x), x)
