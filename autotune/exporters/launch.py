"""`autotune_launch.py`: sets what only code can set, then runs a training script of the user's own.

torch's activation memory budget has no environment variable and few trainers a key for it; which
attention kernel answers, whether products use TF32 and how the allocator grows are settings of the
process as well.
"""

from collections.abc import Mapping

from autotune.exporters.recipe import Recipe, in_docstring
from autotune.spec.config import Attention, TrainingConfig

FILE = "autotune_launch.py"
SETTINGS_IT_MAKES = ("memory_budget", "attention", "allocator")
"""Techniques that are nothing but a setting of the process. TF32 is one too, as a value of
`precision`."""

_SWITCHES: Mapping[Attention, str] = {
    "flash": "enable_flash_sdp",
    "efficient": "enable_mem_efficient_sdp",
    "cudnn": "enable_cudnn_sdp",
    "math": "enable_math_sdp",
}


def is_needed(config: TrainingConfig) -> bool:
    plain = TrainingConfig()
    own = any(getattr(config, name) != getattr(plain, name) for name in SETTINGS_IT_MAKES)
    return own or config.precision == "tf32"


def before_torch(config: TrainingConfig) -> list[str]:
    """Lines that must run before torch first allocates; they need `os`."""
    if config.allocator == "default":
        return []
    return ['os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"']


def with_torch(config: TrainingConfig) -> list[str]:
    """Lines that must run before the first graph is compiled; they need `torch` and `torch._functorch.config`."""
    lines = []
    if config.precision == "tf32":
        lines.append('torch.set_float32_matmul_precision("high")  # products of float32 in TF32')
    if config.memory_budget != 1.0:
        lines.append(f"torch._functorch.config.activation_memory_budget = {config.memory_budget}")
    if config.attention != "auto":
        lines += [
            f"torch.backends.cuda.{call}({name == config.attention})"
            for name, call in _SWITCHES.items()
        ]
    return lines


def launcher(recipe: Recipe) -> str:
    """The text of the file. Needs torch and nothing else."""
    config = recipe.config
    lines = before_torch(config)
    if settings := with_torch(config):
        lines += [
            "import torch",
            *(["import torch._functorch.config"] if config.memory_budget != 1.0 else []),
            "",
        ]
    body = (
        "\n".join([*lines, *settings]) or "# Nothing to set: this configuration needs no launcher."
    )
    origin = in_docstring(recipe.origin)
    return f'''"""Runs a training script with the settings of its process that {origin} was measured with.

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
