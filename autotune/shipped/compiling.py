"""Compiles modules in place."""

import torch
import torch._dynamo.config
from torch import nn

from autotune.shipped.changed_method import Method, change_method


def compile_in_place(module: nn.Module) -> None:
    """Compiles the forward pass of the module; copies and pickles of it are not compiled."""
    # Recomputed code changes attributes, such as a count, once, as without the compiler.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    module.compile(dynamic=False)
    if type(module).__getstate__ is not nn.Module.__getstate__:  # torch's leaves the graph out
        change_method(module, "forward", _unchanged)


def _unchanged(forward: Method) -> Method:
    return forward
