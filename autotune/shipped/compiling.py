"""Compiles modules in place."""

from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo.config
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from autotune.shipped.changed_method import Method, change_method


def compile_in_place(module: nn.Module) -> None:
    """Compiles the forward pass of the module; copies and pickles of it are not compiled."""
    # Recomputed code changes attributes, such as a count, once, as without the compiler.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    module.compile(dynamic=False)
    if any(True for _ in _recomputed_buffers(module)):
        change_method(module, "__call__", _watching_buffers)
    elif type(module).__getstate__ is not nn.Module.__getstate__:  # torch's leaves the graph out
        change_method(module, "forward", _unchanged)


def _unchanged(forward: Method) -> Method:
    return forward


def _watching_buffers(call: Method) -> Method:
    def watching(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        buffers = list(_recomputed_buffers(self))
        versions = [buffer._version for buffer in buffers]
        output = call(self, *args, **kwargs)
        if torch.is_grad_enabled() and versions != [buffer._version for buffer in buffers]:
            raise RuntimeError(
                f"a recomputed part of {type(self).__name__} changes a buffer in place, and "
                "compiled code would recompute with the changed one: train without compile, or "
                "without checkpointing"
            )
        return output

    return watching


def _recomputed_buffers(module: nn.Module) -> Iterator[Tensor]:
    """Yields the buffers that recomputed code may read after it has changed them in place."""
    for part in module.modules():
        changes = [
            vars(base)["_before"].change for base in type(part).__mro__ if "_before" in vars(base)
        ]
        if not any(getattr(change, "recomputes", False) for change in changes):
            continue
        for inner in part.modules():
            if not isinstance(inner, _NormBase):  # in training it reads none
                yield from inner.buffers(recurse=False)
