"""The loss of every model: the sum of the cross entropies of the tokens, unless it has its own."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autotune.shipped.labels import IGNORED_LABEL

TokenLoss = Callable[[Tensor, nn.Linear, Tensor], Tensor]
"""Function of hidden states [batch, sequence, width], head and labels [batch, sequence] that
returns the sum of the token losses as a float32 scalar."""


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the sum of cross entropies in float32 of [batch, sequence, vocabulary] logits."""
    return F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL
    )


class CrossEntropyInFloat32(TorchFunctionMode):
    """Widens 16-bit logits for F.cross_entropy, whose result would have three digits otherwise."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.cross_entropy:
            if args:
                args = (args[0].float(), *args[1:])
            else:
                kwargs["input"] = kwargs["input"].float()
        return func(*args, **kwargs)


def learned_labels(model: nn.Module, labels: Tensor) -> int:
    """Returns the number of labels [batch, sequence] that the model's loss is a sum over."""
    if getattr(model, "ignores_last_label", False):
        labels = labels[:, :-1]
    return int((labels != IGNORED_LABEL).sum().item())


def full_token_loss(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """A `TokenLoss` that computes the logits of the whole batch at once."""
    return next_token_loss(head(hidden), labels)
