"""A user's module, called with tokens and labels."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autotune.shipped.labels import IGNORED_LABEL
from autotune.shipped.signature import Expectation, Usage, entry_of, probe_signature
from autotune.shipped.token_loss import TokenLoss, next_token_loss


class UserModel(nn.Module):
    """forward(tokens, labels), both [batch, sequence] -> sum of token losses, float32 scalar."""

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
        if self.usage.loss_entry is None:
            return next_token_loss(self._run(tokens, None, self.usage.logits_entry), labels)
        return self._summed_loss(tokens, labels)

    @property
    def head(self) -> Any:
        """The linear layer that computes the logits."""
        assert self.usage.head_name is not None
        return self.network.get_submodule(self.usage.head_name)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the input of the head, [batch, sequence, width]."""
        # Zeros are valid labels for any vocabulary; the loss they give is not used.
        labels = torch.zeros_like(tokens) if self.usage.takes_labels else None
        self.head.is_passed = True
        try:
            return self._run(tokens, labels, self.usage.logits_entry)
        finally:
            self.head.is_passed = False

    def _summed_loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        is_valid = labels != IGNORED_LABEL
        network_labels = torch.where(is_valid, labels, self.usage.ignored_label)
        mean = self._run(tokens, network_labels, self.usage.loss_entry).float()
        count = is_valid.sum()
        return torch.where(count > 0, mean * count, 0.0)  # the mean of no labels is NaN

    def _run(self, tokens: Tensor, labels: Tensor | None, entry: Any) -> Tensor:
        output: Tensor = entry_of(self.usage.call(self.network, tokens, labels), entry)
        return output


class PassableLinear(nn.Linear):
    """A head that returns its input unchanged while `is_passed` is set."""

    is_passed = False

    def forward(self, input: Tensor) -> Tensor:
        return input if self.is_passed else super().forward(input)


@torch.no_grad()
def user_model(network: nn.Module, expected: Expectation) -> UserModel:
    """Return the wrapped network, without a head if it fails when the head returns its input.

    A network that relies on the width of its logits fails. Raises UnusableModule.
    """
    usage = probe_signature(network, expected)
    model = UserModel(network, usage)
    if usage.head_name is not None:
        device = model.head.weight.device
        try:
            model.hidden(torch.zeros(1, expected.sequence_length, dtype=torch.int64, device=device))
        except Exception:
            model.usage = replace(usage, head_name=None)
    return model
