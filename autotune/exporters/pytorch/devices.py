"""Several devices in an exported script: the ranks, and what they share out among them.

The order of operations is that of `autotune/techniques/sharding.py`. A script for one device has
nothing of this.
"""

from autotune.exporters.bundle import Part, code, shipped
from autotune.exporters.devices import divides_weights, is_resharded
from autotune.exporters.recipe import Recipe
from autotune.spec.config import TrainingConfig


def device_parts(recipe: Recipe) -> list[Part]:
    """Returns the definitions of the ranks and of `Training`, whose model they share out."""
    config = recipe.config
    if divides_weights(config):
        return [_share_out(recipe), shipped("script.sharded")]
    settings = f'GRADIENTS_ADDED_UP_IN = "{config.gradient_reduction}"'
    return [code(settings), shipped("script.replicated")]


def _share_out(recipe: Recipe) -> Part:
    """Returns the definition of `share_out(model, blocks)`."""
    imports = [
        "import torch",
        "from torch import nn",
        "from autotune.shipped.fsdp import fully_shard_blocks",
    ]
    lines = ["fully_shard_blocks(", "    model,", "    blocks,"]
    lines += [f"    {setting}," for setting in _settings(recipe.config)]
    lines.append(")")
    if recipe.device_type == "cpu":
        imports.append("from autotune.shipped.gloo import use_gloo")
        lines += ['if DEVICE == "cpu":', "    use_gloo(model)"]
    body = "\n".join(f"    {line}" for line in lines)
    return code(
        "\n".join(imports)
        + "\n\ndef share_out(model: nn.Module, blocks: list[nn.Module]) -> None:\n"
        + body
    )


def _settings(config: TrainingConfig) -> list[str]:
    settings = ["device=DEVICE"]
    if config.sharding == "hsdp":
        settings.append(f"group={config.sharding_group}")
    settings.append(f"reshard_after_forward={is_resharded(config)}")
    if config.precision == "bf16-mixed":
        # Under autocast the products are in 16 bits: the gathered weights may be, too.
        settings.append("param_dtype=torch.bfloat16")
    if config.gradient_reduction == "bf16":
        settings.append("reduce_dtype=torch.bfloat16")
    return settings
