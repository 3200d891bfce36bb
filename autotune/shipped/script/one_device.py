"""The training of a script on one device, with the loop of `autotune/training/step.py`."""

from typing import Any

import torch
from torch import Tensor

from autotune.shipped.script.held_out import summed_loss
from autotune.shipped.script.written import (
    DEVICE,
    EVALUATION_SEQUENCES,
    IS_COMPILED,
    MICRO_BATCH,
    SEED,
    Sequences,
    Updater,
    apply_techniques,
    forward,
    make_model,
    prepare,
)
from autotune.shipped.seeds import seed_generators
from autotune.shipped.token_loss import learned_labels


class Training:
    """The model with its techniques, and its updater."""

    def __init__(self) -> None:
        seed_generators(SEED)
        self.model: Any = make_model()
        self.model.train()
        seed_generators(SEED)  # dropout is the same as with weights from a file
        prepare(self.model)
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        """By their names before techniques wrap parts of the model."""
        apply_techniques(self.model)
        self.updater = Updater(list(self.parameters.values()), self.model)


def train_step(training: Training, batch: tuple[Tensor, Tensor], *, rate: float) -> float:
    """Makes one optimizer step on the global batch; returns the mean token loss before it.

    Losses are divided by the number of labels in the global batch, so that the gradients do not
    depend on the size of the micro batches.
    """
    training.updater.set_learning_rate(rate)
    valid_labels = max(1, learned_labels(training.model, batch[1]))
    total = torch.zeros((), device=DEVICE)
    micro_batches = (part.to(DEVICE).split(MICRO_BATCH) for part in batch)
    for tokens, labels in zip(*micro_batches, strict=True):
        loss = forward(training.model, tokens.contiguous(), labels.contiguous()) / valid_labels
        training.updater.scale(loss).backward()
        total += loss.detach()
    training.updater.step()
    return total.item()


@torch.no_grad()
def evaluate(model: Any, held_out: Sequences) -> float:
    """Returns the mean token loss on the held-out sequences, in micro batches as in training."""
    seed_generators(SEED)
    model.eval()
    if IS_COMPILED:
        summed_loss(model, held_out, 0)  # compiles the graph without gradients
    total_loss = 0.0
    total_labels = 0
    for start in range(0, EVALUATION_SEQUENCES, MICRO_BATCH):
        loss, valid_labels = summed_loss(model, held_out, start)
        total_loss += loss
        total_labels += valid_labels
    model.train()
    return total_loss / max(1, total_labels)
