"""torch.compile: each transformer block on its own, or the whole model with its loss.

Saves the intermediate results of fused pointwise operations and their memory traffic; costs the
time to compile. By block, one graph serves all blocks alike, so that compilation takes a fraction
of the time, and gradients are handed out block by block, which a step in backward needs; the whole
model leaves more to fuse. Source: https://docs.pytorch.org/docs/stable/torch.compiler.html
"""

from functools import cache

import torch

from autotune.build_tools import why_no_compilation
from autotune.models.parts import ModelParts
from autotune.spec.config import CompileScope


def compile_blocks(parts: ModelParts, scope: CompileScope) -> None:
    if scope == "block":
        for block in parts.blocks:
            block.compile(dynamic=False)


def compile_model(parts: ModelParts, scope: CompileScope) -> None:
    if scope == "model":
        parts.model.compile(dynamic=False)


def unavailable(scope: CompileScope, *, device: torch.device) -> str | None:
    """Why torch.compile does not work here, found by compiling a small function with its backward; None if it does."""
    if scope == "none":
        return None
    # First: what is found in a compiler's cache would hide that nothing new can be compiled.
    return why_no_compilation(device.type) or _why_compiling_fails(device)


@cache
def _why_compiling_fails(device: torch.device) -> str | None:
    try:
        compiled = torch.compile(lambda x: (x.sin() * x).sum(), dynamic=False)
        compiled(torch.randn(64, 64, device=device, requires_grad=True)).backward()
    except Exception as error:  # whatever the compiler, the C++ tool chain or Triton raises
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"torch.compile fails: {lines[0] if lines else type(error).__name__}"
    return None
