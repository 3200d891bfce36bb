"""Settings that `autotune_launch.py` makes, found by running its lines in this process."""

import os
from contextlib import contextmanager

import torch
import torch._functorch.config
import torch._inductor.config

from autotune.exporters.launch import FILE
from autotune.system.allocator_settings import VARIABLES
from autotune.techniques.compilation import set_mode

SWITCHES = {"flash": "flash", "efficient": "mem_efficient", "cudnn": "cudnn", "math": "math"}


@contextmanager
def settings_undone():
    """Restore matmul precision, budget, kernels and allocator of this process afterwards.

    The compiler's mode is the default before it and after it, whatever other tests have set.
    """
    set_mode("default")
    precision, budget = (
        torch.get_float32_matmul_precision(),
        torch._functorch.config.activation_memory_budget,
    )
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch._functorch.config.activation_memory_budget = budget
        set_mode("default")
        for name in VARIABLES:
            os.environ.pop(name, None)
        for flag in SWITCHES.values():
            getattr(torch.backends.cuda, f"enable_{flag}_sdp")(True)


def allocator_of(variables):
    """Returns the kind of segments that a process with these variables has, whichever its torch."""
    [settings] = {variables.get(name) for name in VARIABLES}
    if settings is None:
        return "default"
    return "expandable" if settings.endswith("expandable_segments:True") else "default"


def compile_mode_of_this_process():
    settings = torch._inductor.config  # torchao sets coordinate_descent_tuning as well
    return {
        (False, False): "default",
        (False, True): "reduce-overhead",
        (True, False): "max-autotune-no-cudagraphs",
        (True, True): "max-autotune",
    }[settings.max_autotune, settings.triton.cudagraphs]


def settings_of_this_process():
    """memory_budget, mode of the compiler, attention, allocator and whether products use TF32."""
    on = [
        kernel
        for kernel, flag in SWITCHES.items()
        if getattr(torch.backends.cuda, f"{flag}_sdp_enabled")()
    ]
    return {
        "memory_budget": float(torch._functorch.config.activation_memory_budget),
        "compile_mode": compile_mode_of_this_process(),
        "attention": on[0] if len(on) == 1 else "auto",
        "allocator": allocator_of(os.environ),
        "tf32": torch.get_float32_matmul_precision() == "high",
    }


def process_settings(export):
    """Returns the settings of the launcher's process; torch's defaults without a launcher."""
    with settings_undone():
        exec(compile(export.files.get(FILE, ""), FILE, "exec"), {"__name__": "launcher"})
        return settings_of_this_process()
