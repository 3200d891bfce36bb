"""torch.compile: each transformer block separately, or the whole model with its loss.

Saves the intermediate results of fused pointwise operations and their memory traffic; costs the
time to compile. By block, one graph serves all blocks, so that compilation takes a fraction of the
time, and gradients are complete block by block, which a step in backward needs. With the whole
model there is more to fuse. Source: https://docs.pytorch.org/docs/stable/torch.compiler.html

| mode | does | costs |
|---|---|---|
| reduce-overhead | launches a graph at once, by CUDA graphs | memory of its own between steps |
| max-autotune-no-cudagraphs | tries kernels and tiles for each product | minutes to compile |
| max-autotune | both | both |
"""

from functools import cache

import torch
import torch._inductor.config

from autotune.errors import first_line_of
from autotune.models.parts import ModelParts
from autotune.shipped.compiling import compile_in_place
from autotune.spec.config import CUDA_GRAPHS, CompileMode, CompileScope
from autotune.system.build_tools import first_compile_error, why_no_compilation


def set_mode(mode: CompileMode) -> None:
    """Sets the mode of everything that the process compiles from now on.

    It is what torch.compile's `mode` sets for one module (`torch._inductor.list_mode_options`).
    """
    tries_kernels = mode.startswith("max-autotune")
    torch._inductor.config.max_autotune = tries_kernels
    torch._inductor.config.coordinate_descent_tuning = tries_kernels
    torch._inductor.config.triton.cudagraphs = mode in CUDA_GRAPHS


def compile_blocks(parts: ModelParts, scope: CompileScope) -> None:
    """Compiles each block of the model, for scope `block`."""
    if scope == "block":
        for block in parts.blocks:
            compile_in_place(block)


def compile_model(parts: ModelParts, scope: CompileScope) -> None:
    """Compiles the whole model, for scope `model`."""
    if scope == "model":
        compile_in_place(parts.model)


def unavailable(scope: CompileScope, *, device: torch.device) -> str | None:
    """Returns why torch.compile does not work on `device`; None if it does.

    It is found by compiling a small function, forward and backward.
    """
    if scope == "none":
        return None
    # Checked first: a hit in the compiler's cache would hide that nothing new can be compiled.
    reason = why_no_compilation(device.type)
    if reason:
        return reason
    return _why_compiling_fails(device)


@cache
def _why_compiling_fails(device: torch.device) -> str | None:
    try:
        compiled = torch.compile(lambda x: (x.sin() * x).sum(), dynamic=False)
        compiled(torch.randn(64, 64, device=device, requires_grad=True)).backward()
    except Exception as error:  # whatever the compiler, the C++ tool chain or Triton raises
        return f"torch.compile fails: {first_line_of(error)}{first_compile_error(str(error))}"
    return None
