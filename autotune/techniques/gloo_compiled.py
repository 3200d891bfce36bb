"""Communication by gloo in compiled code, which calls collectives as operators of torch.

Such an operator only begins the collective, and another one waits for it. Gloo's threads may hold
on to the tensors for a moment longer, and free one unseen by the profiler: up to 4 % of a small
model's peak, in one run and not in the next. Here the operator itself ends the collective, by the
rules of `gloo.py`; waiting for it then does nothing.
"""

from functools import cache
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from autotune.shipped.gloo import GlooAllGather, add_up, add_up_in_place


@cache
def use_gloo_in_compiled_code() -> torch.library.Library:
    """Have compiled code of this process communicate in this way between CPUs.

    Predictions run on fake tensors, whose operators are others. The library is returned because
    its operators live as long as it does; here that is as long as the process.
    """
    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_reduce", _all_reduce, "CPU")
    library.impl("all_reduce_", _all_reduce_in_place, "CPU")
    library.impl("all_gather_into_tensor", _all_gather, "CPU")
    return library


def _all_reduce(tensor: Tensor, _operation: str, group_name: str) -> Tensor:
    """Returns the sum, which is the only operation of tensor parallelism."""
    return add_up(tensor, _group(group_name))


def _all_reduce_in_place(tensor: Tensor, _operation: str, group_name: str) -> Tensor:
    add_up_in_place(tensor, _group(group_name))
    return tensor


def _all_gather(tensor: Tensor, size: int, group_name: str) -> Tensor:
    gathered = tensor.new_empty(tensor.shape[0] * size, *tensor.shape[1:])
    GlooAllGather()(gathered, tensor, _group(group_name))
    return gathered


def _group(name: str) -> Any:
    return _resolve_process_group(name)  # type: ignore[arg-type]  # a new type of str
