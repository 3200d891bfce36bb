"""The loss of a script on the held-out text."""

from typing import Any

import numpy
import torch

from autotune.shipped.labels import IGNORED_LABEL
from autotune.shipped.script.written import (
    DEVICE,
    EVALUATION_SEQUENCES,
    MICRO_BATCH,
    Sequences,
    forward,
)
from autotune.shipped.token_loss import learned_labels


def summed_loss(model: Any, held_out: Sequences, start: int) -> tuple[float, int]:
    """Returns the summed loss and the number of labels of the micro batch that begins at `start`.

    The micro batch is always full; rows beyond the held-out sequences have no labels.
    """
    indices = numpy.arange(start, start + MICRO_BATCH)
    beyond = indices >= EVALUATION_SEQUENCES
    tokens, labels = held_out.batch(numpy.where(beyond, 0, indices))
    labels = labels.masked_fill(torch.from_numpy(beyond)[:, None], IGNORED_LABEL)
    loss = forward(model, tokens.contiguous().to(DEVICE), labels.contiguous().to(DEVICE))
    # Where ranks have copies of the model, another module is around it.
    return loss.item(), learned_labels(getattr(model, "module", model), labels)
