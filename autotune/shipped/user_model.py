"""A user's module, called with tokens and labels."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autotune.shipped.own_loss import compare_losses
from autotune.shipped.signature import (
    Expectation,
    LossOfModule,
    Usage,
    entry_of,
    probe_signature,
)
from autotune.shipped.token_loss import CrossEntropyInFloat32, TokenLoss, next_token_loss


class UserModel(nn.Module):
    """forward(tokens, labels), both [batch, sequence] -> summed loss, float32 scalar.

    In training that is the module's own loss where it is another one than the cross entropy of its
    logits: its mean times the number of labels, so that a term which is no sum over tokens counts
    in each micro batch by its share of the labels. In evaluation it is the plain cross entropy
    wherever the module gives logits.
    """

    def __init__(self, network: nn.Module, usage: Usage) -> None:
        super().__init__()
        self.network = network
        self.usage = usage
        self.token_loss: TokenLoss | None = None
        """If set, computes the loss from the input of the head; otherwise the network does."""
        if usage.head_name is not None:
            self.head.__class__ = PassableLinear

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        if self.token_loss is not None:
            return self.token_loss(self.hidden(tokens), self.head, labels)
        own = self._own_loss
        if own is None:
            return next_token_loss(self.usage.logits(self.network, tokens), labels)
        dtypes = {parameter.dtype for parameter in self.network.parameters()}
        is_narrow = torch.bfloat16 in dtypes or torch.float16 in dtypes
        with CrossEntropyInFloat32() if is_narrow else nullcontext():
            output = own.call(self.network, tokens, own.labels_for(labels))
        return own.sum_over(entry_of(output, own.entry), labels)

    @property
    def head(self) -> Any:
        """The linear layer that computes the logits."""
        assert self.usage.head_name is not None
        head: Any = self.network.get_submodule(self.usage.head_name)
        # Where peft trains it whole beside adapters, the frozen one is there as well.
        copies = getattr(head, "modules_to_save", None)
        return head if copies is None else copies["default"]

    @property
    def ignores_last_label(self) -> bool:
        """Whether the loss has no term for the last token of a sequence."""
        own = self._own_loss
        return own is not None and own.shifts_labels

    @property
    def _own_loss(self) -> LossOfModule | None:
        """The module's own loss where it is the one to compute."""
        if self.usage.logits_call is not None and not self.training:
            return None
        return self.usage.own_loss

    def hidden(self, tokens: Tensor) -> Tensor:
        """Returns the input of the head, [batch, sequence, width]."""
        self.head.is_passed = True
        try:
            return self.usage.logits(self.network, tokens)
        finally:
            self.head.is_passed = False


class PassableLinear(nn.Linear):
    """A head that returns its input unchanged while `is_passed` is set."""

    is_passed = False

    def forward(self, input: Tensor) -> Tensor:
        return input if self.is_passed else super().forward(input)


@torch.no_grad()
def user_model(
    network: nn.Module,
    expected: Expectation,
    *,
    make_real: Callable[[], nn.Module] | None = None,
) -> UserModel:
    """Returns the wrapped network, without a head if it fails when the head returns its input.

    A network that relies on the width of its logits fails. `make_real` makes the network once more,
    with weights on the CPU, if it has none. Its buffers stay as they are. Raises UnusableModule.
    """
    buffers = [(buffer, buffer.clone()) for buffer in network.buffers()]
    real = make_real or partial(copy.deepcopy, network)
    with torch.enable_grad():  # which of several numbers is the loss shows by its gradient
        usage = probe_signature(
            network, expected, compare_losses=partial(compare_losses, network, expected, real)
        )
    model = UserModel(network, usage)
    if usage.head_name is not None:
        device = model.head.weight.device
        try:
            model.hidden(torch.zeros(1, expected.sequence_length, dtype=torch.int64, device=device))
        except Exception:
            model.usage = replace(usage, head_name=None)
    for buffer, before in buffers:
        buffer.copy_(before)
    return model
