"""A training on several devices, which share out the weights of the model."""

from typing import Any

import torch

from autotune.shipped.blocks import find_blocks
from autotune.shipped.ranks import Rank
from autotune.shipped.script.written import (
    SEED,
    Updater,
    apply_techniques,
    make_model,
    prepare,
    share_out,
)
from autotune.shipped.seeds import seed_generators


class Training:
    """The model with its techniques, divided among the ranks, and its updater."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        seed_generators(SEED)
        self.model: Any = make_model()
        self.model.train()
        prepare(self.model)
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        owners = {}
        for name in names:  # each parameter is replaced by a part of it
            owner, _, attribute = name.rpartition(".")
            owners[name] = (self.model.get_submodule(owner), attribute)
        found = find_blocks(self.model)
        assert found is not None, "the model has no list of blocks of one class"
        apply_techniques(self.model)
        self.module: Any = self.model
        share_out(self.model, list(getattr(found.owner, found.name)))
        self.parameters: dict[str, Any] = {
            name: getattr(module, attribute) for name, (module, attribute) in owners.items()
        }
        """By their names before techniques wrap parts of the model."""
        self.updater = Updater(list(self.parameters.values()), self.model)
        seed_generators(SEED)
        torch.manual_seed(SEED + 1 + rank.index)  # each rank drops other activations

    def eval(self) -> None:
        self.module.eval()
        # No backward pass follows, for which the weights of a block would have to stay.
        self.module.set_reshard_after_forward(True)


def save(training: Training, file: str) -> None:
    """Saves the trained weights by their names; the ranks put them together, one by one."""
    weights = {
        name: weight.full_tensor().detach().cpu() for name, weight in training.parameters.items()
    }
    if training.rank.index == 0:
        torch.save(weights, file)
