"""The steps of a script on several devices, with the loop of `autotune/training/step.py`."""

import torch
from torch import Tensor

from autotune.shipped.ranks import without_reduction
from autotune.shipped.script.held_out import summed_loss
from autotune.shipped.script.written import (
    DEVICE,
    EVALUATION_SEQUENCES,
    IS_COMPILED,
    MICRO_BATCH,
    SEED,
    Sequences,
    Training,
    forward,
)
from autotune.shipped.seeds import seed_generators
from autotune.shipped.token_loss import learned_labels


def train_step(training: Training, batch: tuple[Tensor, Tensor], *, rate: float) -> float:
    """Makes one optimizer step on the global batch; returns the mean token loss before it.

    Losses are divided by the number of labels in the global batch, so that the gradients do not
    depend on the size of the micro batches and on the number of ranks.
    """
    rank = training.rank
    training.updater.set_learning_rate(rate)
    # Ranks take the mean of their losses and gradients, which are parts of a sum.
    labels_per_rank = max(1, learned_labels(training.model, batch[1])) / rank.size
    total = torch.zeros((), device=DEVICE)
    micro_batches = [rank.part_of(part).to(DEVICE).split(MICRO_BATCH) for part in batch]
    last = len(micro_batches[0]) - 1
    for index, (tokens, labels) in enumerate(zip(*micro_batches, strict=True)):
        with without_reduction(training.module, is_last=index == last):
            loss = forward(training.module, tokens.contiguous(), labels.contiguous())
            loss = loss / labels_per_rank
            training.updater.scale(loss).backward()
        total += loss.detach()
    training.updater.step()
    return rank.mean(total).item()


@torch.no_grad()
def evaluate(training: Training, held_out: Sequences) -> float:
    """Returns the mean token loss on the held-out sequences, in micro batches as in training."""
    rank = training.rank
    seed_generators(SEED)
    training.eval()
    if IS_COMPILED:
        start = rank.index * MICRO_BATCH
        summed_loss(training.module, held_out, start)  # compiles the graph without gradients
    total_loss = 0.0
    total_labels = 0.0
    # Each rank has as many micro batches as the others; the last ones may have no labels.
    stride = MICRO_BATCH * rank.size
    end = -(-EVALUATION_SEQUENCES // stride) * stride
    for start in range(rank.index * MICRO_BATCH, end, stride):
        loss, valid_labels = summed_loss(training.module, held_out, start)
        total_loss += loss
        total_labels += valid_labels
    total_loss, total_labels = rank.add_up(total_loss, total_labels)
    return total_loss / max(1, total_labels)
