"""`autotune_launch.py`: makes settings that only code can make, then runs the user's script.

torch's activation memory budget has no environment variable, and few trainers have a key for it,
or for the mode of torch.compile.
The choice of attention kernels, TF32 in matrix products and the growth of the allocator are
settings of the process as well.
"""

from collections.abc import Mapping
from typing import Any

from autotune.exporters.promise import literal_lines
from autotune.exporters.recipe import Recipe, in_docstring
from autotune.spec.config import CUDA_GRAPHS, Attention, TrainingConfig
from autotune.system.allocator_settings import VARIABLES

FILE = "autotune_launch.py"
PROCESS_SETTINGS = ("memory_budget", "compile_mode", "attention", "allocator")
"""Techniques that are only a setting of the process. So is TF32, a value of `precision`."""

CONFIG_MODULES = ("torch._functorch.config", "torch._inductor.config")
"""Modules beside torch of which `with_torch` may need one."""

_SWITCHES: Mapping[Attention, str] = {
    "flash": "enable_flash_sdp",
    "efficient": "enable_mem_efficient_sdp",
    "cudnn": "enable_cudnn_sdp",
    "math": "enable_math_sdp",
}


def is_needed(config: TrainingConfig) -> bool:
    """Returns whether `config` has settings of the process that differ from the defaults."""
    if config.precision == "tf32":
        return True
    default = TrainingConfig()
    return any(getattr(config, name) != getattr(default, name) for name in PROCESS_SETTINGS)


def before_torch(config: TrainingConfig) -> list[str]:
    """Returns lines that must run before torch first allocates memory; they need `os`."""
    if config.allocator == "default":
        return []
    return [
        "# The user's other settings stay. Before 2.10 torch knows the older name alone.",
        'own = os.getenv("PYTORCH_CUDA_ALLOC_CONF") or os.getenv("PYTORCH_ALLOC_CONF", "")',
        "for name in ({}):".format(", ".join(f'"{name}"' for name in VARIABLES)),
        '    os.environ[name] = f"{own},expandable_segments:True".lstrip(",")',
    ]


def with_torch(config: TrainingConfig) -> list[str]:
    """Returns lines that must run before the first graph is compiled.

    They need `torch`, `torch._functorch.config` and `torch._inductor.config`.
    """
    lines = []
    if config.precision == "tf32":
        lines.append('torch.set_float32_matmul_precision("high")  # float32 products use TF32')
    if config.memory_budget != 1.0:
        lines.append(f"torch._functorch.config.activation_memory_budget = {config.memory_budget}")
    if config.compile_mode.startswith("max-autotune"):
        lines.append("torch._inductor.config.max_autotune = True")
        lines.append("torch._inductor.config.coordinate_descent_tuning = True")
    if config.compile_mode in CUDA_GRAPHS:
        lines.append("torch._inductor.config.triton.cudagraphs = True")
    if config.attention != "auto":
        lines += [
            f"torch.backends.cuda.{call}({name == config.attention})"
            for name, call in _SWITCHES.items()
        ]
    return lines


_WATCH = (
    "try:",
    "    from autotune_promise import watch_trainers",
    "except ImportError:",
    "    pass  # without that file nothing is compared with the trial",
    "else:",
    "    watch_trainers(TRIAL)",
)


def launcher(recipe: Recipe, trial: Mapping[str, Any] | None = None) -> str:
    """Returns the text of the file, which needs torch and nothing else.

    With `trial` it has the first Trainer of transformers compare its training with it, by
    `autotune_promise.py` beside it.
    """
    config = recipe.config
    lines = before_torch(config)
    settings = with_torch(config)
    if settings:
        lines.append("import torch")
        lines += [f"import {module}" for module in CONFIG_MODULES if module in "".join(settings)]
        lines.append("")
        lines += settings
    if trial is not None:
        lines += ["", *literal_lines("TRIAL", trial), *_WATCH]
    if not lines:
        lines.append("# Nothing to set: this configuration needs no launcher.")
    body = "\n".join(lines)
    origin = in_docstring(recipe.origin)
    return f'''"""Run a training script with the process settings of {origin}.

    python {FILE} train.py --its --arguments
    accelerate launch {FILE} train.py --its --arguments
    python {FILE} -m package.module --its --arguments
"""

import os
import runpy
import sys

{body}

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if sys.argv[1] == "-m":
        sys.argv[:] = sys.argv[2:]
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = sys.argv[1:]
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
'''
