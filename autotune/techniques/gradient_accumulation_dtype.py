"""Gradient accumulation dtype: the number format in which gradients of micro batches are added up.

| value | bytes of gradients, with bf16 weights | rounds |
|---|---|---|
| weights | 2 for each trained number | the sum, after each micro batch |
| fp32 | 4, and 4 for the gradient that is being added | the sum, once, before the update |

The norm by which gradients are clipped is that of the sums in fp32. Within a micro batch a weight
that is used several times, as with a tied head or in tiles, has its gradients added up in bf16 by
autograd. Named after DeepSpeed's `data_types.grad_accum_dtype`, since `gradient_accumulation` alone
is a number of steps everywhere; Megatron-LM has `accumulate_allreduce_grads_in_fp32`. Source:
https://docs.pytorch.org/docs/stable/generated/torch.Tensor.grad_dtype.html
"""

import torch

from autotune.shipped.fp32_gradients import accumulate_in_fp32
from autotune.spec.config import GradientAccumulationDtype


def set_accumulation_dtype(
    optimizer: torch.optim.Optimizer, choice: GradientAccumulationDtype
) -> None:
    """Has the gradients of the optimizer's parameters added up in the number format chosen."""
    if choice == "fp32":
        accumulate_in_fp32(optimizer)
