"""Several devices in an exported script: the ranks, and what they share out among them.

The order of operations is that of `autotune/techniques/sharding.py`. A script for one device has
nothing of this.
"""

from autotune.exporters.devices import divides_weights, is_resharded
from autotune.exporters.pytorch.pieces import Piece, piece, quoted_source
from autotune.exporters.recipe import Recipe
from autotune.exporters.source import defined_names
from autotune.spec.config import TrainingConfig
from autotune.spec.model_choice import MODEL_NAMES

_TORCH = ("import torch", "from torch import Tensor, nn")
_ANY = "from typing import Any"


def device_pieces(recipe: Recipe) -> list[Piece]:
    """Return the definitions of `Rank`, `join` and `Training.distribute`; none for one device."""
    if recipe.devices == 1:
        return []
    imports = (
        *_TORCH,
        _ANY,
        "import os",
        "import torch.distributed",
        "from collections.abc import Iterator",
        "from contextlib import AbstractContextManager, contextmanager, nullcontext",
        "from dataclasses import dataclass",
        "from datetime import timedelta",
        "from torch.nn.parallel import DistributedDataParallel",
    )
    names = ["Rank", "join", "without_reduction"]
    ranks = quoted_source("exporters.shipped.ranks", *names, imports=imports)
    if divides_weights(recipe.config):
        return [ranks, *_sharded(recipe)]
    return [ranks, *_replicated()]


def _sharded(recipe: Recipe) -> list[Piece]:
    shard = quoted_source(
        "exporters.shipped.autotune_blocks",
        "fully_shard_blocks",
        imports=(
            *_TORCH,
            "from torch.distributed.device_mesh import init_device_mesh",
            "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard",
        ),
    )
    if recipe.device_type != "cpu":
        return [shard]
    gloo = quoted_source(
        "techniques.gloo",
        *defined_names("techniques.gloo"),
        imports=(
            *_TORCH,
            _ANY,
            "import time",
            "import torch.distributed",
            "from collections.abc import Sequence",
            "from torch.distributed.fsdp import FSDPModule",
            "from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter",
        ),
    )
    return [shard, gloo]


def _replicated() -> list[Piece]:
    quoted = quoted_source(
        "techniques.sharding",
        *("GradientBuckets", "_replicate"),
        imports=(
            *_TORCH,
            _ANY,
            "import torch._dynamo.config",
            "import torch.distributed",
            "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks",
            "from torch.distributed.device_mesh import DeviceMesh, init_device_mesh",
            "from torch.nn.parallel import DistributedDataParallel",
        ),
    )
    text = quoted.text
    for old, new in _UNQUOTED.items():
        assert old in text, f"the definitions of techniques.sharding do not contain {old!r}"
        text = text.replace(old, new)
    return [Piece(text, quoted.imports)]


_UNQUOTED = {
    "reduced_in: GradientReduction": "reduced_in: str",
    # torch compares annotations with its classes, and those of the script are not evaluated.
    "def hook(group: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:": (
        "def hook(group, bucket):"
    ),
}
"""What a script has otherwise than the definitions that it quotes."""


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
        self.module: Any = _replicate(self.model, mesh=mesh, device=device)
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


def divide_state_piece(optimizer: str) -> Piece:
    """Return the definition of `divide_state(parameters)`, the first stage of ZeRO.

    `optimizer` is the expression that makes one for `parameters`.
    """
    text = _DIVIDE_STATE.replace("OPTIMIZER", optimizer)
    return piece(text, *_TORCH, _ANY, "from torch.distributed.optim import ZeroRedundancyOptimizer")


_DIVIDE_STATE = '''
def divide_state(parameters: list[nn.Parameter]) -> ZeroRedundancyOptimizer:
    """Returns an optimizer whose parameters are divided among the ranks.

    Each rank updates its own and sends them to the others.
    """

    def make_part(parameters: Any, **defaults: Any) -> torch.optim.Optimizer:
        return OPTIMIZER

    return ZeroRedundancyOptimizer(parameters, optimizer_class=make_part, lr=LEARNING_RATE)
'''
