"""Several devices in an exported script: the ranks, and what they share out among them.

The order of operations is that of `autotune/techniques/sharding.py`. A script for one device has
nothing of this.
"""

from autotune.exporters.bundle import Part, code, shipped
from autotune.exporters.devices import divides_weights, is_resharded
from autotune.exporters.recipe import Recipe
from autotune.spec.config import TrainingConfig
from autotune.spec.model_choice import MODEL_NAMES


def device_parts(recipe: Recipe) -> list[Part]:
    """Return the definitions of the ranks and of what they share out; none for one device."""
    if recipe.devices == 1:
        return []
    if not divides_weights(recipe.config):
        return [shipped("ranks", "replication")]
    if recipe.device_type == "cpu":
        return [shipped("ranks", "fsdp", "gloo")]
    return [shipped("ranks", "fsdp")]


def distribute_lines(recipe: Recipe) -> str:
    """Return the lines of `Training.__init__` after which `self.module` is to be called.

    They come after the techniques inside the model and before the optimizer, in place of the line
    that applies these techniques.
    """
    config = recipe.config
    if not divides_weights(config):
        return _REPLICATE.replace("REDUCED_IN", repr(config.gradient_reduction).replace("'", '"'))
    is_ours = recipe.workload.model in MODEL_NAMES
    text = _SHARD.replace("SETTINGS", _settings(config))
    if is_ours:
        text = text.replace("FOUND", "").replace("BLOCKS", "list(self.model.blocks)")
    else:
        text = text.replace("FOUND", _FOUND)
        text = text.replace("BLOCKS", "list(getattr(found.owner, found.name))")
    return text.replace("GLOO", _GLOO if recipe.device_type == "cpu" else "")


def _settings(config: TrainingConfig) -> str:
    settings = ["device=DEVICE"]
    if config.sharding == "hsdp":
        settings.append(f"group={config.sharding_group}")
    settings.append(f"reshard_after_forward={is_resharded(config)}")
    if config.precision == "bf16-mixed":
        # Under autocast the products are in 16 bits: the gathered weights may be, too.
        settings.append("param_dtype=torch.bfloat16")
    if config.gradient_reduction == "bf16":
        settings.append("reduce_dtype=torch.bfloat16")
    return "".join(f"            {setting},\n" for setting in settings)


_REPLICATE = """\
        apply_techniques(self.model)
        mesh = init_device_mesh(DEVICE, (rank.size,), mesh_dim_names=("shards",))
        device = torch.device(DEVICE)
        self.module: Any = replicate(self.model, mesh=mesh, device=device)
        self.buckets = GradientBuckets(self.module, reduced_in=REDUCED_IN)"""

_SHARD = """\
        owners = {}
        for name in self.parameters:  # each is replaced by a part of it
            owner, _, attribute = name.rpartition(".")
            owners[name] = (self.model.get_submodule(owner), attribute)
FOUND        apply_techniques(self.model)
        self.module = self.model
        blocks = BLOCKS
        fully_shard_blocks(
            self.model,
            blocks,
SETTINGS        )
GLOO        self.parameters = {
            name: getattr(module, attribute) for name, (module, attribute) in owners.items()
        }"""

_FOUND = """\
        found = find_blocks(self.model)
        assert found is not None, "the model has no list of blocks of one class"
"""
_GLOO = """\
        if DEVICE == "cpu":
            use_gloo(self.model)
"""


def divide_state_part(optimizer: str) -> Part:
    """Return the definition of `divide_state(parameters)`, the first stage of ZeRO.

    `optimizer` is the expression that makes one for `parameters`.
    """
    return code(_DIVIDE_STATE.replace("OPTIMIZER", optimizer))


_DIVIDE_STATE = '''
from typing import Any
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

def divide_state(parameters: list[nn.Parameter]) -> ZeroRedundancyOptimizer:
    """Returns an optimizer whose parameters are divided among the ranks.

    Each rank updates its own and sends them to the others.
    """

    def make_part(parameters: Any, **defaults: Any) -> torch.optim.Optimizer:
        return OPTIMIZER

    return ZeroRedundancyOptimizer(parameters, optimizer_class=make_part, lr=LEARNING_RATE)
'''
