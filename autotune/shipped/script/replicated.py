"""A training on several devices, each of which has a copy of the model."""

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from autotune.shipped.ranks import Rank
from autotune.shipped.replication import GradientBuckets, replicate
from autotune.shipped.script.written import (
    DEVICE,
    GRADIENTS_ADDED_UP_IN,
    SEED,
    Updater,
    apply_techniques,
    make_model,
    prepare,
)
from autotune.shipped.seeds import seed_generators


class Training:
    """The model with its techniques, a copy on each rank, and its updater."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        seed_generators(SEED)
        self.model: Any = make_model()
        self.model.train()
        prepare(self.model)
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        """By their names before techniques wrap parts of the model."""
        apply_techniques(self.model)
        mesh = init_device_mesh(DEVICE, (rank.size,), mesh_dim_names=("shards",))
        self.module: Any = replicate(self.model, mesh=mesh, device=torch.device(DEVICE))
        self.buckets = GradientBuckets(self.module, reduced_in=GRADIENTS_ADDED_UP_IN)
        self.updater = Updater(list(self.parameters.values()), self.model)
        seed_generators(SEED)
        torch.manual_seed(SEED + 1 + rank.index)  # each rank drops other activations

    def eval(self) -> None:
        self.module.eval()


def save(training: Training, file: str) -> None:
    """Saves the trained weights by their names."""
    if training.rank.index == 0:
        weights = {name: weight.detach().cpu() for name, weight in training.parameters.items()}
        torch.save(weights, file)
